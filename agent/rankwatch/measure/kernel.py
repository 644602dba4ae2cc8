"""Abs min and abs max of a GPU tensor, and its checksum, in one pass and one launch, by a Triton kernel.

Importing this imports no triton.
"""

from __future__ import annotations

import logging
import os
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

log = logging.getLogger(__name__)

EMPTY = (0x7FFF_FFFF_FFFF_FFFF, 0)
"""A pair of cells before the first ``record``: the largest possible bits for the smallest value, and the other way round."""

_FORMATS = {
    **dict.fromkeys((torch.float64, torch.float32, torch.float16, torch.float8_e5m2), "float"),
    **{torch.bfloat16: "bfloat16", torch.float8_e4m3fn: "e4m3fn", torch.bool: "bool"},
    **dict.fromkeys((torch.int64, torch.int32, torch.int16, torch.int8), "signed"),
    **dict.fromkeys((torch.uint64, torch.uint32, torch.uint16, torch.uint8), "unsigned"),
}
"""What an element's bits mean. Not supported: complex dtypes, and the fnuz dtypes, whose nan has the bits of -0."""

_ROWS, _PROGRAMS_PER_SM = 512, 6
_WARPS = 4 if torch.version.hip else 8
"""These hide the latency of DRAM. A row is one 16-byte load, the widest that exists. Each of a program's 256 threads (AMD's
warps have 64) has two loads in flight. Six programs fit into the 1536 threads of an SM and, with at most 40 registers a
thread (33 are needed; on Volta, 58 for bytes), into its registers. They have 48 KiB in flight; a Hopper needs about 25
(4.8 TB/s x 700 ns / 132 SMs). Further programs would run only after the others, at low occupancy."""

_ARGUMENTS = ["address", "numel", "cells", "lanes"]
"""Of the kernel. All others are constants."""

WORDS_PER_ROW = 64
"""Of the checksum: see checksum.py. It divides the words in a block, which are 2 * _ROWS."""

_FLOATS = {1: torch.float8_e5m2, 2: torch.float16, 4: torch.float32, 8: torch.float32, 16: torch.float32}
"""By an item's size: as which dtype the kernel reads bits that only have to be summed."""

_DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0") else "cuda"
"""ROCm's devices are called cuda, too. Triton's interpreter runs kernels on the host: so the tests need no GPU."""

_launches: dict[tuple[torch.device, torch.dtype, bool], _Launch | None] = {}
"""By device, dtype, and whether there is a checksum. None: triton cannot build the kernel."""


def is_supported(values: Tensor) -> bool:
    """Whether ``record`` can measure ``values``: a plain dense tensor on a GPU, for which triton can build the kernel.

    The first tensor of each device and dtype makes triton build the kernel (about a second; less from triton's cache on
    disk). During a CUDA graph capture the kernel cannot be built: the answer is no, unless it was built before.
    """
    # A subclass may have no memory (FakeTensor), or memory without its values yet (the result of a running collective).
    if values.device.type != _DEVICE or values.dtype not in _FORMATS or type(values) not in (Tensor, torch.nn.Parameter):
        return False
    if values.layout is not torch.strided or values.is_nested or not (values.is_contiguous() or is_dense(values)):
        return False
    return _launch_of(values.device, values.dtype, False) is not None


def can_sum(values: Tensor) -> bool:
    """Whether ``record_lanes`` can be given these contiguous values, of any dtype. As ``is_supported``, it builds the kernel."""
    if values.device.type != _DEVICE or values.numel() * values.dtype.itemsize < 32 * _ROWS or values.data_ptr() % 8:
        return False
    dtype = values.dtype if values.dtype in _FORMATS else _FLOATS[values.dtype.itemsize]
    return _launch_of(values.device, dtype, True) is not None


