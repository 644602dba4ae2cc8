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

EMPTY = (0x7FFFFFFF, 0)
"""A pair of cells before the first ``record``: the largest possible bits for the smallest value, and the other way round."""

_ITEM = {torch.float32: 4, torch.float16: 2, torch.bfloat16: 2, torch.float8_e4m3fn: 1, torch.float8_e5m2: 1}
"""Bytes per element. Not supported: float64, which does not fit into a cell, and the fnuz dtypes, whose nan has the bits of
-0."""

_ROWS, _PROGRAMS_PER_SM = 512, 6
_WARPS = 4 if torch.version.hip else 8
"""These hide the latency of DRAM. A row is one 16-byte load, the widest that exists. Each of a program's 256 threads (AMD's
warps have 64) has two loads in flight. Six programs fit into the 1536 threads of an SM and, with at most 40 registers a
thread (37 are needed), into its registers. They have 48 KiB in flight; a Hopper needs about 25 (4.8 TB/s x 700 ns / 132
SMs). Further programs would run only after the others, at low occupancy."""

WORDS_PER_ROW = 64
"""Of the checksum: see checksum.py. It divides the words in a block, which are 2 * _ROWS."""

_FLOATS = {1: torch.float8_e5m2, 2: torch.float16, 4: torch.float32, 8: torch.float32, 16: torch.float32}
"""By an item's size: as which dtype the kernel reads bits that only have to be summed."""

_DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0") else "cuda"
"""ROCm's devices are called cuda, too. Triton's interpreter runs kernels on the host: so the tests need no GPU."""

_launches: dict[tuple[torch.device, torch.dtype, bool], bool] = {}


def is_supported(values: Tensor) -> bool:
    """Whether ``record`` can measure ``values``: a plain dense float tensor on a GPU for which triton can build the kernel.

    The first tensor of each device and dtype makes triton build the kernel (about a second; less from triton's cache on
    disk). During a CUDA graph capture the kernel cannot be built: the answer is no, unless it was built before.
    """
    # A subclass may have no memory (FakeTensor), or memory without its values yet (the result of a running collective).
    if values.device.type != _DEVICE or values.dtype not in _ITEM or type(values) not in (Tensor, torch.nn.Parameter):
        return False
    if values.layout is not torch.strided or values.is_nested or not (values.is_contiguous() or is_dense(values)):
        return False
    return _is_built(values.device, values.dtype, False)


def can_sum(values: Tensor) -> bool:
    """Whether ``record_lanes`` can be given these contiguous values, of any dtype. As ``is_supported``, it builds the kernel."""
    if values.device.type != _DEVICE or values.numel() * values.dtype.itemsize < 32 * _ROWS or values.data_ptr() % 8:
        return False
    dtype = values.dtype if values.dtype in _ITEM else _FLOATS[values.dtype.itemsize]
    return _is_built(values.device, dtype, True)


def record(values: Tensor, cells: Tensor) -> None:
    """Lowers cell 0 to the smallest and raises cell 1 to the largest absolute value of ``values``, without a host sync.

    A cell has the bits of a float32. Bits are ordered as the magnitudes are, with any nan above inf: so a nan always gets
    into cell 1. Runs on the current stream. ``values`` must be supported; ``cells`` are two int32 on its device, first
    ``EMPTY``.
    """
    _launch(values, cells, cells, False)


def record_lanes(values: Tensor, lanes: Tensor, cells: Tensor | None = None) -> None:
    """Adds the checksum of ``values`` to ``lanes``, two int64, and does what ``record`` does unless ``cells`` is None.

    ``can_sum`` must hold; with ``cells``, ``is_supported``, too.
    """
    if cells is None:
        if values.dtype not in _ITEM:
            values = values.view(-1).view(_FLOATS[values.dtype.itemsize])
        cells = torch.empty(2, dtype=torch.int32, device=values.device)
    _launch(values, cells, lanes, True)


