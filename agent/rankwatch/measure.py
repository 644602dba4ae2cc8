"""Tensor -> (abs min, abs max). The only file with numerics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from . import kernel

SCRATCH_BYTES = 512 * 1024
"""Per thread: |x| of a part stays in the second-level cache while it is reduced."""

_BITS = {
    torch.float64: (torch.int64, 0x7FFF_FFFF_FFFF_FFFF),
    torch.float32: (torch.int32, 0x7FFF_FFFF),
    torch.float16: (torch.int16, 0x7FFF),
    torch.bfloat16: (torch.int16, 0x7FFF),
}
"""The integers of a dtype's size, and the mask that clears the sign. Without it the bit patterns of floats are ordered as
the floats are, a nan above inf, and integers are reduced up to twice as fast (measured on AVX-512, also for the 16-bit types)."""


class Unmeasurable(Exception):
    """A tensor has no values to read (meta), or a layout or dtype torch cannot reduce."""


class Layout(NamedTuple):
    """How a tensor's two numbers are kept: written as ``written``, read as ``read`` (the same bits)."""

    written: torch.dtype
    read: torch.dtype


class Row(NamedTuple):
    """A row of the tape: two 0-dim tensors, and both as one of two elements."""

    low: Tensor
    high: Tensor
    both: Tensor


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name of a dtype without ``torch.``."""
    return str(dtype)[6:]


def local(tensor: Tensor) -> Tensor:
    """The values that lie on this rank: a DTensor's shard, else the tensor itself, without its autograd history."""
    detached = tensor.detach()
    to_local = getattr(detached, "to_local", None)
    return to_local().detach() if to_local is not None else detached


def layout_of(values: Tensor) -> Layout:
    """How the two numbers of ``values`` are kept.

    Raises:
        Unmeasurable: there are no values, or no way to reduce them.
    """
    if values.layout is not torch.strided or values.is_nested or values.is_quantized or values.device.type == "meta":
        raise Unmeasurable(f"{values.device.type}, {values.layout}")
    if values.numel() and not values.untyped_storage().nbytes():
        raise Unmeasurable("its memory is given back, as FSDP does between uses")
    dtype = values.dtype
    if values.device.type == "cpu":
        bits = _BITS.get(dtype)
        if bits is not None:
            return Layout(bits[0], dtype)
    elif kernel.is_supported(values):
        return Layout(torch.int32, torch.float32)
    # Widened: float8, which has no extremes in torch, to float32; integers, whose smallest has no abs, to float64.
    if dtype in (torch.float64, torch.complex128) or not (dtype.is_floating_point or dtype.is_complex):
        wide = torch.float32 if values.device.type == "mps" else torch.float64
        return Layout(wide, wide)
    return Layout(torch.float32, torch.float32)


