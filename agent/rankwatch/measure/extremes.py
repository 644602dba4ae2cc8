"""Tensor -> (abs min, abs max), on the host and on devices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..shared.bounded import BoundedDict
from . import kernel

SCRATCH_BYTES = 512 * 1024
"""The scratch buffer's size per thread, for at least two threads. Larger tensors are measured in pieces, so that a thread's
|x| stays in the second-level cache while it is reduced."""

FEW = 8192
"""Up to so many elements, one operator less saves more time than integers (see ``_BITS``): measured for each dtype."""

MAX_VIEWS = 512
"""Shapes whose view of the scratch buffer is remembered."""


class Unmeasurable(Exception):
    """The tensor has no values to read (meta), or a layout or dtype that torch cannot reduce."""


class Layout(NamedTuple):
    """The dtypes of a tensor's two numbers on the tape: written as ``written``, read as ``read`` (the same bits)."""

    written: torch.dtype
    read: torch.dtype


ON_GPU = Layout(torch.int64, torch.float64)
"""All dtypes share one buffer there, so one transfer brings the numbers of a batch. See ``kernel.record``."""

_BITS = {
    torch.float64: Layout(torch.int64, torch.float64),
    torch.float32: Layout(torch.int32, torch.float32),
    torch.float16: Layout(torch.int16, torch.float16),
    torch.bfloat16: Layout(torch.int16, torch.bfloat16),
}
"""On the host, floats are measured as integers of the same size. Without the sign bit, the bit patterns of floats have the
order of the floats, with nan above inf; and integers are reduced up to twice as fast (measured on AVX-512, also for 16
bits)."""


_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_AS_FLOAT64 = (torch.float64, torch.complex64, torch.complex128)
_COMPLEX = {torch.float32: torch.complex64, torch.float64: torch.complex128}