def _launch(values: Tensor, cells: Tensor, lanes: Tensor, sums: bool) -> None:
    numel, item = values.numel(), _ITEM[values.dtype]
    programs = min(-(-numel * item // (16 * _ROWS)), _most_programs(values.get_device()))
    with torch.cuda.device(values.get_device()):  # -1, the interpreter's device, changes nothing
        _kernel()[(programs,)](
            values.data_ptr(),
            numel,
            cells,
            lanes,
            str(values.dtype),
            item,
            _ROWS,
            WORDS_PER_ROW if sums else 0,
            num_warps=_WARPS,
        )


def is_dense(values: Tensor) -> bool:
    """Whether the elements fill one range of memory without repetition: a permutation of a contiguous tensor."""
    expected = 1
    for stride, size in sorted(zip(values.stride(), values.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _is_built(device: torch.device, dtype: torch.dtype, sums: bool) -> bool:
    key = device, dtype, sums
    if key not in _launches:
        if _DEVICE == "cuda" and torch.cuda.is_current_stream_capturing():
            return False
        _launches[key] = _can_launch(*key)
    return _launches[key]


def _can_launch(device: torch.device, dtype: torch.dtype, sums: bool) -> bool:
    if device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) < (7, 0):
        return False  # triton's compiler would end the process
    try:
        values = torch.zeros(32 * _ROWS if sums else 1, device=device).to(dtype)
        cells = torch.zeros(2, dtype=torch.int32, device=device)
        _launch(values, cells, torch.zeros(2, dtype=torch.int64, device=device), sums)
    except Exception as error:  # noqa: BLE001 (no triton, no C compiler for its launcher, no folder to write to, ...)
        log.info("measuring %s on %s without the kernel: %s: %s", dtype, device, type(error).__name__, error)
        return False
    return True


@cache
def _most_programs(index: int) -> int:
    sms: int = torch.cuda.get_device_properties(index).multi_processor_count if _DEVICE == "cuda" else 1
    return _PROGRAMS_PER_SM * sms


@cache
def _kernel() -> Any:
    globals()["tl"] = import_module("triton.language")
    # Without do_not_specialize, each new alignment or size would stop the training for another compilation.
    return import_module("triton").jit(_extremes, do_not_specialize=["address", "numel", "cells", "lanes"])


def _extremes(
    address: tl.int64,
    numel: tl.int64,
    cells: tl.tensor,
    lanes: tl.tensor,
    DTYPE: tl.constexpr,
    ITEM: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
) -> None:
    """The kernel. It compares integers without sign, as wide as the dtype; only the two results are widened.

    WORDS: in a row of the checksum; 0: no checksum.
    """
    ROW: tl.constexpr = 16 // ITEM
    UNSIGNED: tl.constexpr = 2 ** (8 * ITEM - 1) - 1  # the largest bits of any magnitude: a nan
    boundary = (address + 15) // 16 * 16
    if ITEM == 4:
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
    low, high = tl.full([ROWS], UNSIGNED, tl.int32), tl.full([ROWS], 0, tl.int32)
    blocks = (rows + ROWS - 1) // ROWS

    if WORDS:
        # Words are counted from the first element. The last one may have fewer elements than others.
        SUMS: tl.constexpr = 2 * ROWS // WORDS
        PER_WORD: tl.constexpr = 8 // ITEM
        words = address.to(tl.pointer_type(tl.int64))
        whole, element = numel // PER_WORD, tl.arange(0, PER_WORD)
        rest = address.to(start.dtype) + whole * PER_WORD + element
        rest_bits = tl.load(rest, mask=element < numel % PER_WORD, other=0).to(tl.int64) & (2 ** (8 * ITEM) - 1)
        last = tl.sum(rest_bits << (element * 8 * ITEM).to(tl.int64), 0)
        place = tl.arange(0, SUMS)[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
        lane1, lane2 = tl.full([SUMS], 0, tl.int64), tl.full([SUMS], 0, tl.int64)
        blocks = (whole + 2 * ROWS) // (2 * ROWS)  # the last word among them, if there is none

    for block in range(tl.program_id(0).to(tl.int64), blocks, tl.num_programs(0).to(tl.int64)):
        first = tl.minimum(block * ROWS, tl.maximum(rows - ROWS, 0))
        bits = tl.load(start + first * ROW + inner).to(tl.int32) & UNSIGNED
        low, high = tl.minimum(low, tl.min(bits, 1)), tl.maximum(high, tl.max(bits, 1))
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
        bits = tl.load(start + outer).to(tl.int32) & UNSIGNED
        smallest, largest = tl.minimum(smallest, tl.min(bits, 0)), tl.maximum(largest, tl.max(bits, 0))

    cell = tl.arange(0, 2)
    bits = tl.where(cell == 0, smallest, largest)
    if DTYPE == "torch.bfloat16":
        bits = bits << 16
    elif ITEM < 4:
        # The 8-bit formats are read as a float16 with a shorter mantissa; then the exponents of e4m3fn are 8 too low.
        shift: tl.constexpr = 0 if ITEM == 2 else 8 if DTYPE == "torch.float8_e5m2" else 7
        wide = (bits << shift).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        if shift == 7:
            wide = tl.where(bits == 0x7F, float("nan"), wide * 256.0)
        bits = wide.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # the chip chooses the sign of a nan that it widens
    tl.atomic_min(cells + cell, bits, mask=cell == 0, sem="relaxed")
    tl.atomic_max(cells + cell, bits, mask=cell == 1, sem="relaxed")
