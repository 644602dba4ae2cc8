"""What is bad, and not decided yet: a loss, a step that may be left out, weights on trial.

Each waits for what shows whether it harms: the gradients of its step, the step itself, or the next forward. Then it is told as a
trip or as a notice. Until then nothing that follows is sent, as what is sent shows that this rank has passed.
"""

from __future__ import annotations

from dataclasses import replace

from ...measure.modules import Modules
from ...measure.recorder import Call, PendingFrame
from ...shared.types.config import Config, Policy
from ...shared.types.frame import Phase
from ...shared.types.notice import NoticeKind
from ...shared.types.trip import LeftOut, Trip
from ...shared.types.tuning import Check
from ...shared.words.sentences import by_operator
from ..batch import BatchPart
from ..events import ForwardBegan
from ..lifecycle import Life
from ..reporter import FoundTrip, Reporter, Sender, closeup_of
from ..trip_finder import TripFinder
from .held import (
    WEIGHTS_ARE_BAD,
    BadStep,
    HeldLoss,
    HeldLosses,
    harmless,
    harms,
    is_born_here,
    is_measure,
    is_placeholder,
    is_trained,
)
from .trials import Trials


class Undecided:
    """Holds what is bad until it is decided. ``bad_step`` waits for its step to be left out, if it is.

    Args:
        check: the default. Where it judges each frame, gradients are on the host: there they are read with ``async``, too.
        life: is told of the first moment that is held.
        sender: sends the parts that were kept.
    """

    events = (ForwardBegan,)

    def __init__(
        self,
        config: Config,
        check: Check,
        life: Life,
        model: Modules,
        finder: TripFinder,
        trials: Trials,
        reporter: Reporter,
        sender: Sender,
    ) -> None:
        self.bad_step: BadStep | None = None
        self._life = life
        self._model = model
        self._finder = finder
        self._reporter = reporter
        self._sender = sender
        self._holds = config.guard and config.policy is Policy.FIRST
        self._is_on_host = check is Check.FRAME
        self._skips = config.on_bad_step.skips
        self._held = HeldLosses()
        self._trials = trials
        self._unsent: list[BatchPart] = []
        """The parts since the first loss that is held, or the bad step."""

    def on(self, _event: ForwardBegan) -> None:
        self.end_trial()

    @property
    def has_trip(self) -> bool:
        """Whether a trip waits: what follows upon it is not judged."""
        return self.bad_step is not None or self._trials.current is not None

    def send(self, part: BatchPart) -> None:
        """Sends a part, at once or when all is decided."""
        if self._held.all or self.has_trip:
            self._unsent.append(part)
        else:
            self._sender.send(part)

    def learn(self, part: BatchPart) -> None:
        """Nothing is bad in a part."""
        self._trials.learn(part)

    # --- what is found ----------------------------------------------------------------------------------------------------

    def find(self, frame: PendingFrame, part: BatchPart, call: Call | None) -> FoundTrip | None:
        """The trip of a frame, or of the bad loss behind a gradient. None: nothing trips, or what does waits."""
        is_gradient = frame.spec.phase is Phase.BACKWARD and not frame.is_absorbed
        held = self._held.behind(part.batch) if is_gradient else None
        if held is not None:
            return self._trip_of_held(held)
        is_trial = self._holds and self._trials.may_be(frame, part)
        found = self._finder.find(frame, part, call)
        if found is not None and is_trial:
            self._trials.begin(found, part)
            self._set_held()
            return None
        return self._wait(found, part, call) if found is not None and self._holds and part.batch.is_streamed else found

    def _wait(self, found: FoundTrip, part: BatchPart, call: Call | None) -> FoundTrip | None:
        """None: the trip waits for the gradients of its step. Else it, or what has waited and has made bad what trips now."""
        ring, earlier = self._finder.ring, self._held.before(part)
        last, is_own = ring[-1], is_born_here(found.trip, earlier)
        waits = is_measure(last, self._finder.judge.tripping(last.spec, last.states))
        waits = waits and (earlier is not None or (is_own and is_trained(ring, last.position)))
        if not (waits or is_placeholder(found.trip)):
            return found if is_own else earlier or found
        self._held.all.append(HeldLoss(last, part, call, ring.copy(), found if is_own else earlier or found))
        self._set_held()
        self._finder.begin_anew()
        return None

    def announce(self, found: FoundTrip) -> FoundTrip | None:
        """Tells of a trip, and returns what ends the training. None: the trip waits for its step, which may be left out."""
        self._held.all.clear()
        if self._skips and not found.trip.weights:
            self.bad_step = BadStep(found, closeup_of(found, self._reporter, self._model.modules))
            self._set_held()
            return None
        if self._skips:
            found = found._replace(trip=replace(found.trip, left_out=LeftOut(WEIGHTS_ARE_BAD)))
        self._reporter.on_found(found.trip)
        if (closeup := closeup_of(found, self._reporter, self._model.modules)) is not None:
            self._reporter.on_closeup(closeup)
        self._let_go()
        return found

    def end_with(self, found: FoundTrip) -> None:
        if (last := self.announce(found)) is not None:
            raise self._reporter.on_trip(last.trip, last.bad_readings)

    def _set_held(self) -> None:
        trial = self._trials.current
        held = self._held.first, self.bad_step and self.bad_step.moment, trial and trial.moment
        self._life.held = min((one for one in held if one is not None), default=None)

    def _let_go(self) -> None:
        """Losses are not held any more, or what had tripped is decided on."""
        self._set_held()
        if not self._held.all and not self.has_trip:
            unsent, self._unsent = self._unsent, []
            for part in unsent:
                self.send(part)

    # --- losses that wait for the gradients of their step -----------------------------------------------------------------

    def hold(self, frame: PendingFrame, part: BatchPart, call: Call | None, check: Check) -> bool:
        """Whether what is bad in a frame is a loss: it is judged with the gradients, see ``decide_losses``."""
        if not self._holds or frame.is_absorbed or not part.batch.is_streamed:
            return False
        if check is Check.ASYNC and not self._is_on_host:
            return False
        tripping = self._finder.judge.tripping(frame.spec, frame.states)
        if not self._held.may_be_loss(frame, tripping, part, call):
            return False
        self._held.all.append(HeldLoss(frame, part, call, self._finder.ring.copy()))
        self._set_held()
        return True

    @property
    def held_losses(self) -> int:
        return len(self._held.all)

    def drop_masked(self, loss: BatchPart) -> None:
        """A loss goes to a backward. If it is finite, what was bad on the way to it was masked, and is not held any more."""
        if self._held.drop_masked(loss):
            self._let_go()

    def decide_losses(self, *, are_bad: bool, is_reduced: bool, is_sharded: bool, is_skipped: bool = False) -> None:
        """The gradients of the step are known: ``are_bad``. A loss that has no part in what is bad was harmless.

        ``is_skipped``: the step was not taken, so that none harms.
        """
        try:
            for held in tuple(self._held.all):
                has_harmed = harms(held.batch, gradients_are_bad=are_bad, is_reduced=is_reduced, is_sharded=is_sharded)
                if has_harmed and not is_skipped:
                    self._raise_held(held)
                    continue
                if held.found is not None:
                    for row in self._finder.judge.tripping(held.frame.spec, held.frame.states):
                        self._finder.judge.forgive(held.frame.spec.module, held.frame.spec.readings[row].label)
                if self._held.is_told(held):
                    kind = NoticeKind.SKIPPED_STEP if has_harmed else NoticeKind.HARMLESS_LOSS
                    self._reporter.on_notice(self._held.notice(held, self._why(held), kind))
        finally:
            self._held.all.clear()
            self._let_go()

    def _raise_held(self, held: HeldLoss) -> None:
        found = self._trip_of_held(held)
        if found is not None:
            self.end_with(found)

    def _trip_of_held(self, held: HeldLoss) -> FoundTrip | None:
        if held.found is not None:
            return held.found
        batch, forward, self._finder.ring = held.batch, held.part.loss_of, held.ring
        batch.entry = batch.run.entry if batch.run is not None else None
        if forward is not None:  # it may be run again, and has its loss after its own frames
            forward.frames = [one for one in forward.frames if one is not held.frame]
        try:
            return self._finder.find(held.frame, held.part, held.call)
        finally:
            batch.entry = None
            if forward is not None and not forward.is_cut:
                forward.frames.append(held.frame)

    def _why(self, held: HeldLoss) -> str:
        """What made a loss bad that has harmed nothing."""
        closeup, ring, self._finder.closeup = self._finder.closeup, self._finder.ring, 0.0
        try:
            found = self._trip_of_held(held)
        finally:
            self._finder.closeup, self._finder.ring = closeup, ring
        return by_operator(found.trip)[1] if found is not None else ""

    # --- a bad step, which may be left out: see ``hook/step/skipping`` ----------------------------------------------------

    def leave_out(self, left_out: LeftOut) -> None:
        """The step is left out, on all ranks, and the training goes on."""
        if (bad := self._end_bad_step()) is not None:
            trip = self._tell(bad, left_out)
            self._let_go()
            self._reporter.on_left_out(trip)

    def forgive(self, *, is_skipped: bool = False) -> None:
        """The gradients of the step are finite, on all ranks: what tripped has harmed nothing, and trips no more.

        ``is_skipped``: or the training, or its engine, has not taken the step.
        """
        if (bad := self._end_bad_step()) is not None:
            if not is_skipped:
                self._finder.judge.forgive(bad.found.trip.frame.spec.module, bad.found.trip.culprit.label)
            kind = NoticeKind.SKIPPED_STEP if is_skipped else NoticeKind.HARMLESS_LOSS
            self._reporter.on_notice(harmless(bad.found.trip, kind))
            self._let_go()

    def refuse(self, why: str, restored: tuple[str, ...] = ()) -> None:
        """The step cannot be left out: its trip, if this rank has one, ends the training."""
        if (bad := self._end_bad_step()) is not None:
            trip = self._tell(bad, LeftOut(why, restored))
            self._let_go()
            raise self._reporter.on_trip(trip, bad.found.bad_readings)

    def _tell(self, bad: BadStep, left_out: LeftOut) -> Trip:
        trip = replace(bad.found.trip, left_out=left_out)
        self._reporter.on_found(trip)
        if bad.closeup is not None:
            self._reporter.on_closeup(bad.closeup)
        return trip

    def _end_bad_step(self) -> BadStep | None:
        """What is judged from now on belongs to another step."""
        bad, self.bad_step = self.bad_step, None
        if bad is not None:
            self._finder.begin_anew()
        return bad

    # --- weights on trial -------------------------------------------------------------------------------------------------

    def end_trial(self) -> None:
        """The next forward begins. If the weights are still those that were tried, the trip counts; else it harmed nothing."""
        if self._trials.current is None:
            return
        trial, is_kept = self._trials.end()
        self._let_go()
        if is_kept:
            self.end_with(trial.found)
        else:
            self._finder.begin_anew()
            if (notice := self._trials.notice(trial)) is not None:
                self._reporter.on_notice(notice)