class TapeRow(NamedTuple):
    """A row of the tape: two 0-dim tensors, and the same memory as one tensor of two elements.

    ``numbers``: on the host, where they are written as integers (see ``_BITS``), the same memory as two floats.
    """

    low: Tensor
    high: Tensor
    both: Tensor
    numbers: tuple[Tensor, Tensor] | None = None


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name of a dtype without ``torch.``."""
    return str(dtype)[6:]


def local(tensor: Tensor) -> Tensor:
    """The values on this rank, without autograd history: a DTensor's shard, else the tensor itself.

    Of a nested or sparse tensor: the values that it stores.

    Raises:
        Unmeasurable: a nested tensor on a device stores more than its values; to find them, the host would wait for it.
    """
    detached = tensor.detach()
    to_local = getattr(detached, "to_local", None)
    if to_local is not None:
        return to_local().detach()  # type: ignore[no-any-return]
    return _stored(detached) if is_stored_apart(detached) else detached


def is_stored_apart(tensor: Tensor) -> bool:
    """Whether the values of a tensor are in another one: it is nested or sparse."""
    return tensor.is_nested or tensor.layout in _SPARSE


def _stored(tensor: Tensor) -> Tensor:
    if tensor.layout is torch.sparse_coo:
        return tensor._values()
    # Between the rows of a jagged tensor with lengths is memory that is not part of it.
    lengths = getattr(tensor, "lengths", lambda: None)() if tensor.is_nested else None
    if lengths is None:
        return tensor.values()
    if not tensor.is_cpu:
        raise Unmeasurable("a jagged tensor with lengths, on a device")
    return torch.cat([row.reshape(-1) for row in tensor.unbind()])


def has_values(values: Tensor) -> bool:
    """Whether a tensor is one range of memory, and the memory is not given back, as FSDP does between uses."""
    is_plain = values.layout is torch.strided and not values.is_nested
    try:
        return is_plain and (values.untyped_storage().nbytes() > 0 or not values.numel())
    except NotImplementedError:  # within a transformation of torch.func it has no memory
        return False


def layout_of(values: Tensor) -> Layout:
    """The dtypes of the two numbers of ``values``.

    Raises:
        Unmeasurable: there are no values, or torch cannot reduce them.
    """
    if not has_values(values) or values.is_quantized or values.is_meta:
        raise Unmeasurable(f"{values.device.type}, {values.layout}, or its memory is given back")
    if values.is_cuda:
        return ON_GPU
    if values.is_cpu and values.dtype in _BITS:
        return _BITS[values.dtype]
    wide = _wider(values)
    return Layout(wide, wide)


def _wider(values: Tensor) -> torch.dtype:
    """As what torch's operators measure: float8, for which torch has no aminmax, as float32; integers, whose smallest value
    has no abs, as float64; complex64, whose magnitude may not fit into float32, as float64."""
    dtype = values.dtype
    if dtype in _AS_FLOAT64 or not (dtype.is_floating_point or dtype.is_complex):
        return torch.float32 if values.device.type == "mps" else torch.float64
    return torch.float32


class Measure:
    """Measures tensors with one scratch buffer per dtype, so that memory does not grow with the tensors. Not thread-safe."""

    def __init__(self) -> None:
        self._scratch: dict[torch.dtype, Tensor] = {}
        self._masks: dict[torch.dtype, Tensor] = {}
        self._views = BoundedDict[tuple[torch.dtype, torch.Size], Tensor](MAX_VIEWS)
        self._parts: dict[torch.dtype, tuple[list[Tensor], list[Tensor], Tensor]] = {}

    def __call__(self, values: Tensor, row: TapeRow, layout: Layout) -> None:
        """Writes abs min and abs max of ``values`` into ``row``, without a host synchronisation.

        Any nan makes the abs max nan; the abs min may be nan or a number. Integers and booleans are measured as numbers,
        complex numbers by their magnitude. ``values`` must not be empty; ``row`` must have ``layout``, the layout of
        ``values``.
        """
        # The hot paths, in one function: after a module's work, none of Python's own memory is in the caches.
        if row.numbers is not None and values.numel() <= FEW:
            scratch = self._views.get((layout.read, values.shape))
            if scratch is None:
                scratch = self._view_as_read(layout, values.shape)
            torch.aminmax(torch.abs(values, out=scratch), out=row.numbers)
            return
        if not values.is_cpu:
            _on_device(values, row, layout)
            return
        dtype = layout.written
        if dtype is not layout.read and values.is_contiguous() and not values.is_neg():
            scratch = self._views.get((dtype, values.shape))
            if scratch is not None:
                torch.bitwise_and(values.view(dtype), self._masks[dtype], out=scratch)
                torch.aminmax(scratch, out=(row.low, row.high))
                return
        if values.is_neg():  # x.conj().imag, say: its values are negated on reading
            values = values.resolve_neg()
        if not values.is_contiguous():
            values = _dense(values)
        room = self._room(dtype)
        if values.numel() <= room:
            torch.aminmax(self._magnitudes(values, layout), out=(row.low, row.high))
            return
        if values.is_contiguous():
            values = values.view(-1)
        parts = list(split(values, room))
        lows, highs, cells = self._cells(dtype, len(parts))
        for part, low, high in zip(parts, lows, highs, strict=False):
            torch.aminmax(self._magnitudes(part, layout), out=(low, high))
        torch.amin(cells[0, : len(parts)], dim=0, out=row.low)
        torch.amax(cells[1, : len(parts)], dim=0, out=row.high)

    def _magnitudes(self, part: Tensor, layout: Layout) -> Tensor:
        """|x| of ``part`` in the scratch buffer, as bits or as numbers of a wider dtype (see ``layout_of``)."""
        dtype = layout.written
        scratch = self._view(dtype, part.shape)
        if dtype is not layout.read:
            # The mask is a tensor: of a number, torch would make one at each call, which costs more than a small tensor.
            return torch.bitwise_and(part.view(dtype), self._masks[dtype], out=scratch)
        if part.is_complex():
            return torch.abs(part.to(_COMPLEX[dtype]), out=scratch)
        return scratch.copy_(part).abs_()

    def _room(self, dtype: torch.dtype) -> int:
        if dtype not in self._scratch:
            # A tensor made in inference mode could not be written to outside of it.
            with torch.inference_mode(False):
                size = SCRATCH_BYTES * min(max(torch.get_num_threads(), 2), 16) // dtype.itemsize
                self._scratch[dtype] = torch.empty(size, dtype=dtype, device="cpu")
                if not dtype.is_floating_point:
                    self._masks[dtype] = torch.tensor(torch.iinfo(dtype).max, dtype=dtype, device="cpu")
        return self._scratch[dtype].numel()

    def _view(self, dtype: torch.dtype, shape: torch.Size) -> Tensor:
        view = self._views.get((dtype, shape))
        if view is None:
            self._room(dtype)
            with torch.inference_mode(False):
                view = self._views[dtype, shape] = self._scratch[dtype][: shape.numel()].view(shape)
        return view

    def _view_as_read(self, layout: Layout, shape: torch.Size) -> Tensor:
        view = self._view(layout.written, shape)
        with torch.inference_mode(False):
            view = self._views[layout.read, shape] = view.view(layout.read)
        return view

    def _cells(self, dtype: torch.dtype, count: int) -> tuple[list[Tensor], list[Tensor], Tensor]:
        if dtype not in self._parts or len(self._parts[dtype][0]) < count:
            with torch.inference_mode(False):
                cells = torch.empty((2, max(64, 2 * count)), dtype=dtype, device="cpu")
            self._parts[dtype] = list(cells[0]), list(cells[1]), cells
        return self._parts[dtype]


def _on_device(values: Tensor, row: TapeRow, layout: Layout) -> None:
    if kernel.is_supported(values):
        kernel.record(values, row.both)
        return
    wide = _wider(values)
    values = values.to(_COMPLEX[wide] if values.is_complex() else wide)
    row.both.view(layout.read).copy_(torch.stack(torch.aminmax(values.abs())))


def _dense(values: Tensor) -> Tensor:
    """``values`` as one range of memory if they fill one, in any order; without the repetitions of ``expand``."""
    for dim, (size, stride) in enumerate(zip(values.shape, values.stride(), strict=True)):
        if stride == 0 and size > 1:
            values = values.narrow(dim, 0, 1)
    return values.as_strided((values.numel(),), (1,)) if kernel.is_dense(values) else values


def split(values: Tensor, room: int) -> Iterator[Tensor]:
    """Pieces of at most ``room`` elements."""
    if values.numel() <= room:
        yield values
    elif values.dim() == 1:
        yield from values.split(room)
    else:
        dim = next(dim for dim, size in enumerate(values.shape) if size > 1)
        rest = values.numel() // values.shape[dim]
        for part in values.split(max(1, room // rest), dim):
            yield from split(part, room)


class NonFiniteCounts(NamedTuple):
    """The shape of a tensor, or of its local shard, and the numbers of its nan and inf elements."""

    shape: tuple[int, ...]
    numel: int
    nans: int
    infs: int


def count_non_finite(value: Tensor | float) -> NonFiniteCounts:
    """Counts in several passes, with host synchronisations: only for use after a trip."""
    values = local(value) if isinstance(value, Tensor) else torch.tensor(value, device="cpu")
    if values.dtype.is_floating_point and values.dtype not in _BITS:  # float8
        values = values.to(torch.float32)
    return NonFiniteCounts(
        tuple(values.shape), values.numel(), int(torch.isnan(values).sum()), int(torch.isinf(values).sum())
    )