def record(values: Tensor, cells: Tensor) -> None:
    """Lowers cell 0 to the smallest and raises cell 1 to the largest absolute value of ``values``, without a host sync.

    A cell has the bits of a float64, to which an integer is rounded. Bits are ordered as the magnitudes are, with any nan
    above inf: so a nan always gets into cell 1. Runs on the current stream. ``values`` must be supported; ``cells`` are two
    int64 on its device, first ``EMPTY``.
    """
    launch = _launches[values.device, values.dtype, False]
    assert launch is not None, "not supported"
    launch(values, cells, cells)


def record_lanes(values: Tensor, lanes: Tensor, cells: Tensor | None = None) -> None:
    """Adds the checksum of ``values`` to ``lanes``, two int64, and does what ``record`` does unless ``cells`` is None.

    ``can_sum`` must hold; with ``cells``, ``is_supported``, too.
    """
    if cells is None:
        if values.dtype not in _FORMATS:
            values = values.view(-1).view(_FLOATS[values.dtype.itemsize])
        cells = torch.empty(2, dtype=torch.int64, device=values.device)
    launch = _launches[values.device, values.dtype, True]
    assert launch is not None, "not supported"
    launch(values, cells, lanes)


class _Launch:
    """Launches the kernel for tensors of one device and dtype, on the current stream; with the checksum if ``sums``."""

    def __init__(self, device: torch.device, dtype: torch.dtype, sums: bool) -> None:
        self._index = -1 if device.index is None else device.index  # -1, the interpreter's device, changes nothing
        self._most = _most_programs(self._index)
        self._item = dtype.itemsize
        self.constants = _FORMATS[dtype], dtype.itemsize, _ROWS, WORDS_PER_ROW if sums else 0
        self.direct: _Direct | None = None

    def __call__(self, values: Tensor, cells: Tensor, lanes: Tensor) -> Any:
        """Returns the compiled kernel, unless it was launched directly or interpreted."""
        numel = values.numel()
        programs = min(-(-numel * self._item // (16 * _ROWS)), self._most)
        address, direct = values.data_ptr(), self.direct
        with torch.cuda.device(self._index):
            if direct is None or direct.has_hooks():
                return _kernel()[programs,](address, numel, cells, lanes, *self.constants, num_warps=_WARPS)
            return direct.launch(programs, self._index, address, numel, cells, lanes)


class _Direct:
    """Calls a compiled kernel as triton's ``JITFunction.run`` does, which takes 6 to 10 us to find it."""

    def __init__(self, compiled: Any, constants: tuple[str | int, ...]) -> None:
        triton = import_module("triton")
        self._compiled = compiled  # its end would unload the kernel
        self._run, self._handles = compiled.run, (compiled.function, compiled.packed_metadata)
        self._constants = constants[: len(compiled.src.signature) - len(_ARGUMENTS)]  # up to triton 3.2 it takes none
        self._stream_of = triton.runtime.driver.active.get_current_stream
        self._hooks = triton.knobs.runtime if hasattr(triton, "knobs") else type(compiled)  # from triton 3.4 on

    def has_hooks(self) -> bool:
        """Whether a profiler, such as proton, is to be called at each launch: triton does that."""
        enter, leave = self._hooks.launch_enter_hook, self._hooks.launch_exit_hook
        return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))

    def launch(self, programs: int, device: int, *arguments: Tensor | int) -> None:
        stream = self._stream_of(device)
        self._run(programs, 1, 1, stream, *self._handles, None, None, None, *arguments, *self._constants)