class Measure:
    """Measures tensors, reusing one scratch buffer per dtype. Allocates nothing that grows with them. Not thread-safe."""

    def __init__(self) -> None:
        self._scratch: dict[torch.dtype, Tensor] = {}
        self._views: dict[tuple[torch.dtype, int], Tensor] = {}
        self._parts: dict[torch.dtype, tuple[list[Tensor], list[Tensor], Tensor]] = {}

    def __call__(self, values: Tensor, row: Row, layout: Layout) -> None:
        """Writes abs min and abs max of ``values`` into ``row``, without a host synchronisation.

        A nan anywhere makes abs max nan, and abs min nan or not. Integers and booleans are measured as numbers, complex
        numbers by their magnitude. ``values`` is not empty; ``row`` is of ``layout``, that of ``values``.
        """
        if values.device.type != "cpu":
            _on_device(values, row, layout)
            return
        dtype = layout.written
        values = _flat(values)
        room = self._room(dtype)
        if values.numel() <= room:
            torch.aminmax(self._magnitudes(values, layout), out=(row.low, row.high))
            return
        parts = list(_split(values, room))
        lows, highs, cells = self._cells(dtype, len(parts))
        for part, low, high in zip(parts, lows, highs, strict=False):
            torch.aminmax(self._magnitudes(part, layout), out=(low, high))
        torch.amin(cells[0, : len(parts)], dim=0, out=row.low)
        torch.amax(cells[1, : len(parts)], dim=0, out=row.high)

    def _magnitudes(self, part: Tensor, layout: Layout) -> Tensor:
        """|x| of ``part`` in the scratch buffer: as bits where its dtype has them, else as wider numbers."""
        scratch = self._view(layout.written, part.numel())
        if part.dim() != 1:
            scratch = scratch.view(part.shape)
        if layout.written is not layout.read:
            return torch.bitwise_and(part.view(layout.written), _BITS[layout.read][1], out=scratch)
        if part.is_complex():
            return torch.abs(part, out=scratch)
        return scratch.copy_(part).abs_()

    def _room(self, dtype: torch.dtype) -> int:
        if dtype not in self._scratch:
            # An inference tensor could not be written to outside of inference mode again.
            with torch.inference_mode(False):
                size = SCRATCH_BYTES * min(torch.get_num_threads(), 16) // dtype.itemsize
                self._scratch[dtype] = torch.empty(size, dtype=dtype)
        return self._scratch[dtype].numel()

    def _view(self, dtype: torch.dtype, numel: int) -> Tensor:
        view = self._views.get((dtype, numel))
        if view is None:
            if len(self._views) > 512:
                self._views.clear()
            view = self._views[dtype, numel] = self._scratch[dtype][:numel]
        return view

    def _cells(self, dtype: torch.dtype, count: int) -> tuple[list[Tensor], list[Tensor], Tensor]:
        if dtype not in self._parts or len(self._parts[dtype][0]) < count:
            with torch.inference_mode(False):
                cells = torch.empty((2, max(64, 2 * count)), dtype=dtype)
            self._parts[dtype] = list(cells[0]), list(cells[1]), cells
        return self._parts[dtype]


def _on_device(values: Tensor, row: Row, layout: Layout) -> None:
    if layout.written is not layout.read:
        kernel.record(values, row.both)
        return
    if not values.is_complex():
        values = values.to(layout.read)
    smallest, largest = torch.aminmax(values.abs())
    row.low.copy_(smallest)
    row.high.copy_(largest)


def _flat(values: Tensor) -> Tensor:
    """``values`` as one stretch of memory where it is one, in whatever order; without what ``expand`` repeats."""
    if values.is_contiguous():
        return values if values.dim() == 1 else values.view(-1)
    for dim, (size, stride) in enumerate(zip(values.shape, values.stride(), strict=True)):
        if stride == 0 and size > 1:
            values = values.narrow(dim, 0, 1)
    expected = 1
    for stride, size in sorted(zip(values.stride(), values.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return values
            expected *= size
    return values.as_strided((values.numel(),), (1,))


def _split(values: Tensor, room: int) -> Iterator[Tensor]:
    """Parts of at most ``room`` elements."""
    if values.numel() <= room:
        yield values
    elif values.dim() == 1:
        yield from values.split(room)
    else:
        dim = next(dim for dim, size in enumerate(values.shape) if size > 1)
        rest = values.numel() // values.shape[dim]
        for part in values.split(max(1, room // rest), dim):
            yield from _split(part, room)


class Counts(NamedTuple):
    """The shape of a tensor (of its local shard) and how many of its elements are not finite."""

    shape: tuple[int, ...]
    numel: int
    nans: int
    infs: int


def count_non_finite(value: Tensor | float) -> Counts:
    """Counts in several passes and with host syncs: for after a trip."""
    values = local(value) if isinstance(value, Tensor) else torch.tensor(value)
    if values.dtype.is_floating_point and values.dtype not in _BITS:
        values = values.to(torch.float32)
    return Counts(tuple(values.shape), values.numel(), int(torch.isnan(values).sum()), int(torch.isinf(values).sum()))
