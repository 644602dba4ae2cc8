"""The Triton kernel against torch's aminmax: on a GPU where there is one, else in Triton's interpreter, on the host.

The interpreter has to be chosen before triton is imported, so a process of its own runs this file again (the last test).
"""

from __future__ import annotations

import importlib.util
import math
import os
import random
import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch._C._autograd import DeviceType

from jobs import ROOT, environment
from rankwatch.measure import kernel
from rankwatch.measure.tape import Tape
from rankwatch.replicas.checksum import write_all

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
TRITON = importlib.util.find_spec("triton") is not None
DTYPES = tuple(kernel._FORMATS)
FLOATS = tuple(dtype for dtype in DTYPES if dtype.is_floating_point)
INTEGERS = tuple(dtype for dtype in DTYPES if not dtype.is_floating_point)
SIGNED = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}

needs_triton = pytest.mark.skipif(not TRITON, reason="triton is not installed")
launches = pytest.mark.skipif(
    not TRITON or (DEVICE == "cpu" and not INTERPRETED),
    reason="triton is not installed" if not TRITON else "no GPU: runs in test_all_of_this_in_the_interpreter",
)
needs_cuda = pytest.mark.skipif(
    not TRITON or DEVICE == "cpu", reason="no GPU" if DEVICE == "cpu" else "triton is not installed"
)


def empty_cells() -> Tensor:
    return torch.tensor(kernel.EMPTY, dtype=torch.int64, device=DEVICE)


def recorded(values: Tensor, cells: Tensor | None = None) -> tuple[float, float]:
    cells = empty_cells() if cells is None else cells
    assert kernel.is_supported(values)
    kernel.record(values, cells)
    return numbers(cells)


def numbers(cells: Tensor) -> tuple[float, float]:
    smallest, largest = cells.view(torch.float64).tolist()
    return smallest, largest


def check(values: Tensor) -> None:
    """torch has one nan make both extremes nan; the kernel has it only make the largest one."""
    smallest, largest = recorded(values)
    magnitudes = values.cpu().double().abs()
    finite = magnitudes[~magnitudes.isnan()]
    assert math.isnan(smallest) if finite.numel() == 0 else smallest == finite.min()
    assert math.isnan(largest) if finite.numel() < magnitudes.numel() else largest == magnitudes.max()


