"""Checksums against their definition in integers of any size, and what they must see."""

from __future__ import annotations

import itertools
import random
import struct

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from rankwatch.replicas import checksum
from rankwatch.replicas.checksum import EXACT_WORDS, ROW_WORDS, readable, write_all

MODULUS = 2**64
DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128),
)
"""Bytes of a tensor that is read in several chunks, with a last row and a last word that are not whole."""
SIZES = (0, 1, 3, 8, 17, 1000, 8 * EXACT_WORDS, 8 * EXACT_WORDS + 1, 8 * EXACT_WORDS + 8 * ROW_WORDS + 9)


def lanes_of(values: Tensor) -> tuple[int, ...]:
    into = torch.full((2,), 7)  # what was there before does not count
    assert readable(values)
    write_all([values], into.unsqueeze(0))
    return tuple(lane % MODULUS for lane in into.tolist())


def expected(values: Tensor, lead: int = 0) -> tuple[int, int]:
    """The definition, word by word."""
    memory = values.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    content = bytes(lead) + (bytes(memory.view(torch.uint8).numpy()) if memory.numel() else b"")
    content += bytes(-len(content) % 8)
    words = struct.unpack(f"<{len(content) // 8}Q", content)
    rows = words
    if len(words) > EXACT_WORDS:
        rows = tuple([sum(words[first : first + ROW_WORDS]) % MODULUS for first in range(0, len(words), ROW_WORDS)])
    return sum(words) % MODULUS, sum((2 * i + 1) * (row ^ (row >> 29)) for i, row in enumerate(rows)) % MODULUS


def patterns(dtype: torch.dtype, size: int, seed: int = 0) -> Tensor:
    """Random bits of a dtype: with nans of every payload, infs, denormals and both zeros."""
    generator = torch.Generator().manual_seed(seed)
    content = torch.randint(0, 2 if dtype is torch.bool else 256, (size * dtype.itemsize,), generator=generator)
    return content.to(torch.uint8).view(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_definition(dtype: torch.dtype) -> None:
    for size in SIZES:
        values = patterns(dtype, size // dtype.itemsize + 1)
        assert lanes_of(values) == expected(values)
        assert lanes_of(values[:-1]) == expected(values[:-1])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool], ids=str)
def test_the_definition_of_a_large_tensor(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum, "_CACHED_WORDS", 1024)
    values = patterns(dtype, 8 * (2 * checksum._CACHED_WORDS + 3) * ROW_WORDS + 5)
    assert lanes_of(values) == expected(values)


def test_small_ones_are_joined_and_keep_their_rows() -> None:
    tensors = [patterns(dtype, size, size) for size in (5, 64, 0, 2048, 64, 40_000) for dtype in DTYPES] * 3
    random.Random(0).shuffle(tensors)
    into = torch.full((len(tensors), 2), 7)
    write_all(tensors, into)
    assert [tuple(lane % MODULUS for lane in row) for row in into.tolist()] == [expected(values) for values in tensors]


def test_shares_add_up() -> None:
    values = patterns(torch.bfloat16, 100_003)
    for cuts in ([0, 100_003], [0, 1, 2, 3, 50_001, 100_003], [0, 0, 33_335, 66_670, 100_003]):
        into = torch.zeros((len(cuts) - 1, 2), dtype=torch.int64)
        for index, (first, end) in enumerate(itertools.pairwise(cuts)):
            write_all([values[first:end]], into[index : index + 1], [first])
        assert int(into[:, 0].sum()) % MODULUS == expected(values)[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_single_flipped_bit_is_seen(dtype: torch.dtype) -> None:
    """All bits of the first and last elements, and some in between; also where lane 2 is of rows."""
    for size in (1, 13, 8 * EXACT_WORDS // dtype.itemsize + 77):
        values = patterns(dtype, size)
        before = lanes_of(values)
        content = values.view(torch.uint8)
        random.seed(size)
        inner = [random.randrange(len(content)) for _ in range(5)]
        for byte in {*range(min(16, len(content))), *range(max(0, len(content) - 16), len(content)), *inner}:
            for bit in range(1 if dtype is torch.bool else 8):
                content[byte] ^= 1 << bit
                after = lanes_of(values)
                content[byte] ^= 1 << bit
                assert after[0] != before[0], (byte, bit)
                assert after[1] != before[1], (byte, bit)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e5m2], ids=str)
