"""Tensor -> abs min, abs max: against the plain definition, over dtypes, sizes and layouts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import rankwatch.measure.tape as tape_module
from rankwatch.measure.extremes import FEW, SCRATCH_BYTES, Unmeasurable, count_non_finite, local
from rankwatch.measure.tape import Cell, Tape

CHUNK = SCRATCH_BYTES * torch.get_num_threads() // 4

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
EIGHT_BITS = tuple(
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
    if hasattr(torch, name)
)


def measured(tensor: Tensor, tape: Tape | None = None) -> tuple[float, float]:
    tape = tape or Tape()
    cell = tape.write(local(tensor), None)
    tape.read()
    return cell.low, cell.high


@given(values=st.lists(st.floats(width=16, allow_nan=False), min_size=1, max_size=50), dtype=st.sampled_from(FLOATS))
def test_abs_min_and_abs_max(values: list[float], dtype: torch.dtype) -> None:
    tensor = torch.tensor(values, dtype=dtype)
    expected = [abs(value) for value in tensor.tolist()]
    assert measured(tensor) == (min(expected), max(expected))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", [1, 7, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5])
def test_every_element_counts_at_any_size(dtype: torch.dtype, size: int) -> None:
    tape = Tape()
    for place in {0, size // 2, size - 1}:
        tensor = torch.full((size,), 2.0, dtype=dtype)
        tensor[place] = -3.0
        assert measured(tensor, tape)[1] == 3.0
        tensor[place] = -0.5
        assert measured(tensor, tape)[0] == 0.5
        tensor[place] = math.inf
        assert measured(tensor, tape)[1] == math.inf
        tensor[place] = math.nan
        assert all(math.isnan(value) for value in measured(tensor, tape))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", [FEW, FEW + 1])
def test_few_elements_and_many_have_the_same_numbers(dtype: torch.dtype, size: int) -> None:
    """They are measured by other operators: as floats, and as integers."""
    info = torch.finfo(dtype)
    for ends in [
        (info.smallest_normal / 4, info.max),
        (-0.0, 1.0),
        (-info.tiny, math.inf),
        (0.0, math.nan),
        (-1.0, -math.inf),
    ]:
        tensor = torch.full((size,), 1.0, dtype=dtype)
        tensor[0], tensor[-1] = ends
        magnitudes = tensor.double().abs()
        low, high = measured(tensor)
        expected = float(magnitudes.min()), float(magnitudes.max())
        assert math.isnan(high) if math.isnan(ends[1]) else (low, high) == expected


def test_few_elements_of_any_layout_and_with_their_sign_changed_as_they_are_read() -> None:
    tape = Tape()
    grid = torch.arange(-4.0, 8.0).view(3, 4)
    assert measured(grid.t(), tape) == (0.0, 7.0)
    assert measured(grid[:, ::2], tape) == (0.0, 6.0)
    assert measured(torch.tensor([1 + 2j, 3 - 5j]).conj().imag, tape) == (2.0, 5.0)


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.tensor([True, False]), (0.0, 1.0)),
        (torch.tensor([-128, 3], dtype=torch.int8), (3.0, 128.0)),
        (torch.tensor([2**40, -7]), (7.0, 2.0**40)),
        (torch.tensor([3 + 4j, 1 + 0j]), (1.0, 5.0)),
        (torch.tensor(-2.5), (2.5, 2.5)),
        (torch.tensor([[1.0, -5.0], [2.0, 3.0]]).t(), (1.0, 5.0)),
        (torch.tensor([1.0, 9.0, -4.0, 9.0])[::2], (1.0, 4.0)),
        (torch.tensor([[-2.0]]).expand(3, 4), (2.0, 2.0)),
        (torch.arange(1.0, 25.0).view(2, 3, 4).permute(2, 0, 1), (1.0, 24.0)),
        (torch.arange(1.0, 25.0).view(2, 3, 4).permute(2, 0, 1)[:, :, :2], (1.0, 20.0)),
        (torch.arange(1.0, 5.0).view(4, 1).expand(4, 3).t(), (1.0, 4.0)),
    ],
)
def test_other_dtypes_and_layouts(tensor: Tensor, expected: tuple[float, float]) -> None:
    assert measured(tensor) == expected


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(3, device="meta"),
        torch.eye(3).to_sparse(),
        torch.eye(4).to_sparse_csr(),
        torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
        torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    ],
    ids=["meta", "sparse", "csr", "nested", "quantised"],
)
def test_what_cannot_be_measured_says_so(tensor: Tensor) -> None:
    with pytest.raises(Unmeasurable):
        Tape().write(tensor, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.complex64, torch.float8_e4m3fn])
def test_large_tensors_without_a_dense_layout(dtype: torch.dtype) -> None:
    values = torch.ones(7, 3, CHUNK // 4)
    values[0, 0, 0], values[3, 1, 17] = 100, 7  # one that the view leaves out, one it holds
    view = values.to(dtype).transpose(0, 1)[:, 1:5, : CHUNK // 5]
    assert measured(view) == (1.0, 7.0)


def test_memory_that_was_given_back_is_not_read() -> None:
    tensor = torch.ones(1000)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(Unmeasurable):
        measured(tensor)


def test_the_scratch_survives_inference_mode() -> None:
    tape = Tape()
    with torch.inference_mode():
        assert measured(torch.tensor([2.0]), tape) == (2.0, 2.0)
    assert measured(torch.tensor([3.0]), tape) == (3.0, 3.0)


def test_counts_after_a_trip() -> None:
    assert count_non_finite(torch.tensor([[1.0, math.nan], [math.inf, -math.inf]])) == ((2, 2), 4, 1, 2)
    assert count_non_finite(torch.tensor([1, 2])) == ((2,), 2, 0, 0)
    assert count_non_finite(torch.tensor([1.0, math.nan]).to(torch.float8_e5m2)).nans == 1
    assert count_non_finite(math.inf) == ((), 1, 0, 1)


class OnCuda(torch.Tensor):
    """A tensor of the host that says it is on a GPU."""

    is_cuda, is_cpu = True, False

    def get_device(self) -> int:
        return 0


class Streams:
    """Streams of a GPU that is not there. ``within``: those in which the host has read."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.current, self.is_capturing, self.within = 0, False, list[int]()
        patch.setattr(tape_module, "raw_stream", lambda index: self.current)
        patch.setattr(tape_module, "_stream_on", lambda device: self.current)
        patch.setattr(tape_module, "_within", self.enter)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.is_capturing)

    @contextmanager
    def enter(self, stream: int) -> Iterator[None]:
        self.within.append(stream)
        yield