def patterns(dtype: torch.dtype, size: int, seed: int = 0) -> Tensor:
    """Random bits of a dtype: of floats, with denormals, zeros, infs and nans in about their natural share."""
    generator = torch.Generator().manual_seed(seed)
    content = torch.randint(0, 256, (size * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return content.view(dtype).to(DEVICE)


@launches
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", [1, 2, 7, 16, 33, 1023, 1024, 1025, 100_003])
def test_random_values(dtype: torch.dtype, size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    check((torch.randn(size, generator=generator) * 20).to(dtype).to(DEVICE))
    check(patterns(dtype, size))
    # Without nan and inf, so that the largest of random patterns is not the same each time.
    finite = patterns(dtype, size).double().nan_to_num(1.0, 2.0, -2.0)
    check(finite.to(dtype))


@launches
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_integers_have_the_numbers_of_the_host(dtype: torch.dtype, seed: int) -> None:
    """Of any size and alignment, up to several programs; beyond 2^53 they are rounded as torch rounds them."""
    drawn = random.Random(f"{dtype} {seed}")
    low, high = (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    edges = (low, low + 1, high, high - 1, 0, 1, -1, 2**24 + 1, 2**53 + 1, -(2**53) - 1, 2**54 + 2, 2**63 + 1025)
    ends = [edge for edge in edges if low <= edge <= high]
    block = 16 * kernel._ROWS // dtype.itemsize
    for size in (1, 1, 2, 3, 7, 20, 60, block - 1, block + 9, 4 * block + 3):
        start, some = drawn.randrange(17), drawn.choices(ends, k=min(size, 8))
        some = [end if drawn.random() < 0.5 else drawn.randint(low, high) for end in some]
        values = torch.tensor(some * (size // len(some)), dtype=dtype)
        values = torch.cat((values.new_zeros(start), values))[start:]
        tape = Tape()
        cell = tape.write(values, None)
        tape.read()
        assert recorded(values.to(DEVICE)) == (cell.low, cell.high)
        assert recorded(values.to(DEVICE).view(-1, len(some)).t()) == (cell.low, cell.high)


@launches
@pytest.mark.parametrize(
    ("dtype", "values", "expected"),
    [
        (torch.int64, [-(2**63), 2**63 - 1], (2.0**63, 2.0**63)),
        (torch.int64, [2**53 + 1, -(2**53) - 3], (2.0**53, 2.0**53 + 4)),
        (torch.uint64, [2**64 - 1, 2**63], (2.0**63, 2.0**64)),
        (torch.int32, [-(2**31), 7], (7.0, 2.0**31)),
        (torch.uint32, [2**32 - 1, 2**31], (2.0**31, 2.0**32 - 1)),
        (torch.int8, [-128, 127], (127.0, 128.0)),
        (torch.bool, [True, True], (1.0, 1.0)),
        (torch.bool, [True, False], (0.0, 1.0)),
    ],
)
def test_the_ends_of_integers(dtype: torch.dtype, values: list[int], expected: tuple[float, float]) -> None:
    assert recorded(torch.tensor(values, dtype=dtype, device=DEVICE)) == expected


@launches
def test_any_byte_but_0_is_true() -> None:
    assert recorded(torch.tensor([2, 255, 128], dtype=torch.uint8, device=DEVICE).view(torch.bool)) == (1.0, 1.0)


@launches
@pytest.mark.parametrize("dtype", FLOATS)
def test_every_bit_pattern_alone(dtype: torch.dtype) -> None:
    """All of an eight-bit dtype; of wider ones, each exponent with the smallest and the largest mantissas."""
    width = 8 * dtype.itemsize
    mantissa = {torch.float64: 52, torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}.get(dtype, 0)
    edges = {0, 1, 2**mantissa - 1} if mantissa else {0}
    step = (32 if width == 64 else 4) if INTERPRETED and mantissa else 1
    heads = range(0, 2**width, 2**mantissa * step)
    special = {0, 2 ** (width - 1) - 1} | {head | edge for head in heads for edge in edges}
    signed = [pattern - 2**width if pattern >= 2 ** (width - 1) else pattern for pattern in sorted(special)]
    for value in torch.tensor(signed, dtype=SIGNED[width // 8]).view(dtype).to(DEVICE):
        check(value)


@launches
@pytest.mark.parametrize(
    ("values", "smallest", "largest"),
    [
        ([0x80000000], 0.0, 0.0),  # -0
        ([0x80000001, 0x3F800000], 2.0**-149, 1.0),  # the smallest denormal
        ([0x007FFFFF, 0x807FFFFE], 2.0**-126 - 2.0**-148, 2.0**-126 - 2.0**-149),  # nothing but denormals
        ([0xFF800000, 0x7F7FFFFF], 2.0**128 - 2.0**104, math.inf),  # -inf
        ([0x7F800000, 0x7F800001], math.inf, math.nan),  # the nan next to inf, a signalling one
        ([0x7F800000, 0xFFC12345, 0], 0.0, math.nan),  # a negative nan with a payload
        ([0xFFFFFFFF, 0x7F800000], math.inf, math.nan),
    ],
)
def test_special_values(values: list[int], smallest: float, largest: float) -> None:
    integers = torch.tensor(values, dtype=torch.uint32, device=DEVICE)
    for size in (len(values), 5000):
        tensor = integers[0].repeat(size)
        tensor[-len(values) :] = integers
        assert recorded(tensor.view(torch.float32)) == pytest.approx((smallest, largest), rel=0, abs=0, nan_ok=True)


@launches
@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype is not torch.bool], ids=str)
def test_every_element_counts_and_none_beside_them(dtype: torch.dtype) -> None:
    """Slices at several alignments in a memory full of nan, or of large integers, with the extremes at one place after the
    other."""
    block = kernel._ROWS * 16 // dtype.itemsize
    row = 16 // dtype.itemsize
    byte = 0x7F if dtype.is_signed and not dtype.is_floating_point else 0xFF
    memory = torch.full((8 * block * dtype.itemsize,), byte, dtype=torch.uint8, device=DEVICE).view(dtype)
    rest = memory[0].clone()
    two, one, three = (torch.tensor(value, device=DEVICE).to(dtype) for value in (2, 1, -3 if dtype.is_signed else 3))
    for start in sorted({0, 1, row - 1}):
        for size in (
            1,
            2,
            row - 1,
            row,
            row + 1,
            2 * row - 1,
            2 * row + 1,
            block - 1,
            block,
            block + row + 1,
            7 * block + 5,
        ):
            values = memory[start : start + size]
            for place in sorted({0, row, size // 2, size - 1} & set(range(size))):
                values.copy_(two)
                values[size - 1 - place] = three
                values[place] = one
                check(values)
            values.copy_(rest)


@launches
def test_dense_in_another_order() -> None:
    values = patterns(torch.float32, 24).nan_to_num(1.0, 2.0, -2.0)
    for dense in (values.view(4, 6).t(), values.view(2, 3, 4).permute(1, 2, 0), values.view(4, 6)[1:3].t()):
        assert not dense.is_contiguous()
        check(dense)
    check(values.view(1, 2, 3, 4).to(memory_format=torch.channels_last))
    check(values[5])


@launches
def test_two_tensors_in_the_same_cells() -> None:
    table = torch.tensor([kernel.EMPTY] * 4, dtype=torch.int64, device=DEVICE)
    recorded(torch.tensor([3.0, -4.0], device=DEVICE), table[1])
    recorded(torch.tensor([-2.0, 3.5], dtype=torch.bfloat16, device=DEVICE), table[1])
    recorded(torch.tensor([], device=DEVICE), table[1])
    recorded(torch.tensor([-5], device=DEVICE), table[2])
    recorded(torch.tensor([4.5], device=DEVICE), table[2])
    assert table[1:3].view(torch.float64).tolist() == [[2.0, 4.0], [4.5, 5.0]]
    assert table[::3].tolist() == [[*kernel.EMPTY]] * 2


@launches
def test_what_is_not_supported() -> None:
    class Wrapped(Tensor):
        pass

    ones = torch.ones(4, 6, device=DEVICE)
    assert kernel.is_supported(ones)
    assert kernel.is_supported(torch.nn.Parameter(ones))
    for other in (
        *(ones[:, ::2], ones[:, :3], ones[:1].expand(4, 6), ones.view(-1).as_strided((3, 3), (2, 1))),
        *(ones.int()[:, ::2], ones.bool()[:1].expand(4, 6), ones.to(torch.complex64), ones.to(torch.float8_e4m3fnuz)),
        *(ones.to_sparse(), ones.to("meta"), ones.as_subclass(Wrapped)),
        torch.nested.nested_tensor([ones[0], ones[1, :2]]),
    ):
        assert not kernel.is_supported(other)


@launches
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e4m3fnuz, torch.complex128], ids=str)
def test_a_checksum_in_the_same_pass(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is that of the operators, and the extremes are those without it."""
    block = 16 * kernel._ROWS // dtype.itemsize
    word = max(1, 8 // dtype.itemsize)
    for size in (5 * block, 6 * block - word + 1, 9 * block + 2 * word + 1):
        content = patterns(torch.float8_e5m2, (size + word) * dtype.itemsize).view(torch.uint8)
        memory = (content % 2).view(dtype) if dtype is torch.bool else content.view(dtype)
        for values in (memory[:size], memory[word:]):  # from an address that 16 divides, and from one that only 8 does
            assert kernel.can_sum(values)
            lanes = torch.tensor([1, -1], device=DEVICE)  # is added to
            if dtype in DTYPES:
                cells, without_lanes = empty_cells(), empty_cells()
                kernel.record_lanes(values, lanes, cells)
                recorded(values, without_lanes)
                assert cells.tolist() == without_lanes.tolist()
            else:
                kernel.record_lanes(values, lanes)
            theirs, ours = (torch.empty(2, dtype=torch.int64, device=DEVICE) for _ in range(2))
            write_all([values], ours.unsqueeze(0))
            with monkeypatch.context() as patched:
                patched.setattr(kernel, "can_sum", lambda values: False)
                write_all([values], theirs.unsqueeze(0))
            assert ours.tolist() == theirs.tolist() == (lanes - torch.tensor([1, -1], device=DEVICE)).tolist()


@launches
def test_what_has_no_checksum_in_the_kernel() -> None:
    values = torch.ones(40_000, device=DEVICE)
    assert kernel.can_sum(values)
    assert not kernel.can_sum(values[1:])
    assert not kernel.can_sum(values[:1000])  # too small for a block
    assert not kernel.can_sum(values.to("meta"))


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str)
def test_no_sync_no_allocation_and_other_streams(dtype: torch.dtype) -> None:
    values, cells = (9 * torch.randn(100_003, device=DEVICE)).to(dtype), empty_cells()
    recorded(values)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(torch.cuda.Stream()):
            kernel.record(values, cells)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    torch.cuda.synchronize()
    assert numbers(cells) == recorded(values)


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool], ids=str)
def test_one_launch_measures_a_tensor(dtype: torch.dtype) -> None:
    values, tape = torch.ones(100_003, device=DEVICE).to(dtype), Tape()
    tape.write(values, None)  # builds the kernel, and makes the buffer
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        cell = tape.write(values, None)
        torch.cuda.synchronize()
    done = [event.name for event in profiler.events() if event.device_type is DeviceType.CUDA]
    assert done == ["_extremes"]
    tape.read()
    assert (cell.low, cell.high) == (1.0, 1.0)


@needs_cuda
def test_in_a_cuda_graph() -> None:
    values, cells, graph = torch.randn(100_003, device=DEVICE), empty_cells(), torch.cuda.CUDAGraph()
    recorded(values)
    with torch.cuda.graph(graph):
        assert kernel.is_supported(values)
        kernel.record(values, cells)
    values[7] = -1e30
    graph.replay()
    assert numbers(cells) == recorded(values)
    assert numbers(cells)[1] == torch.tensor(1e30)


@needs_cuda
def test_more_than_two_to_the_31_elements() -> None:
    values = torch.ones(2**31 + 9, dtype=torch.bfloat16, device=DEVICE)
    values[-1], values[2**31 - 1] = -2.0, 0.5
    assert recorded(values) == (0.5, 2.0)


def run(code: str, **more: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], env=environment(**more), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_host_s_tensors_cost_no_import_of_triton() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); from rankwatch.measure import kernel;"
        "print(kernel.is_supported(torch.ones(3)), 'triton' in set(sys.modules) - before)"
    )
    assert run(code, TRITON_INTERPRET="0") == "False False\n"


@pytest.mark.timeout(1500)
@pytest.mark.skipif(DEVICE == "cuda" or INTERPRETED, reason="the others run here")
@pytest.mark.parametrize("chosen", ["special_values or ends_of or 1025", pytest.param("not import", marks=pytest.mark.slow)])
@needs_triton
def test_all_of_this_in_the_interpreter(chosen: str) -> None:
    pytest.importorskip("triton", "3.2", "its interpreter does not tell which arguments are constants")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-k", chosen, __file__]
    done = subprocess.run(command, env=environment(TRITON_INTERPRET="1"), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