def is_dense(values: Tensor) -> bool:
    """Whether the elements fill one range of memory without repetition: a permutation of a contiguous tensor."""
    expected = 1
    for stride, size in sorted(zip(values.stride(), values.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _launch_of(device: torch.device, dtype: torch.dtype, sums: bool) -> _Launch | None:
    key = device, dtype, sums
    if key not in _launches:
        if _DEVICE == "cuda" and torch.cuda.is_current_stream_capturing():
            return None
        _launches[key] = _built(*key)
    return _launches[key]


def _built(device: torch.device, dtype: torch.dtype, sums: bool) -> _Launch | None:
    if device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) < (7, 0):
        return None  # triton's compiler would end the process
    try:
        values = torch.zeros(32 * _ROWS if sums else 1, device=device).to(dtype)
        cells, lanes = torch.zeros(4, dtype=torch.int64, device=device).split(2)
        launch = _Launch(device, dtype, sums)
        compiled = launch(values, cells, lanes)
    except Exception as error:  # noqa: BLE001 (no triton, no C compiler for its launcher, no folder to write to, ...)
        log.info("measuring %s on %s without the kernel: %s: %s", dtype, device, type(error).__name__, error)
        return None
    if compiled is not None:
        try:
            direct = _Direct(compiled, launch.constants)
            launch.direct = None if direct.has_hooks() else direct
            launch(values, cells, lanes)
        except Exception as error:  # noqa: BLE001 (a version of triton whose compiled kernels are called in another way)
            log.info("launching the kernel for %s on %s by triton: %s: %s", dtype, device, type(error).__name__, error)
            launch.direct = None
    return launch


@cache
def _most_programs(index: int) -> int:
    sms: int = torch.cuda.get_device_properties(index).multi_processor_count if _DEVICE == "cuda" else 1
    return _PROGRAMS_PER_SM * sms


@cache
def _kernel() -> Any:
    globals()["tl"] = import_module("triton.language")
    # Without do_not_specialize, each new alignment or size would stop the training for another compilation.
    return import_module("triton").jit(_extremes, do_not_specialize=_ARGUMENTS)


def _extremes(
    address: tl.int64,
    numel: tl.int64,
    cells: tl.tensor,
    lanes: tl.tensor,
    FORMAT: tl.constexpr,
    ITEM: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
) -> None:
    """The kernel. It compares magnitudes as integers without sign; only the two results become float64.

    WORDS: in a row of the checksum; 0: no checksum.
    """
    ROW: tl.constexpr = 16 // ITEM
    BITS: tl.constexpr = tl.int64 if ITEM == 8 else tl.int32
    MAGNITUDE: tl.constexpr = tl.uint64 if ITEM == 8 else tl.uint32
    SIGNED: tl.constexpr = FORMAT == "signed"
    INTEGER: tl.constexpr = SIGNED or (FORMAT == "unsigned" or FORMAT == "bool")  # no chains of or up to triton 3.3
    MOST: tl.constexpr = 2 ** (8 * ITEM if INTEGER else 8 * ITEM - 1) - 1  # the largest bits of any magnitude
    boundary = (address + 15) // 16 * 16
    if ITEM == 8:
        start = boundary.to(tl.pointer_type(tl.int64))
    elif ITEM == 4:
        start = boundary.to(tl.pointer_type(tl.int32))
    elif ITEM == 2:
        start = boundary.to(tl.pointer_type(tl.int16))
    else:
        start = boundary.to(tl.pointer_type(tl.int8))
    start = tl.multiple_of(start, 16)

    # Whole rows, counted from the first 16-byte boundary: so every load is aligned, wherever the tensor begins and ends.
    # The last block overlaps the one before (if it is the only block, its last row repeats): a mask could split the loads.
    # A row is reduced within its thread; only the rows' extremes stay in registers between blocks.
    rows = (address + numel * ITEM) // 16 - boundary // 16
    row = tl.minimum(tl.arange(0, ROWS), tl.minimum(rows - 1, ROWS).to(tl.int32))
    inner = row[:, None] * ROW + tl.arange(0, ROW)[None, :]
    low, high = tl.full([ROWS], MOST, MAGNITUDE), tl.full([ROWS], 0, MAGNITUDE)
    blocks = (rows + ROWS - 1) // ROWS

    if WORDS:
        # Words are counted from the first element. The last one may have fewer elements than others.
        SUMS: tl.constexpr = 2 * ROWS // WORDS
        PER_WORD: tl.constexpr = 8 // ITEM
        words = address.to(tl.pointer_type(tl.int64))
        whole, element = numel // PER_WORD, tl.arange(0, PER_WORD)
        rest = address.to(start.dtype) + whole * PER_WORD + element
        rest_bits = tl.load(rest, mask=element < numel % PER_WORD, other=0).to(tl.uint64) & (2 ** (8 * ITEM) - 1)
        last = tl.sum(rest_bits << (element * 8 * ITEM).to(tl.uint64), 0).to(tl.int64)
        place = tl.arange(0, SUMS)[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
        lane1, lane2 = tl.full([SUMS], 0, tl.int64), tl.full([SUMS], 0, tl.int64)
        blocks = (whole + 2 * ROWS) // (2 * ROWS)  # the last word among them, if there is none

    for block in range(tl.program_id(0).to(tl.int64), blocks, tl.num_programs(0).to(tl.int64)):
        first = tl.minimum(block * ROWS, tl.maximum(rows - ROWS, 0))
        bits = tl.load(start + first * ROW + inner).to(BITS)
        sizes = (tl.abs(bits) if SIGNED else bits).to(MAGNITUDE) & MOST
        low, high = tl.minimum(low, tl.min(sizes, 1)), tl.maximum(high, tl.max(sizes, 1))
        if WORDS:
            # The same memory once more, from the cache next to the processor. It is masked: what overlaps counts once.
            index = block * (2 * ROWS) + place
            sums = tl.sum(tl.where(index == whole, last, tl.load(words + index, mask=index < whole, other=0)), 1)
            lane1 += sums
            weight = 2 * (block * SUMS + tl.arange(0, SUMS)) + 1
            lane2 += (sums ^ ((sums >> 29) & (2**35 - 1))) * weight
    if WORDS:
        tl.atomic_add(lanes, tl.sum(lane1, 0), sem="relaxed")
        tl.atomic_add(lanes + 1, tl.sum(lane2, 0), sem="relaxed")
    smallest, largest = tl.min(low, 0), tl.max(high, 0)

    # Elements outside of the whole rows are among the first or the last ROW: both are read, from index -ROW to ROW - 1.
    if tl.program_id(0) == 0:
        outer = (numel * ROW - ROW + tl.arange(0, 2 * ROW)) % numel - (boundary - address) // ITEM
        bits = tl.load(start + outer).to(BITS)
        sizes = (tl.abs(bits) if SIGNED else bits).to(MAGNITUDE) & MOST
        smallest, largest = tl.minimum(smallest, tl.min(sizes, 0)), tl.maximum(largest, tl.max(sizes, 0))

    cell = tl.arange(0, 2)
    size = tl.where(cell == 0, smallest, largest)
    if FORMAT == "bool":
        number = (size != 0).to(tl.float64)  # other bytes than 1 are True, too
    elif INTEGER:
        number = size.to(tl.float64)
    elif ITEM == 8:
        number = size.to(tl.float64, bitcast=True)
    elif ITEM == 4:
        number = size.to(tl.float32, bitcast=True).to(tl.float64)
    elif FORMAT == "bfloat16":
        number = (size << 16).to(tl.float32, bitcast=True).to(tl.float64)
    else:
        # The 8-bit formats are read as a float16 with a shorter mantissa; then the exponents of e4m3fn are 8 too low.
        shift: tl.constexpr = 0 if ITEM == 2 else 7 if FORMAT == "e4m3fn" else 8
        number = (size << shift).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float64)
        if FORMAT == "e4m3fn":
            number = tl.where(size == 0x7F, float("nan"), number * 256.0)
    bits = number.to(tl.int64, bitcast=True) & 0x7FFF_FFFF_FFFF_FFFF  # the chip chooses the sign of a nan that it widens
    tl.atomic_min(cells + cell, bits, mask=cell == 0, sem="relaxed")
    tl.atomic_max(cells + cell, bits, mask=cell == 1, sem="relaxed")