@pytest.mark.parametrize("is_later", [False, True])
def test_rows_are_read_in_the_stream_in_which_they_were_written(is_later: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    streams, tape, cells = Streams(monkeypatch), Tape(), []
    for stream, value in ((1, 2.0), (2, math.inf), (1, 3.0), (3, 4.0)):
        streams.current = stream
        cells.append(tape.write(torch.full((3,), value).as_subclass(OnCuda), None))
    streams.current = 1
    assert tape.read_later().finish() if is_later else tape.read()
    assert sorted(streams.within) == [1, 2, 3]
    assert [(cell.low, cell.high) for cell in cells] == [(2.0, 2.0), (math.inf, math.inf), (3.0, 3.0), (4.0, 4.0)]


def test_one_transfer_brings_the_numbers_of_all_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of tensors that the kernel cannot measure, and those that a compiled graph has measured."""
    streams, tape = Streams(monkeypatch), Tape()
    streams.current = 1
    ones, two = torch.ones(2, 3), Cell()
    values = [
        *(ones.to(dtype) for dtype in (*FLOATS, *EIGHT_BITS)),
        *(torch.tensor([-(2**63), 2**53 + 1]), torch.tensor([True, False]), torch.tensor([3 + 4j]), ones.int()[:, ::2]),
    ]
    cells = [tape.write(one.as_subclass(OnCuda), None) for one in values]
    tape.take(torch.tensor([[2.0, math.inf]], dtype=torch.float64).as_subclass(OnCuda), [two])
    assert tape.read()
    assert streams.within == [1]
    ends = [(2.0**53, 2.0**63), (0.0, 1.0), (5.0, 5.0), (1.0, 1.0), (2.0, math.inf)]
    assert [(cell.low, cell.high) for cell in (*cells, two)] == [(1.0, 1.0)] * len((*FLOATS, *EIGHT_BITS)) + ends


def test_nothing_is_measured_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    streams, tape = Streams(monkeypatch), Tape()
    streams.is_capturing = True
    with pytest.raises(Unmeasurable, match="captured"):
        tape.write(torch.ones(3).as_subclass(OnCuda), None)
    assert (tape.read(), streams.within) == (False, [])
