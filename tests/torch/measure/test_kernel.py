"""The Triton kernel against torch's aminmax: on a GPU where there is one, else in Triton's interpreter, on the host.

The interpreter has to be chosen before triton is imported, so a process of its own runs this file again (the last test).
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from jobs import ROOT, environment
from rankwatch.measure import kernel
from rankwatch.measure.checksum import write_lanes

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
TRITON = importlib.util.find_spec("triton") is not None
DTYPES = tuple(kernel._ITEM)
INTEGERS = {4: torch.int32, 2: torch.int16, 1: torch.int8}
INF = 0x7F800000
"""The bits of inf as a float32: those of a nan are larger."""

needs_triton = pytest.mark.skipif(not TRITON, reason="triton is not installed")
launches = pytest.mark.skipif(
    not TRITON or (DEVICE == "cpu" and not INTERPRETED),
    reason="triton is not installed" if not TRITON else "no GPU: runs in test_all_of_this_in_the_interpreter",
)
needs_cuda = pytest.mark.skipif(DEVICE == "cpu", reason="no GPU")


def empty_cells() -> Tensor:
    return torch.tensor(kernel.EMPTY, dtype=torch.int32, device=DEVICE)


def recorded(values: Tensor, cells: Tensor | None = None) -> tuple[int, int]:
    cells = empty_cells() if cells is None else cells
    assert kernel.is_supported(values)
    kernel.record(values, cells)
    smallest, largest = cells.tolist()
    return smallest, largest


def bits(value: Tensor) -> int:
    return int(value.view(torch.int32).item())


def check(values: Tensor) -> None:
    """torch has one nan make both extremes nan; the kernel has it only make the largest one."""
    smallest, largest = recorded(values)
    magnitudes = values.cpu().float().abs()
    finite = magnitudes[~magnitudes.isnan()]
    if finite.numel() == 0:
        assert smallest > INF
    else:
        assert smallest == bits(torch.aminmax(finite).min)
    if finite.numel() < magnitudes.numel():
        assert largest > INF
    else:
        assert largest == bits(torch.aminmax(magnitudes).max)


def patterns(dtype: torch.dtype, size: int, seed: int = 0) -> Tensor:
    """Random bits of a dtype, with denormals, zeros, infs and nans in about their natural share."""
    integer = INTEGERS[kernel._ITEM[dtype]]
    limits = torch.iinfo(integer)
    generator = torch.Generator().manual_seed(seed)
    random = torch.randint(limits.min, limits.max + 1, (size,), generator=generator, dtype=torch.int64)
    return random.to(integer).view(dtype).to(DEVICE)


@launches
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 2, 7, 16, 33, 1023, 1024, 1025, 100_003])
def test_random_values(dtype: torch.dtype, size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    check((torch.randn(size, generator=generator) * 20).to(dtype).to(DEVICE))
    check(patterns(dtype, size))
    # Without nan and inf, so that the largest of random patterns is not the same each time.
    finite = patterns(dtype, size).float().nan_to_num(1.0, 2.0, -2.0)
    check(finite.to(dtype))


@launches
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_pattern_alone(dtype: torch.dtype) -> None:
    """All of an eight-bit dtype; of wider ones, each exponent with the smallest and the largest mantissas."""
    width = 8 * kernel._ITEM[dtype]
    mantissa = {torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}.get(dtype, 0)
    edges = {0, 1, 2**mantissa - 1} if mantissa else {0}
    heads = range(0, 2**width, 2**mantissa * (4 if INTERPRETED and mantissa else 1))
    special = {0, 2 ** (width - 1) - 1} | {head | edge for head in heads for edge in edges}
    signed = [pattern - 2**width if pattern >= 2 ** (width - 1) else pattern for pattern in sorted(special)]
    for value in torch.tensor(signed, dtype=INTEGERS[width // 8]).view(dtype).to(DEVICE):
        check(value)


@launches
@pytest.mark.parametrize(
    ("values", "smallest", "largest"),
    [
        ([0x80000000], 0, 0),  # -0
        ([0x80000001, 0x3F800000], 1, 0x3F800000),  # the smallest denormal
        ([0x007FFFFF, 0x807FFFFE], 0x007FFFFE, 0x007FFFFF),  # nothing but denormals
        ([0xFF800000, 0x7F7FFFFF], 0x7F7FFFFF, INF),  # -inf
        ([0x7F800000, 0x7F800001], INF, INF + 1),  # the nan next to inf, a signalling one
        ([0x7F800000, 0xFFC12345, 0], 0, 0x7FC12345),  # a negative nan with a payload
        ([0xFFFFFFFF, 0x7F800000], INF, 0x7FFFFFFF),
    ],
)
def test_special_values(values: list[int], smallest: int, largest: int) -> None:
    integers = torch.tensor(
        [value - 2**32 if value >= 2**31 else value for value in values], dtype=torch.int32, device=DEVICE
    )
    for size in (len(values), 5000):
        tensor = integers[0].repeat(size)
        tensor[-len(values) :] = integers
        assert recorded(tensor.view(torch.float32)) == (smallest, largest)


@launches
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_element_counts_and_none_beside_them(dtype: torch.dtype) -> None:
    """Slices at several alignments in a memory full of nan, with the extremes at one place after the other."""
    block = kernel._ROWS * 16 // kernel._ITEM[dtype]
    row = 16 // kernel._ITEM[dtype]
    memory = torch.full((8 * block,), torch.nan, device=DEVICE).to(dtype)
    one, half, two = (torch.tensor(value, device=DEVICE).to(dtype) for value in (1.0, 0.5, -2.0))
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
                values.copy_(one)
                values[size - 1 - place] = two
                values[place] = half
                check(values)
            values.fill_(torch.nan)


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
    table = torch.tensor([kernel.EMPTY] * 3, dtype=torch.int32, device=DEVICE)
    recorded(torch.tensor([3.0, -4.0], device=DEVICE), table[1])
    recorded(torch.tensor([-2.0, 3.5], dtype=torch.bfloat16, device=DEVICE), table[1])
    recorded(torch.tensor([], device=DEVICE), table[1])
    assert table.tolist() == [[*kernel.EMPTY], [bits(torch.tensor(2.0)), bits(torch.tensor(4.0))], [*kernel.EMPTY]]


@launches
def test_what_is_not_supported() -> None:
    class Wrapped(Tensor):
        pass

    ones = torch.ones(4, 6, device=DEVICE)
    assert kernel.is_supported(ones)
    assert kernel.is_supported(torch.nn.Parameter(ones))
    for other in (
        *(ones[:, ::2], ones[:, :3], ones[:1].expand(4, 6), ones.view(-1).as_strided((3, 3), (2, 1))),
        *(ones.double(), ones.int(), ones.bool(), ones.to(torch.complex64), ones.to(torch.float8_e4m3fnuz)),
        *(ones.to_sparse(), ones.to("meta"), ones.as_subclass(Wrapped)),
        torch.nested.nested_tensor([ones[0], ones[1, :2]]),
    ):
        assert not kernel.is_supported(other)


@launches
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex128], ids=str)
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
                cells = empty_cells()
                kernel.record_lanes(values, lanes, cells)
                assert tuple(cells.tolist()) == recorded(values)
            else:
                kernel.record_lanes(values, lanes)
            theirs, ours = (torch.empty(2, dtype=torch.int64, device=DEVICE) for _ in range(2))
            write_lanes(values, ours)
            with monkeypatch.context() as patched:
                patched.setattr(kernel, "can_sum", lambda values: False)
                write_lanes(values, theirs)
            assert ours.tolist() == theirs.tolist() == (lanes - torch.tensor([1, -1], device=DEVICE)).tolist()


@launches
def test_what_has_no_checksum_in_the_kernel() -> None:
    values = torch.ones(40_000, device=DEVICE)
    assert kernel.can_sum(values)
    assert not kernel.can_sum(values[1:])
    assert not kernel.can_sum(values[:1000])  # too small for a block
    assert not kernel.can_sum(values.to("meta"))


@needs_cuda
@launches
def test_no_sync_no_allocation_and_other_streams() -> None:
    values, cells = torch.randn(100_003, device=DEVICE), empty_cells()
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
    assert tuple(cells.tolist()) == recorded(values)


@needs_cuda
@launches
def test_in_a_cuda_graph() -> None:
    values, cells, graph = torch.randn(100_003, device=DEVICE), empty_cells(), torch.cuda.CUDAGraph()
    recorded(values)
    with torch.cuda.graph(graph):
        assert kernel.is_supported(values)
        kernel.record(values, cells)
    values[7] = -1e30
    graph.replay()
    assert tuple(cells.tolist()) == recorded(values)
    assert cells[1].item() == bits(torch.tensor(1e30))


@needs_cuda
@launches
def test_more_than_two_to_the_31_elements() -> None:
    values = torch.ones(2**31 + 9, dtype=torch.bfloat16, device=DEVICE)
    values[-1], values[2**31 - 1] = -2.0, 0.5
    assert recorded(values) == (bits(torch.tensor(0.5)), bits(torch.tensor(2.0)))


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


COMPILE = """
import sys, torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from rankwatch.measure import kernel

