"""Preallocated buffers for readings on their device, and the transfer of their numbers to the host."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..shared.types.frame import State, state_of
from ..touch.torch_private import raw_stream
from .extremes import ON_GPU, Layout, Measure, TapeRow, Unmeasurable, has_values, layout_of
from .kernel import EMPTY

FIRST_ROWS = 256
FEW_ROWS = 4
"""The rows of most frames: read one by one, which is faster than to slice."""

Event = torch.cuda.Event
"""When it has come, so has all that was done before on its device."""

Copy: TypeAlias = "tuple[Tensor, Event | None]"
"""Values on their way to the host: they are there after the event."""


def is_far(device: torch.device) -> bool:
    return device.type != "cpu"


def _stream_on(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def _within(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def to_host(values: Tensor, into: Tensor | None = None) -> Copy:
    """Begins to copy values to the host, in the stream in which they were written. They are there after the event.

    Values of the host are not copied. ``into``: pinned memory for them.
    """
    if values.device.type != "cuda":
        return values.cpu(), None
    host = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True) if into is None else into
    with torch.cuda.device(values.device):
        host.copy_(values, non_blocking=True)
        event = Event()
        event.record()
    return host, event


def wait_for(event: Event | None) -> None:
    if event is not None and not event.query():
        event.synchronize()


class Cell:
    """One reading's numbers. ``low`` and ``high`` are 0 until its row of the tape is read.

    ``state`` None: follows from the numbers.
    """

    __slots__ = ("high", "low", "state")

    def __init__(self, state: State | None = None, low: float = 0.0, high: float = 0.0) -> None:
        self.state = state
        self.low = low
        self.high = high

    @property
    def is_bad(self) -> bool:
        return self.state is State.NAN or self.state is State.INF

    def fill(self, low: float, high: float) -> bool:
        """Takes the numbers; returns whether they are not finite."""
        if high - high == 0.0:  # finite
            self.low, self.high = low, high
            if self.state is None:
                self.state = State.FINITE
            return False
        if math.isnan(high):  # the abs min of a tensor with a nan may be a number: see Measure
            low = high
        self.low, self.high = low, high
        if self.state is None:
            self.state = state_of(low, high)
        return self.is_bad


class Tape:
    """Rows of (abs min, abs max), in one buffer per device, stream and dtype. Each buffer is read in one transfer.

    A buffer is read in the stream in which it is written: another stream would not wait for its rows.
    """

    def __init__(self) -> None:
        self._measure = Measure()
        self._buffers: dict[tuple[torch.device, Layout, int], _Buffer] = {}
        self._on_host: dict[torch.dtype, _Buffer] = {}
        """Those of the host, by the dtype of what is measured."""
        self._has_bad = False

    def known(self, low: float, high: float) -> Cell:
        """A reading whose numbers are already on the host."""
        cell = Cell()
        self._has_bad |= cell.fill(low, high)
        return cell

    def write(self, values: Tensor, state: State | None) -> Cell:
        """Measures ``values``, which must not be empty nor have an autograd history. Raises Unmeasurable."""
        buffer = self._on_host.get(values.dtype) if values.is_cpu else None
        if buffer is None or not has_values(values):
            buffer = self._buffer_of(values)
        cells = buffer.cells
        if len(cells) == len(buffer.rows):
            buffer.grow(2 * len(cells))
        self._measure(values, buffer.rows[len(cells)], buffer.layout)
        cell = Cell(state)
        cells.append(cell)
        return cell

    def take(self, numbers: list[float] | Tensor, cells: list[Cell]) -> None:
        """Takes the numbers of a compiled graph: two for each of ``cells``, or a tensor on a device with a row for each.

        The graph may reuse the tensor's memory, so it is copied at once.
        """
        if isinstance(numbers, list):
            ends = iter(numbers)
            self._has_bad |= any([cell.fill(low, high) for cell, low, high in zip(cells, ends, ends)])  # noqa: B905
            return
        stream = raw_stream(numbers.get_device()) if numbers.is_cuda else 0
        buffer = self._buffer(numbers.device, ON_GPU if numbers.is_cuda else Layout(numbers.dtype, numbers.dtype), stream)
        buffer.put(numbers, cells)

    def read(self) -> bool:
        """Fills the cells written since the last read; returns whether any is not finite. Synchronises with the device."""
        bad = self._had_bad()
        for buffer in self._buffers.values():
            if buffer.cells:
                bad |= buffer.read()
        return bad

    @property
    def is_far(self) -> bool:
        """Whether to read what was written since the last read, the host would wait for a device."""
        return any([bool(buffer.cells) and is_far(buffer.device) for buffer in self._buffers.values()])

    def read_later(self) -> PendingRead:
        """Begins to read, without waiting: the rows are copied to the host in the stream in which they were written."""
        return PendingRead([buffer.copy() for buffer in self._buffers.values() if buffer.cells], self._had_bad())

    def restart(self) -> None:
        """Drops what was not read, with the buffers: an interruption may have left them half written."""
        self._buffers.clear()
        self._on_host.clear()
        self._has_bad = False

    def _had_bad(self) -> bool:
        bad, self._has_bad = self._has_bad, False
        return bad

    def _buffer_of(self, values: Tensor) -> _Buffer:
        layout = layout_of(values)
        if values.is_cuda:
            if torch.cuda.is_current_stream_capturing():
                raise Unmeasurable("a CUDA graph is being captured, which would measure again at each replay")
            return self._buffer(values.device, layout, raw_stream(values.get_device()))
        buffer = self._buffer(values.device, layout)
        if values.is_cpu:
            self._on_host[values.dtype] = buffer
        return buffer

    def _buffer(self, device: torch.device, layout: Layout, stream: int = 0) -> _Buffer:
        """``stream``: the current one of a CUDA device."""
        buffer = self._buffers.get((device, layout, stream))
        if buffer is None:
            buffer = self._buffers[device, layout, stream] = _Buffer(device, layout, _stream_on(device))
        return buffer


class PendingRead:
    """Rows on their way to the host."""

    def __init__(self, copies: list[_Copy], has_bad: bool) -> None:
        self._copies = copies
        self._has_bad = has_bad

    def is_ready(self) -> bool:
        return all(copy.event is None or copy.event.query() for copy in self._copies)

    def wait(self) -> None:
        """Waits for the rows, which blocks only this thread."""
        for copy in self._copies:
            wait_for(copy.event)

    def finish(self) -> bool:
        """Waits for the rows, and fills their cells; returns what ``Tape.read`` does."""
        self.wait()
        bad = any([_fill(copy.cells, copy.rows.tolist()) for copy in self._copies]) or self._has_bad
        for copy in self._copies:
            copy.free()
        return bad


class _Copy(NamedTuple):
    """Rows on their way. ``free`` gives their pinned memory back to the buffer, once they are read."""

    cells: list[Cell]
    rows: Tensor
    event: Event | None = None
    free: Callable[[], None] = lambda: None


class _Buffer:
    """``rows`` to write to. The first ones belong to ``cells``; a cell is added after its row was written."""

    def __init__(self, device: torch.device, layout: Layout, stream: torch.cuda.Stream | None) -> None:
        self.device = device
        self._stream = stream
        self.layout = layout
        self._is_updated = layout.written is not layout.read and device.type != "cpu"
        self._is_on_host = device.type == "cpu" and stream is None
        self.cells: list[Cell] = []
        self._pinned: list[Tensor] = []  # not in use: a few in all, as each part is read at most one batch later
        self._allocate(FIRST_ROWS)

    def put(self, rows: Tensor, cells: list[Cell]) -> None:
        """Copies rows that a compiled graph measured, one for each of ``cells``."""
        used = len(self.cells)
        if used + len(rows) > len(self.rows):
            self.grow(2 * (used + len(rows)))
        self._read[used : used + len(rows)].copy_(rows)
        self.cells += cells

    def read(self) -> bool:
        cells, self.cells = self.cells, []
        used = len(cells)
        if used <= len(self._first):
            bad = False
            for cell, row in zip(cells, self._first):  # noqa: B905
                low, high = row.tolist()
                bad |= cell.fill(low, high)
            return bad
        with _within(self._stream):
            numbers = self._read[:used].tolist()
            self._clear(used)
        return _fill(cells, numbers)

    def copy(self) -> _Copy:
        with _within(self._stream):
            return self._copy()

    def _copy(self) -> _Copy:
        cells, self.cells = self.cells, []
        used = len(cells)
        if self.device.type != "cuda":
            rows, event = to_host(self._read[:used].clone())
            self._clear(used)
            return _Copy(cells, rows, event)
        pinned = self._pinned.pop() if self._pinned else None
        if pinned is None or len(pinned) < used:
            pinned = torch.empty((len(self.rows), 2), dtype=self.layout.read, device="cpu", pin_memory=True)
        rows, event = to_host(self._read[:used], pinned[:used])
        self._clear(used)
        return _Copy(cells, rows, event, partial(self._pinned.append, pinned))

    def _clear(self, used: int) -> None:
        if self._is_updated:
            self._written[:used].copy_(self._empty[:used])

    def grow(self, rows: int) -> None:
        used, written = len(self.cells), self._written
        self._allocate(rows)
        self._written[:used].copy_(written[:used])

    def _allocate(self, rows: int) -> None:
        written, read = self.layout
        with torch.inference_mode(False), torch.no_grad():
            self._written = torch.zeros((rows, 2), dtype=written, device=self.device)
            self._read = self._written.view(read)
            if self._is_updated:
                self._empty = torch.tensor(EMPTY, dtype=written, device=self.device).expand(rows, 2).contiguous()
                self._written.copy_(self._empty)
        self._first = list(self._read[:FEW_ROWS]) if self._is_on_host else []
        self.rows = [TapeRow(row[0], row[1], row) for row in self._written]
        if self._is_on_host and written is not read:
            numbers = [(row[0], row[1]) for row in self._read]
            self.rows = [row._replace(numbers=two) for row, two in zip(self.rows, numbers, strict=True)]


def _fill(cells: list[Cell], numbers: list[list[float]]) -> bool:
    bad = False
    for cell, (low, high) in zip(cells, numbers, strict=True):
        bad |= cell.fill(low, high)
    return bad
