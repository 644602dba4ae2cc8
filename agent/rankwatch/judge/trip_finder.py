"""A frame that trips -> the trip: measures its call anew, or runs its batch again, and says what of it is bad.

The ring has the last frames, up to the one that trips. Of a batch between those that are measured in full, the second run tells
which frame was the first: its frames take the place of those in the ring.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from ..measure.extremes import NonFiniteCounts, count_non_finite
from ..measure.recorder import Call, PendingFrame, Recorder
from ..measure.tape import Cell, Tape
from ..rerun.forward import RootEntry
from ..shared.figures import figure
from ..shared.types.config import Config
from ..shared.types.frame import BEGINNING, Kind, Moment, Phase, ReadingSpec, State
from ..shared.types.notice import Notice, NoticeKind
from ..shared.types.trip import Trip
from .batch import BatchInProgress, BatchPart, LossScaling
from .between import RunAgain, UnmeasuredBatchRerun, not_again
from .changes import guilty_collective, mark_stale
from .evidence import Evidence
from .lifecycle import Life
from .policy import Judge
from .reporter import BadReading, FoundTrip
from .steps.held import is_born_here
from .steps.optimizer_steps import OptimizerSteps

log = logging.getLogger(__name__)

NO_DATA = 1e10
"""Before a training, what is larger is memory that nobody has written: of its numbers, one in three is."""

_INPUTS = (Kind.INPUT, Kind.KEYWORD)


class TripFinder:
    """``judge`` decides which readings trip. ``closeup``: the seconds that the next close-up may take; 0: there is none.

    Args:
        between: runs a batch again of which only the root was measured.
        tell: told of what does not trip, as there is no training yet.
    """

    def __init__(
        self,
        config: Config,
        life: Life,
        tape: Tape,
        recorder: Recorder,
        steps: OptimizerSteps,
        between: UnmeasuredBatchRerun,
        evidence: Evidence,
        tell: Callable[[Notice], None],
    ) -> None:
        self.judge = Judge(config.policy, config.ignore)
        self.ring: deque[PendingFrame] = deque(maxlen=config.max_frames_to_save)
        self.closeup = self._closeup = config.closeup
        self.awaits_training = False
        """Whether nobody has asked for this watch: what runs before a training is no batch."""
        self._gradients = config.gradients
        self._life = life
        self._tape = tape
        self._recorder = recorder
        self._steps = steps
        self._between = between
        self._evidence = evidence
        self._tell = tell

    def begin_anew(self) -> None:
        """What tripped is over: the next trip has frames and a close-up of its own."""
        self.ring.clear()
        self.closeup = self._closeup

    def find(self, frame: PendingFrame, part: BatchPart, call: Call | None) -> FoundTrip | None:
        """The trip of the ring's last frame, or of an earlier one that only shows when its forward is run again."""
        if frame.is_absorbed or self._is_of_probe(frame, part.batch):
            return None
        batch, kind = part.batch, frame.spec.readings[0].kind
        forward, entry = part.loss_of or part, batch.entry or (batch.run.entry if batch.run is not None else None)
        if frame.spec.phase is not Phase.FORWARD or frame.step != self._steps.done:
            return self._trip_of_call(frame, part, part.values, call)
        if kind is Kind.LOSS and part is forward:  # it did not follow upon its forward, which was sent
            found = self.find_again(BatchPart(batch), entry)
            return found or self._trip_of_call(frame, part, part.values, call)
        again = self._between.measure(batch, entry, self.judge)
        if again is not None and again.is_bad:
            return self._trip_of_run(again, forward)
        if again is not None and kind is not Kind.MARKED:  # it did not recur, or the loss is the origin
            if part is forward:
                call = call and (*again.call[:2], call[-1])
                frame = again.frames[-1] = self._as_it_was(frame, again.frames[-1], call)
            self._replace(forward, again)
            if part is not forward:
                frame.position = forward.end
                self.ring.append(frame)
        return self._trip_of_call(frame, part, part.values, call)

    def _is_of_probe(self, frame: PendingFrame, batch: BatchInProgress) -> bool:
        """Whether a forward is none of a training, and its input was no data: one that counts operations, say."""
        if not self.awaits_training or self._life.use.has_trained or self._steps.done:
            return False
        if batch.is_probe is None:
            given = batch.root_inputs or frame
            rows = zip(given.spec.readings, given.cells, strict=True)
            fed = next((one for one in rows if one[0].kind in _INPUTS and (one[1].is_bad or one[1].high > NO_DATA)), None)
            batch.is_probe = fed is not None and not self._steps.have_begun()
            if batch.is_probe and fed is not None:
                self._tell(self._notice_of_probe(frame, *fed))
        return batch.is_probe

    def _notice_of_probe(self, frame: PendingFrame, given: ReadingSpec, cell: Cell) -> Notice:
        bad = self.judge.tripping(frame.spec, frame.states)[0]
        row, batch = frame.spec.readings[bad], frame.position.batch
        value = (cell.state or State.NAN).word if cell.is_bad else f"abs max {figure(cell.high)}"
        why = f"{State(frame.states[bad]).word}, as {given.label} was {value},"
        kind, spec = NoticeKind.PROBE, frame.spec
        return Notice(kind, spec.module, spec.module_class, row.label, row.dtype, batch, batch, 0.0, 0.0, why)

    def find_again(self, part: BatchPart, entry: RootEntry | None) -> FoundTrip | None:
        """The trip in a forward that is run again, if there is one: nothing in the first run has shown it."""
        again = self._between.measure(part.batch, entry, self.judge)
        if again is None or not again.is_bad:
            return None
        part.batch.entry = entry
        return self._trip_of_run(again, part)

    def _trip_of_run(self, again: RunAgain, part: BatchPart) -> FoundTrip | None:
        """The trip of a second run's last frame; or of a measure before it, which has made it bad."""
        closeup = self.closeup
        earlier = self._trip_of_run(again.measure, part) if again.measure is not None else None
        self.closeup = closeup
        self._replace(part, again)
        found = self._trip_of_call(again.frames[-1], part, None, again.call)
        if again.measure is None or (found is not None and is_born_here(found.trip, earlier)):
            return found
        self._replace(part, again.measure)
        return earlier

    def _replace(self, part: BatchPart, again: RunAgain) -> None:
        """The frames of a batch, of which only the root was measured, are those of its second run."""
        part.batch.is_full, part.is_cut = True, again.is_bad
        part.frames[:] = again.frames
        known = [one for one in self.ring if one.position[:2] != part.first[:2]]
        self.ring = deque([*known, *again.frames], self.ring.maxlen)

    def _as_it_was(self, frame: PendingFrame, again: PendingFrame, call: Call | None) -> PendingFrame:
        """The root's frame with the bad output of the first run; ``call`` has that, if it is at hand."""
        if call is None:
            return not_again(frame, again)
        self._recorder.forget()
        measured = self._recorder.call(again.position, frame.named, Phase.FORWARD, *call)
        self._tape.read()
        return measured

    def _trip_of_call(
        self, frame: PendingFrame, part: BatchPart, values: list[Any] | None, call: Call | None
    ) -> FoundTrip | None:
        """The trip of the ring's last frame, whose call is at hand, or not."""
        changed = ""
        if call is not None:
            # Evidence is measured anew, without the cache: x.data.mul_() changes a tensor without its version counter.
            overwritten = self._recorder.before_in_place(frame, *call)
            self._recorder.forget()
            fresh, values = self._recorder.again(frame, *call)
            before, frame.cells = frame.cells, fresh.cells
            self._tape.read()
            changed = mark_stale(before, frame, part.frames)
            for row, cell in overwritten.items():
                frame.cells[row] = cell
        return self._trip(frame, part, values, call, changed)

    def _trip(
        self, frame: PendingFrame, part: BatchPart, values: list[Any] | None, call: Call | None, changed: str = ""
    ) -> FoundTrip | None:
        """The trip of the ring's last frame; None if it is finite by now, or a loss scaler deals with it."""
        if frame.is_absorbed:
            return None
        is_scaled = frame.spec.phase is Phase.BACKWARD or frame.spec.readings[0].kind is Kind.LOSS
        scaling = (is_scaled and part.batch.scaling) or LossScaling()
        # Weights are measured only every few forwards. Until the next optimizer step, they are as they were in these frames.
        if frame.spec.phase is not Phase.BACKWARD:
            self._recorder.refresh([known for known in self.ring if known.step == self._steps.done])
            self._tape.read()
        tripping = self.judge.tripping(frame.spec, frame.states)
        if not tripping:  # a weight was bad when it was last measured, and the user has repaired it
            return None
        rows = frame.spec.readings
        first = min(tripping, key=lambda row: (_CAUSAL_ORDER.index(rows[row].kind), row))
        counts = {row: _counts(values[row] if values is not None else None) for row in tripping}
        root_inputs = part.batch.root_inputs
        collective, sum_state = guilty_collective(list(self.ring))
        evidence = self._evidence.of(frame, rows[first], part, call)
        if evidence.is_meant and self.judge.allow_inf(frame.spec, rows[first]):
            return self._trip(frame, part, values, call, changed)
        trip = Trip(
            position=frame.position,
            reading=first,
            frames=tuple([known.measured() for known in self.ring]),
            root_inputs=root_inputs.measured().readings if root_inputs is not None else (),
            optimizer_step=part.batch.optimizer_step,
            shape=counts[first].shape,
            numel=counts[first].numel,
            nan_count=counts[first].nans,
            inf_count=counts[first].infs,
            time=time.time(),
            loss_scale=scaling.value,
            bad_since=scaling.since,
            collective=collective if sum_state is State.INF else "",
            received=frame.received or (collective if sum_state is State.NAN else ""),
            changed=changed,
            gradients=self._gradients,
            weights=evidence.weights,
            operator=evidence.operator,
            harmless=(*evidence.harmless, *self.judge.meant_by(frame.spec.module)),
            recurs=False if frame.was_finite else evidence.recurs,
            closeup_within=self.closeup,
            guarded=frame.guarded,
            unfound=frame.unfound,
            rates=evidence.rates,
            grown=evidence.grown,
            reach=evidence.reach,
            first_of_step=self._life.first_of_step(part.batch.optimizer_step),
            looked_at=Moment(self._steps.number, *self._life.position) if frame.guarded else BEGINNING,
            outside=evidence.outside,
        )
        self.closeup = 0.0  # one close-up is enough
        readings = [BadReading(rows[row].label, counts[row].nans, counts[row].infs) for row in tripping]
        return FoundTrip(trip, readings, evidence.subject)


def _counts(value: Any) -> NonFiniteCounts:
    if value is None:
        return NonFiniteCounts((), 0, 0, 0)
    try:
        return count_non_finite(value)
    except RuntimeError as error:  # out of memory, say: the trip matters more than its counts
        log.debug("cannot count what is not finite: %s", error)
        return NonFiniteCounts(tuple(getattr(value, "shape", ())), 0, 0, 0)


_CAUSAL_ORDER = (
    Kind.PARAMETER, Kind.MARKED, Kind.OUTPUT, Kind.INPUT, Kind.KEYWORD, Kind.BUFFER,
    Kind.LOSS, Kind.GRADIENT, Kind.GRAD_INPUT, Kind.GRAD_OUTPUT,
)  # fmt: skip
"""If several readings trip, the first in this order is the culprit: a bad weight explains a bad output."""