class NoGpu:
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)
    get_current_device = lambda self: 0
    get_current_stream = lambda self, device=None: 0

driver.set_active(NoGpu())
memory = torch.zeros(64, dtype=torch.int32)
for words in (0, kernel.WORDS_PER_ROW):
    for dtype, item in kernel._ITEM.items():
        programs = set()
        for address in (16, 18, 1, 2**33, 2**47 + 2):
            for numel in (1, 2, 16, 17, 2**31, 2**33 + 1):
                for cells in (memory[:2], memory[1:3], memory[2:4]):
                    lanes = memory[4:8].view(torch.int64) if words else cells
                    built = kernel._kernel().warmup(
                        *(address, numel, cells, lanes, str(dtype), item, kernel._ROWS, words),
                        num_warps=kernel._WARPS,
                        grid=(1,),
                    )
                    programs.add(built)
        (built,) = programs
        ptx = built.asm["ptx"]
        print(ptx.count("ld.global.v4.b32"), ptx.count("ld.global"), ptx.count(".ftz"))
"""


@needs_triton
def test_one_program_per_dtype_with_wide_loads(tmp_path: Path) -> None:
    """The kernel compiles for Hopper, for any size and alignment; the interpreter cannot show this. No GPU needed."""
    found = run(COMPILE, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path)).splitlines()
    assert found[: len(DTYPES)] == ["2 3 0"] * len(DTYPES)
    with_checksum = [line.split() for line in found[len(DTYPES) :]]
    assert [(wide, flushes) for wide, _, flushes in with_checksum] == [("2", "0")] * len(DTYPES)


@pytest.mark.slow
@pytest.mark.skipif(DEVICE == "cuda" or INTERPRETED, reason="the others run here")
@needs_triton
def test_all_of_this_in_the_interpreter() -> None:
    pytest.importorskip("triton", "3.2", "its interpreter does not tell which arguments are constants")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not import and not program", __file__]
    done = subprocess.run(command, env=environment(TRITON_INTERPRET="1"), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