def test_the_sign_of_zero_and_the_payload_of_nan_are_seen(dtype: torch.dtype) -> None:
    for size in (5, 70_000):
        zeros = torch.zeros(size).to(dtype)
        other = zeros.clone()
        other[size // 2] = -0.0
        assert torch.equal(zeros.float(), other.float())
        assert lanes_of(zeros) != lanes_of(other)
        nans = torch.full((size,), torch.nan).to(dtype)
        other = nans.clone()
        other.view(torch.uint8)[dtype.itemsize * (size // 2)] ^= 1
        assert other.float().isnan().all()
        assert lanes_of(nans) != lanes_of(other)


def test_words_that_changed_places_are_seen() -> None:
    """Lane 1 is blind to them. Also where the words differ in their upper bits alone, and their distance is a power of two."""
    for low, high in ((0.0, -0.0), (1.0, -1.0), (1.0, 2.0), (0.5, 0.5000001)):
        for distance in (1, 2, 64, 1024, EXACT_WORDS - 1):
            for dtype in (torch.float64, torch.float32):
                values = torch.full((8 * EXACT_WORDS // dtype.itemsize,), low, dtype=dtype)
                values[-1] = high
                before = lanes_of(values)
                other = -1 - distance * 8 // dtype.itemsize
                values[-1], values[other] = low, high
                after = lanes_of(values)
                assert after[0] == before[0]
                assert after[1] != before[1], (low, high, distance, dtype)


def test_permutations_are_seen() -> None:
    generator = torch.Generator().manual_seed(0)
    for shape in ((20, 31), (64, 64), (300, 257)):
        for values in (torch.randn(shape, generator=generator), torch.eye(*shape), torch.arange(0.0, shape[0])[:, None] + 1):
            values = values.expand(shape).contiguous()
            before = lanes_of(values)
            order = torch.randperm(shape[0], generator=generator)
            for other in (values[order], values.flip(0), values.roll(1, 0), values[:, torch.randperm(shape[1])]):
                assert (lanes_of(other) == before) == torch.equal(other, values)
    large = torch.randn(600, 600, generator=generator)
    assert lanes_of(large) != lanes_of(large.t().contiguous())


def test_what_lies_in_memory_in_another_way_has_the_same_lanes() -> None:
    for size in (63, 9 * 4000, 9 * 80_000):
        # Without zeros, of which one run in 25 has one: the last tensor's would have another sign.
        values = torch.randn(size).add_(1e-30).view(3, -1, 3)
        shifted = torch.empty(size + 1)[1:].view(values.shape).copy_(values)
        others = [
            values.transpose(0, 2).contiguous().transpose(0, 2),
            values.permute(1, 2, 0).contiguous().permute(2, 0, 1),
            shifted,
            torch.stack([values, values], -1)[..., 1],
            (-values).to(torch.complex64).mul(1j).conj().imag,  # its sign is changed as it is read
        ]
        assert others[-1].is_neg()
        assert {lanes_of(other) for other in others} == {lanes_of(values)} == {expected(values)}
    turned = torch.randn(700, dtype=torch.complex64).conj()
    assert lanes_of(turned) == expected(turned)
    assert lanes_of(torch.ones(1).expand(100, 1000)) == lanes_of(torch.ones(100, 1000))


def test_memory_at_any_address() -> None:
    """As of a file that is mapped: not even an element begins where its size would have it."""
    for size in (40, 80_000):
        content = bytearray(random.Random(0).randbytes(4 * size + 8))
        for start in range(8):
            values = torch.frombuffer(content, dtype=torch.float32, offset=start, count=size)
            assert lanes_of(values) == expected(values)


def test_no_history_and_every_mode() -> None:
    weight = torch.nn.Parameter(torch.randn(64, 65))
    known = expected(weight)
    into = torch.zeros((2, 2), dtype=torch.int64)
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            write_all([weight, weight.t().contiguous().t()], into)
            assert [tuple(lane % MODULUS for lane in row) for row in into.tolist()] == [known, known]
            assert not into.requires_grad
            made = weight * 1
        assert lanes_of(made) == known  # of inference mode, and of autograd, outside of it
    assert weight.grad_fn is None
    assert weight._version == 0


def test_wrapped_tensors() -> None:
    class Named(Tensor):
        pass

    values = torch.randn(10, 7)
    assert lanes_of(values.as_subclass(Named)) == expected(values)
    sparse = torch.eye(5).to_sparse()
    assert lanes_of(sparse) == expected(torch.ones(5))
    rows = torch.nested.nested_tensor([values[0], values[1, :3]])
    assert lanes_of(rows) == expected(torch.cat([values[0], values[1, :3]]))


def test_what_cannot_be_read() -> None:
    values = torch.ones(3)
    released = torch.ones(3)
    released.untyped_storage().resize_(0)
    with FakeTensorMode():
        fake = torch.ones(3)
    unread = torch.nn.parameter.UninitializedParameter()
    for other in (values.to("meta"), released, fake, unread):
        assert not readable(other)
    assert readable(torch.ones(0))
    assert readable(torch.tensor(3.0))


def test_memory_does_not_grow_with_the_tensors() -> None:
    """Also where all must be copied. Counted by torch's profiler, which sees each allocation."""
    buffer = 2 * 8 * checksum._COPIED_ROWS * ROW_WORDS
    values = torch.zeros(4 * buffer // 4 + 1)
    for given, most in (
        (values[:-1], buffer / 8),
        (values[1:], 1.2 * buffer),
        (values[:-1].view(-1, 1024).t(), 1.2 * buffer),
    ):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
            lanes_of(given)
        held = most_held = 0
        for event in profiler.profiler.kineto_results.events():
            if event.name() == "[memory]":
                held += event.nbytes()
                most_held = max(most_held, held)
        assert most_held < most
