"""Frames -> trips and batch summaries: decides when numbers are read and judged.

``check="frame"`` reads and judges each frame as it comes; ``"batch"`` all frames of a part at its end, or, where
an optimizer step waits for the device, at the latest before that; ``"async"`` begins to read at the part's end, and judges when
the numbers have come, at most one part later.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from ..measure.memory import memory_of_tensors
from ..measure.modules import Modules
from ..measure.recorder import Call, PendingFrame, Recorder
from ..measure.sweep import Sweep
from ..measure.tape import PendingRead, Tape
from ..rerun.forward import RootEntry
from ..rerun.loss_graph import LossOrigin
from ..shared.types.config import Config, Policy
from ..shared.types.frame import BatchSummary, FrameTable, Kind, Moment, Phase
from ..shared.types.tuning import Check
from .batch import BatchInProgress, BatchPart, Gate, PartState
from .between import UnmeasuredBatchRerun
from .events import TuningCame
from .evidence import Evidence
from .lifecycle import Life
from .outside import Outside
from .reporter import FoundTrip, Reporter, Sender
from .steps.growth import Growth
from .steps.optimizer_steps import OptimizerSteps
from .steps.trials import Trials
from .steps.undecided import Undecided
from .trip_finder import TripFinder

MAX_RAISED = 3
"""Forwards that raised, and are run again to find an inf or nan: a training may use exceptions for ends of its own."""


class _ReadPart(NamedTuple):
    reading: PendingRead
    part: BatchPart


class Settler:
    """Judges frames. ``waiting`` is a trip that was found, and is not raised yet; ``undecided`` is what may yet be one.

    Args:
        life: the lives of the batches, which say what is judged late.
        check: the default, used if the configuration has none.
        steps: the optimizer steps; where a step will wait for the device, numbers may be read with it.
        model: the modules of the model.
        outside: the calls of modules that are no part of it.
    """

    events = (TuningCame,)

    def __init__(
        self,
        config: Config,
        check: Check,
        life: Life,
        tape: Tape,
        recorder: Recorder,
        sweep: Sweep,
        reporter: Reporter,
        *,
        judge_traced: bool,
        steps: OptimizerSteps,
        model: Modules,
        outside: Outside,
        growth: Growth,
    ) -> None:
        self._life = life
        self.check = config.check or check
        self._set_lateness()
        self._trips = config.policy is not Policy.OFF
        self.waiting: FoundTrip | None = None
        self._tape = tape
        self._recorder = recorder
        self._sweep = sweep
        self._reporter = reporter
        self._judge_traced = judge_traced
        self._guards = config.guard and self._trips
        self._model = model
        self._steps = steps
        self._evidence = Evidence(recorder, steps, model, sweep, outside, growth)
        between = UnmeasuredBatchRerun(recorder, tape, sweep, steps, model)
        self.finder = TripFinder(config, life, tape, recorder, steps, between, self._evidence, reporter.on_notice)
        self._sender = Sender(reporter, life.full)
        trials = Trials(recorder, tape, model, steps)
        self.undecided = Undecided(config, check, life, model, self.finder, trials, reporter, self._sender)
        self._raised = 0  # forwards that were run again as they had raised
        self._awaited: BatchPart | None = None  # the forward whose loss may come
        self._pending: deque[_ReadPart] = deque()
        self._has_bad = False  # whether any non-finite number was ever read: until then, nothing needs to be judged

    def add(self, frame: PendingFrame, part: BatchPart, call: Call | None) -> None:
        """Judges a frame, if frames are judged as they come."""
        if self._life.is_late(part):
            return
        if self._tape.read():
            self._has_bad = True
        self.finder.ring.append(frame)
        if not self._has_bad or self.undecided.has_trip or not self.finder.judge.tripping(frame.spec, frame.states):
            return
        if self.undecided.hold(frame, part, call, self.check):
            return
        found = self.undecided.find(frame, part, call)
        if found is None or (found := self.undecided.announce(found)) is None:
            return
        if frame.spec.readings[0].kind is Kind.MARKED:
            self._wait_with(self.waiting or found)  # detect_overflow returns to its caller, and the next hook raises
        else:
            raise self._reporter.on_trip(found.trip, found.bad_readings)

    def need_no_look(self, frames: list[PendingFrame], part: BatchPart) -> bool:
        """Whether frames need not be added one by one: they are judged at the end of their part, or nothing was ever bad."""
        if not self._life.is_late(part):
            self._has_bad |= self._tape.read()
            if self._has_bad:
                return False
            self.finder.ring.extend(frames)
        return True

    def close(self, part: BatchPart, *, awaits_loss: bool = False) -> None:
        """A part ends: it is read, judged if it was not yet, and sent, all this perhaps when its numbers come.

        ``awaits_loss``: it is a forward, and is sent with its loss.
        """
        batch = part.batch
        self._evidence.look_at_uncalled(part)
        self._close(part)
        if awaits_loss:
            self.expect_no_loss()
            part.gates.add(Gate.LOSS)
            self._awaited = part
        is_late = self._may_be_late and batch.is_streamed and batch.is_sure and self._tape.is_far
        if is_late or self.check is Check.ASYNC:
            self._pending.append(_ReadPart(self._tape.read_later(), part))
            while (first := self._pending[0].part) is not part and not (is_late and first.batch is batch):
                self._settle_first()
        else:
            self.poll(wait=True)
            self._has_bad |= self._tape.read()
            self._add_unseen(part)
            self._settle(part)

    def awaits_loss_of(self, batch: BatchInProgress) -> bool:
        """Whether the next frame of the batch follows directly upon a forward that awaits its loss."""
        forward = self._awaited
        return forward is not None and forward.batch is batch and not batch.part.frames and forward.end == batch.position

    def add_loss(self, frame: PendingFrame, values: list[Any], origin: LossOrigin | None) -> None:
        """The loss of the forward that awaits it. Unless ``check`` is ``async``, it is judged at once if it is on the host."""
        forward, self._awaited = self._awaited, None
        if forward is None:
            return
        part = BatchPart(forward.batch)
        part.loss_of, part.values, part.loss_origin = forward, values, origin
        part.frames.append(frame)
        part.close(0)
        self._life.closed.append(part)
        self._pending.append(_ReadPart(self._tape.read_later(), part))
        if self.check is not Check.ASYNC:
            self._settle_pending(wait=self.check is Check.FRAME)

    def judge_again(self, batch: BatchInProgress, entry: RootEntry) -> None:
        """A gradient is bad in a batch in which only the root was measured: its forward is run again, measured and judged."""
        found = self.finder.find_again(BatchPart(batch), entry)
        if found is not None:
            self.undecided.end_with(found)

    def expect_no_loss(self) -> None:
        """A forward that awaits its loss is sent without it."""
        self.poll()
        forward, self._awaited = self._awaited, None
        if forward is not None:
            self._send_without_loss(forward)

    def unsent(self) -> tuple[FrameTable, BatchSummary] | None:
        """The forward that is judged, and awaits its loss."""
        forward = self._awaited
        if (
            forward is None
            or not forward.is_judged
            or Gate.BACKWARD in forward.gates
            or forward.is_cut
            or not forward.frames
        ):
            return None
        return self._sender.table_of(forward)

    def on(self, event: TuningCame) -> None:
        tuning = event.tuning
        if tuning.check is not None:
            self.poll(wait=True)
            self.check = tuning.check
            self._set_lateness()
        if tuning.ignore is not None:
            self.finder.judge = self.finder.judge.ignoring(tuning.ignore)

    def poll(self, *, wait: bool = False) -> None:
        """Judges the parts whose numbers have come; ``wait``: all parts, waiting once for the numbers of the last one.

        Where no step is awaited, it waits for the loss of the last backward, if that is on a device: it was computed long ago.
        """
        self._settle_pending(wait=wait or not (self.check is Check.ASYNC or self._may_be_late))

    @property
    def _may_be_late(self) -> bool:
        """Whether the numbers of a device are judged before the next step, not at once: so the host waits once for all."""
        return self.check is Check.BATCH and self._guards and self._steps.done > 0

    def _settle_pending(self, *, wait: bool) -> None:
        if wait and self._pending:
            self._pending[-1].reading.wait()
        while self._pending and (wait or self._pending[0].reading.is_ready()):
            self._settle_first()

    def _set_lateness(self) -> None:
        self._life.judges_late = self.check is not Check.FRAME

    def _close(self, part: BatchPart) -> None:
        is_forward = bool(part.frames) and part.frames[0].spec.phase is Phase.FORWARD
        part.close(memory_of_tensors(self._model.root) if is_forward else 0, self._reporter.calls())

    def release(self, part: BatchPart) -> None:
        """A backward has reached the part: it is sent now, or as soon as it is judged."""
        if part.is_sent_now:
            self.undecided.send(part)

    def _judged(self, part: BatchPart, *, has_tripped: bool = False) -> None:
        part.move(PartState.TRIPPED if has_tripped else PartState.JUDGED)
        if part.batch.is_full or Gate.LOSS not in part.gates:
            part.batch.entry = None
        if part in self._life.closed:
            self._life.closed.remove(part)

    def abandon(self, part: BatchPart, *, runs_again: bool) -> None:
        """The forward of a part raised: its frames are judged, but not sent as a batch.

        ``runs_again``: if not all of it was seen, it is run again, as what it raised may follow from an inf or nan.
        """
        batch = part.batch
        self._close(part)
        self._has_bad |= self._tape.read()
        found = self._judge_late(part)
        self._sender.trace(part)
        found = self.waiting or found
        self._wait_with(None)
        is_late = self._life.is_late(part)
        was_full = batch.is_full
        is_seen = was_full and not self._model.may_be_compiled  # a graph hands over at its end what was measured in it
        runs_again &= self._trips and batch.is_streamed and not is_seen
        if found is None and runs_again and self._raised < MAX_RAISED:
            self._raised, is_late, batch.is_full = self._raised + 1, True, False
            found = self.finder.find_again(part, batch.entry)
            batch.is_full |= was_full  # a forward that comes next may belong to the same batch
        if found is not None and is_late:
            # The user's exception goes on; the trip counts all the same.
            self.undecided.announce(found)
        self._judged(part)

    def drop_interrupted(self) -> None:
        """Between forwards: drops the parts whose judging was interrupted. Nothing else would, and ``unsettled`` would stay."""
        if self._life.closed:
            pending = [reading.part for reading in self._pending]
            for part in [part for part in self._life.closed if part not in pending]:
                self._life.closed.remove(part)

    def _wait_with(self, found: FoundTrip | None) -> None:
        self.waiting = found
        self._life.waiting = Moment(found.trip.optimizer_step, *found.trip.position) if found is not None else None

    def raise_waiting(self) -> None:
        if self.waiting is not None:
            found = self.waiting
            self._wait_with(None)
            raise self._reporter.on_trip(found.trip, found.bad_readings)

    def _settle_first(self) -> None:
        reading, part = self._pending.popleft()
        self._has_bad |= reading.finish()
        self._add_unseen(part)
        self._settle(part)

    def _add_unseen(self, part: BatchPart) -> None:
        """Adds frames of weights that have gone bad, and that no frame of the part shows."""
        look, part.look = part.look, None
        made = self._sweep.unseen(look, part.frames, part.batch.position) if look is not None else []
        if not made:
            return
        self._has_bad |= self._tape.read()
        for frame in self._sweep.keep(made, part.frames):
            frame.position = part.batch.position
            part.frames.append(frame)
            part.batch.pass_frames()
            self.add(frame, part, None)

    def _settle(self, part: BatchPart) -> None:
        was_bad, found, last = self.undecided.bad_step is not None, self._judge_late(part), None
        if found is not None:
            self._sender.trace(part)
            last = self.undecided.announce(found)
        elif not was_bad and not self.undecided.has_trip:
            self.undecided.learn(part)
            if self._has_bad and part.batch.is_full:
                self._evidence.learn(part)
        self._judged(part, has_tripped=found is not None)
        if part.loss_of is not None:
            if found is None:
                self.undecided.drop_masked(part)
            if found is None or found.trip.culprit.kind is Kind.LOSS:  # else it only follows from its forward
                part.loss_of.frames += part.frames
            self._send_without_loss(part.loss_of)
        elif found is not None:
            self._drop_loss_of(part)
        elif part.is_sent_now:
            self.undecided.send(part)
        if last is not None:
            raise self._reporter.on_trip(last.trip, last.bad_readings)

    def _send_without_loss(self, forward: BatchPart) -> None:
        """No loss, or no further one, of this forward will come."""
        forward.gates.discard(Gate.LOSS)
        if forward.is_judged:
            forward.batch.entry = None
            if forward.is_sent_now:
                self.undecided.send(forward)

    def _drop_loss_of(self, part: BatchPart) -> None:
        """A forward trips: its loss follows from it, and is not judged."""
        while self._pending and self._pending[0].part.loss_of is part:
            self._judged(self._pending.popleft().part)
        self._awaited = None if self._awaited is part else self._awaited
        self._send_without_loss(part)

    def _judge_late(self, part: BatchPart) -> FoundTrip | None:
        if not self._life.is_late(part):
            return None
        if not self._has_bad or self.undecided.has_trip or (part.batch.traced and not self._judge_traced):
            self.finder.ring.extend(part.frames)
            return None
        for frame in list(part.frames):
            self.finder.ring.append(frame)
            if self.undecided.has_trip or not self.finder.judge.tripping(frame.spec, frame.states):
                continue
            if not self.undecided.hold(frame, part, None, self.check):
                was_full, found = part.batch.is_full, self.undecided.find(frame, part, None)
                if found is not None or part.batch.is_full is not was_full:
                    return found
        return None
