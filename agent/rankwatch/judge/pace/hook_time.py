"""The time that a rank spends in hooks of ours, taken in a few batches: nothing is timed in the others.

By wall time of steps one percent cannot be seen: it is less than what two steps of a bare model differ by.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from ...rerun.forward import Forward, RootEntry
from ...touch.parts import parameters_in
from ..events import ForwardBegan, ForwardComes, RootLeft
from .full_batches import FullBatches, Sample

log = logging.getLogger(__name__)

AROUND = 3e-6
"""Seconds of each call of a hook outside of its door: torch's way around a module with a hook, and the hook's own first lines.
Measured as what a step of 400 modules takes longer whose hooks return at once: 2.4 to 3.5 us a call on two machines."""

Lap = Callable[[], float | None]
"""The seconds in hooks since the lap before; None: the device has not come there yet."""


class Laps(Protocol):
    """Counts the time between ``enter`` and ``leave``, which do not nest."""

    def enter(self) -> None: ...
    def leave(self) -> None: ...
    def lap(self) -> Lap: ...


class Doors(Protocol):
    """What the hooks go through."""

    laps: Laps | None


class HostLaps:
    """By the host's clock. One lap may end within a hook: the rest of that counts for the next."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._began: float | None = None
        self._spent = 0.0

    def enter(self) -> None:
        self._began = self._clock()

    def leave(self) -> None:
        if self._began is not None:
            self._spent += self._clock() - self._began + AROUND
            self._began = None

    def lap(self) -> Lap:
        now = self._clock()
        spent = self._spent + (now - self._began if self._began is not None else 0.0)
        self._spent, self._began = 0.0, None if self._began is None else now
        return lambda: spent


class DeviceLaps:
    """By events on the device's stream. Where a hook waits for the device, that time is the training's: the device computes.

    Where the device waits for the host, the time between two events is the host's.
    """

    def __init__(self) -> None:
        self._pairs: list[tuple[Any, Any]] = []
        self._began: Any = None

    def enter(self) -> None:
        self._began = None if torch.cuda.is_current_stream_capturing() else _event()

    def leave(self) -> None:
        if self._began is not None and not torch.cuda.is_current_stream_capturing():
            self._pairs.append((self._began, _event()))
        self._began = None

    def lap(self) -> Lap:
        if self._began is not None:
            self._pairs.append((self._began, now := _event()))
            self._began = now
        pairs, self._pairs = self._pairs, []
        return lambda: (
            sum(begin.elapsed_time(end) for begin, end in pairs) / 1000 if not pairs or pairs[-1][1].query() else None
        )


def _event() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def laps_of(model: nn.Module) -> Callable[[], Laps]:
    """What takes the time of this model's hooks."""
    parameter = next(parameters_in(model), None)
    return DeviceLaps if parameter is not None and parameter.is_cuda else HostLaps


def _refusal(entry: RootEntry) -> str:
    """Why this forward must not be run again. Of code that fails as it is looked at, each batch is measured, as ever."""
    try:
        return Forward(entry.module, entry.args, entry.kwargs, "output", entry=entry).refusal
    except Exception as error:  # noqa: BLE001  of classes that we do not know
        log.debug("whether a forward can be run again is not known: %r", error)
        return f"whether a batch can be run again is not known: {type(error).__name__}"


class _Timed(NamedTuple):
    """A batch that is over, and whose laps may not be known yet."""

    is_full: bool
    is_lean: bool
    laps: list[Lap]
    whole: float


class HookTime:
    """Tells ``full`` what batches cost, and whether they can be run again.

    A batch goes from one ``ForwardComes`` to the next one that begins a batch, when all of the last one is judged and sent:
    it has to be told last. Evaluations in between count with the batch before them.

    Args:
        make: makes what takes the time.
        called: how many collectives the watched part of the training has called.
        is_lean: whether graphs without readings run in the forward that has begun.
    """

    events = (ForwardComes, ForwardBegan, RootLeft)

    def __init__(
        self,
        full: FullBatches,
        doors: Doors,
        make: Callable[[], Laps],
        called: Callable[[], int],
        is_lean: Callable[[], bool],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._full = full
        self._doors = doors
        self._make = make
        self._called = called
        self._lean = is_lean
        self._clock = clock
        self._over = deque[_Timed]()
        self._number = -1
        """The batch that runs, or ran last."""
        self._is_full = self._is_lean = False
        self._laps: list[Lap] = []
        self._began = self._came = 0.0
        self._is_known = False
        """Whether all of its time is."""
        self._entry: RootEntry | None = None
        self._called_before = 0

    def on(self, event: ForwardComes | ForwardBegan | RootLeft) -> None:
        if not (self._full.is_measuring or self._doors.laps is not None):
            return
        match event:
            case ForwardComes():
                self._came = self._clock()
                if self._doors.laps is not None:
                    self._laps.append(self._doors.laps.lap())
            case ForwardBegan(batch):
                number = batch.position.batch
                if batch.is_streamed and number != self._number:
                    self._end(number)
                    self._is_full, self._is_lean = batch.is_full, self._lean()
                    self._look(batch.entry)
            case RootLeft():
                self._look_back()

    def _end(self, number: int) -> None:
        """Another batch begins."""
        if self._is_known:
            self._over.append(_Timed(self._is_full, self._is_lean, self._laps, self._came - self._began))
        while self._over and None not in (laps := [lap() for lap in self._over[0].laps]):
            done = self._over.popleft()
            self._full.take(Sample(done.is_full, sum(filter(None, laps)), done.whole, done.is_lean), self._clock())
        self._full.wait(self._clock())
        is_timed = self._full.is_timed(number)
        self._is_known = is_timed and self._doors.laps is not None
        if not self._is_known:
            self._doors.laps = self._make() if is_timed else None
        self._number, self._laps, self._began = number, [], self._came

    # --- can it be run again? -----------------------------------------------------------------------------------------

    def _look(self, entry: RootEntry | None) -> None:
        if not self._full.is_measuring:
            return
        if entry is None:
            self._full.refuse("the model's parts are called, and not the model")
        self._entry, self._called_before = entry, self._called()

    def _look_back(self) -> None:
        """A forward of the model is over. What it was given is still there."""
        entry, self._entry = self._entry, None
        if entry is None or not self._full.is_measuring:
            return
        if self._called() != self._called_before:
            self._full.refuse("its forward communicates")
        elif self._doors.laps is not None and not self._is_known and (why := _refusal(entry)):  # once: through all modules
            self._full.refuse(why)
