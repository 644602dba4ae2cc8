"""Records -> judgement: when their numbers are read, what trips, the ring of last frames, and who is told.

``check="frame"`` reads and judges each frame as it comes; ``"batch"`` all of a part at its end; ``"async"`` begins to read
there and judges when the numbers have come, one part later at most.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

from ..errors import TrainingAborted
from ..measure.extremes import NonFiniteCounts, count_non_finite
from ..measure.recorder import Call, PendingFrame, Recorder
from ..measure.tape import PendingRead, Tape
from ..shared.cause import Trip
from ..shared.frame import BatchSummary, Frame, FrameTable, Kind, Phase, Position
from ..shared.notice import Notice
from ..shared.tuning import Check
from .batch import BatchInProgress, BatchPart, Tables
from .health import Health
from .policy import Judge

log = logging.getLogger(__name__)


class BadReading(NamedTuple):
    """A tripping reading of a frame, counted (0 and 0: the tensor was gone)."""

    label: str
    nans: int
    infs: int


class Observer(Protocol):
    """What is told, in the training thread. The exceptions that are returned are raised in the training.

    A trip is first told by ``on_found``, before anything that shows this rank further on; ``on_trip`` then asks what to raise.
    """

    def on_batch(self, table: FrameTable, summary: BatchSummary) -> None: ...
    def on_notice(self, notice: Notice) -> None: ...
    def on_trace(self, frames: list[Frame]) -> None: ...
    def on_found(self, trip: Trip) -> None: ...
    def on_trip(self, trip: Trip, bad_readings: list[BadReading]) -> TrainingAborted: ...


class FoundTrip(NamedTuple):
    trip: Trip
    bad_readings: list[BadReading]


class _ReadPart(NamedTuple):
    reading: PendingRead
    part: BatchPart


class Settler:
    """Judges frames. ``waiting`` is a trip that was found and not raised yet.

    Args:
        steps: tells how many optimizer steps are done.
    """

    def __init__(
        self,
        check: Check,
        judge: Judge,
        ring: int,
        tape: Tape,
        recorder: Recorder,
        observer: Observer,
        *,
        judge_traced: bool,
        steps: Callable[[], int],
    ) -> None:
        self.check = check
        self.judge = judge
        self.waiting: FoundTrip | None = None
        self._ring: deque[PendingFrame] = deque(maxlen=ring)
        self._tape = tape
        self._recorder = recorder
        self._observer = observer
        self._judge_traced = judge_traced
        self._steps = steps
        self._tables = Tables()
        self._health = Health()
        self._closed: deque[BatchPart] = deque()  # those whose frames are judged late, until they are
        self._pending: deque[_ReadPart] = deque()
        self._has_bad = False  # whether anything not finite was ever read: while not, nothing needs to be judged

    def unsettled(self, batches: Iterable[BatchInProgress]) -> Position | None:
        """The position of the first frame that is not judged yet; None when all are. For any thread."""
        # In this order: a part is among the closed ones before its batch lets go of it.
        late = [part.first for part in [batch.part for batch in batches] if part.frames and self._is_late(part)]
        late += [part.first for part in tuple(self._closed)]
        return min(late, default=None)

    def add(self, frame: PendingFrame, part: BatchPart, call: Call | None) -> None:
        """Judges a frame, if frames are judged as they come."""
        if self._is_late(part):
            return
        if self._tape.read():
            self._has_bad = True
        self._ring.append(frame)
        if not self._has_bad or not self.judge.tripping(frame.spec, frame.states):
            return
        values = None
        if call is not None:
            # Evidence is measured anew, without the cache: x.data.mul_() changes a tensor behind autograd's back.
            self._recorder.forget()
            fresh, values = self._recorder.again(frame, *call)
            frame.cells[:] = fresh.cells
            self._tape.read()
        found = self._trip(frame, part, values)
        if found is None:
            return
        self._observer.on_found(found.trip)
        if found.trip.culprit.kind is Kind.MARKED:
            self.waiting = self.waiting or found  # detect_overflow returns to its caller, and the next hook raises
        else:
            raise self._observer.on_trip(*found)

    def close(self, batch: BatchInProgress) -> None:
        """A part is whole: it is read, judged if its frames were not, and told; or will be, once its numbers are there."""
        part = self._cut(batch)
        if self.check is Check.ASYNC:
            self._pending.append(_ReadPart(self._tape.read_later(), part))
            while len(self._pending) > 1:
                self._settle_first()
        else:
            self._has_bad |= self._tape.read()
            self._settle(part)

    def poll(self, *, wait: bool = False) -> None:
        """Judges what has come in the meantime; ``wait``: all that is on its way."""
        while self._pending and (wait or self._pending[0].reading.is_ready()):
            self._settle_first()

    def _cut(self, batch: BatchInProgress) -> BatchPart:
        if batch.part.frames and self._is_late(batch.part):
            self._closed.append(batch.part)
        return batch.cut()

    def _judged(self, part: BatchPart) -> None:
        if part in self._closed:
            self._closed.remove(part)

    def abandon(self, batch: BatchInProgress) -> None:
        """The forward of a part raised: what ran of it is judged, but not told as a batch."""
        part = self._cut(batch)
        self._has_bad |= self._tape.read()
        found = self._judge_late(part)
        self._trace(part)
        found, self.waiting = self.waiting or found, None
        if found is not None and self._is_late(part):
            self._observer.on_found(found.trip)  # the exception on its way is the user's; the verdict is ours all the same
        self._judged(part)

    def raise_waiting(self) -> None:
        if self.waiting is not None:
            found, self.waiting = self.waiting, None
            raise self._observer.on_trip(*found)

    def _is_late(self, part: BatchPart) -> bool:
        """Whether the frames of a part are judged after it: a traced batch is traced to its end, and only then judged."""
        return self.check is not Check.FRAME or part.batch.traced

    def _settle_first(self) -> None:
        reading, part = self._pending.popleft()
        self._has_bad |= reading.finish()
        self._settle(part)

    def _settle(self, part: BatchPart) -> None:
        found = self._judge_late(part)
        self._trace(part)
        if found is not None:
            self._observer.on_found(found.trip)
        self._judged(part)
        if part.frames and part.batch.is_streamed:
            self._observer.on_batch(*part.finish(self._tables))
            for notice in self._health.look(part):
                self._observer.on_notice(notice)
        if found is not None:
            raise self._observer.on_trip(*found)

    def _judge_late(self, part: BatchPart) -> FoundTrip | None:
        if not self._is_late(part):
            return None
        if not self._has_bad or (part.batch.traced and not self._judge_traced):
            self._ring.extend(part.frames)
            return None
        for frame in part.frames:
            self._ring.append(frame)
            if self.judge.tripping(frame.spec, frame.states):
                found = self._trip(frame, part, None)
                if found is not None:
                    return found
        return None

    def _trace(self, part: BatchPart) -> None:
        if part.batch.traced and part.frames:
            self._observer.on_trace([frame.measured() for frame in part.frames])

    def _trip(self, frame: PendingFrame, part: BatchPart, values: list[Any] | None) -> FoundTrip | None:
        """The trip of the last frame of the ring; None if a loss scaler absorbs it."""
        if frame.spec.phase is Phase.BACKWARD and part.batch.is_absorbed:
            return None
        # Weights are measured at a cadence. Before the next optimizer step they are still what they were in these frames.
        if frame.spec.phase is not Phase.BACKWARD:
            self._recorder.refresh([known for known in self._ring if known.step == self._steps()])
            self._tape.read()
        tripping = self.judge.tripping(frame.spec, frame.states)
        rows = frame.spec.readings
        first = min(tripping, key=lambda row: (_CAUSAL_ORDER.index(rows[row].kind), row))
        counts = {row: _counts(values[row] if values is not None else None) for row in tripping}
        root_inputs = part.batch.root_inputs
        trip = Trip(
            position=frame.position,
            reading=first,
            frames=tuple([known.measured() for known in self._ring]),
            root_inputs=root_inputs.measured().readings if root_inputs is not None else (),
            optimizer_step=part.batch.optimizer_step,
            shape=counts[first].shape,
            numel=counts[first].numel,
            nan_count=counts[first].nans,
            inf_count=counts[first].infs,
            time=time.time(),
            loss_scale=part.batch.loss_scale if frame.spec.phase is Phase.BACKWARD else 0.0,
        )
        return FoundTrip(trip, [BadReading(rows[row].label, counts[row].nans, counts[row].infs) for row in tripping])


def _counts(value: Any) -> NonFiniteCounts:
    if value is None:
        return NonFiniteCounts((), 0, 0, 0)
    try:
        return count_non_finite(value)
    except RuntimeError as error:  # out of memory, say: the trip counts for more than its counts
        log.debug("cannot count what is not finite: %s", error)
        return NonFiniteCounts(tuple(getattr(value, "shape", ())), 0, 0, 0)


_CAUSAL_ORDER = (
    Kind.PARAMETER, Kind.MARKED, Kind.OUTPUT, Kind.INPUT, Kind.KEYWORD, Kind.BUFFER,
    Kind.GRADIENT, Kind.GRAD_INPUT, Kind.GRAD_OUTPUT,
)  # fmt: skip
"""Of several tripping readings the first in this order is named: a bad weight explains a bad output."""
