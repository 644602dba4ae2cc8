"""The life of a batch: when it begins, whether it is one, which number it has, and when its parts are judged and sent.

All of this is decided here, and nowhere else. ``Life.handle(event)`` changes the state and returns effects, which
``hook/batches`` performs; the events are those of ``events``. Nothing here reads a tensor, calls torch or knows a clock.

**A batch** is a forward of the root with gradients, and the backward that follows. Whether a backward follows is not known when
the forward begins. For a root in training mode it is taken for granted: such a forward is a BATCH from its start. Others are
candidates: a root in eval mode, and calls of modules in a training that never calls the root. The first backward that reaches
a candidate makes it a batch; if none does, it was an evaluation, and nothing of it is ever sent.

       a training-mode forward of the root  ----------------------------------+
                                                                              v
       any other forward with gradients ---> RESERVED --- a backward ---->  BATCH
                  |                            |   ^                          ^
                  |                            +---+ the next candidate       |
                  |                                  takes the reservation    |
                  +----------------------> CANDIDATE --- a backward ----------+

       a forward without gradients ---> EVAL       a pipeline that learns shapes ---> REHEARSAL       calls between ---> OUTSIDE

A batch has its number from the first backward that reaches it. A candidate that begins as the last batch did, or before there was
any batch, reserves the next number at its start (RESERVED): a trip in its forward is told with this number, and ``full`` and
``trace_batch_nums`` go by it. The reservation passes to the next candidate, until a backward confirms one. Positions must not go
back: the first time, the next candidate's frames are counted on; from then on ``position`` waits where candidates start, unless
the last batch was of several whose backwards came after all of their forwards, as of GPipe's micro-batches. A candidate that
begins in another way reserves nothing (CANDIDATE). Its position is that of an eval, or of frames outside of any batch.

**A part** is what of a batch is judged and sent together: the frames of its forward, its loss, the frames of its backward.

       OPEN --- the forward or the backward ends ---> CLOSED --- its numbers have come ---> JUDGED | TRIPPED ---> SENT

A judged part is sent once no gate is left: LOSS, while the loss of its forward may still come, and BACKWARD, while its batch
is a candidate. A part whose batch stays a candidate is dropped with its batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

from ..shared.bounded import BoundedDict
from ..shared.types.frame import NOWHERE, Moment, Position, Whereabouts
from .batch import EVERY, BatchInProgress, BatchOrigin, BatchPart, BatchState, Gate
from .events import (
    BackwardReached,
    DirectCall,
    ForwardComes,
    PartIsFull,
    RootBegan,
    RootLeft,
    RootRaised,
    RootReturned,
    StepBegins,
    Steps,
)
from .pace.full_batches import FullBatches

LOOSE_FRAMES = 256
"""Frames outside of any batch are judged together when this many have come, unless each is judged as it comes."""

MAX_STEPS = 16
"""Of which the first batch is remembered: what is judged late is of the last one or two."""

MAX_UNREACHED = 1024
"""Forwards without a backward that are remembered: a training may run any number of them, and never step."""

DIRECT_FRAMES = 4096
"""Frames of direct calls are judged together when this many have come without a backward."""

NO_TASK = -1
"""The number of the backward where none runs."""


Event = (
    ForwardComes | RootBegan | DirectCall | RootReturned | RootLeft | RootRaised | BackwardReached | StepBegins | PartIsFull
)


# --- effects ----------------------------------------------------------------------------------------------------------


class Begin(NamedTuple):
    """Measure anew: a forward of this batch begins."""

    batch: int


class Forget(NamedTuple):
    """Measure tensors anew that were measured before."""


class Close(NamedTuple):
    """Read the part, judge it if it was not yet, and send it. ``awaits_loss``: it is a forward, and is sent with its loss."""

    part: BatchPart
    awaits_loss: bool = False


class Abandon(NamedTuple):
    """Judge the part of a forward that raised. ``runs_again``: if not all of it was seen, the forward is run again."""

    part: BatchPart
    runs_again: bool


class Release(NamedTuple):
    """A backward has reached the part: send it, now or as soon as it is judged."""

    part: BatchPart


class NoLossComes(NamedTuple):
    """Send the forward that awaits its loss without one."""


class Poll(NamedTuple):
    """Judge the parts whose numbers have come; ``waits``: all parts."""

    waits: bool


Effect = Begin | Forget | Close | Abandon | Release | NoLossComes | Poll


class Use:
    """Whether a backward has reached a model: what is known of it when it is gone."""

    has_trained = False


class Life:
    """The life of the batches of one model.

    ``position`` is where this rank is; all before it is known to have run. ``current`` is the batch whose root forward runs, or
    ran last; frames belong to it while ``is_open``. ``is_direct``: direct calls belong to a candidate. ``of_backward`` is the
    batch whose backward runs, or ran last. ``steps_done``: the number of the optimizer step that comes next.

    Args:
        full: decides which batches are measured in full.
        sends_at_once: send a forward when it ends, not with its loss.
    """

    def __init__(self, first_batch: int, full: FullBatches, traced: frozenset[int], *, sends_at_once: bool) -> None:
        self.position = NOWHERE._replace(batch=first_batch - 1)
        self.phase = "idle"
        self.full = full
        self.trace_batch_nums = traced
        self.judges_late = False
        """Whether parts are judged at their end; if not, each frame is judged as it comes."""
        self.waiting: Moment | None = None
        """The moment of a trip that was found, and is not raised yet."""
        self.held: Moment | None = None
        """The moment of a bad loss that waits for the gradients of its step."""
        self.closed: deque[BatchPart] = deque()
        """Parts at their end, with frames that are not judged yet."""
        self.current = self.loose = BatchInProgress(self.position, 0, state=BatchState.OUTSIDE)
        self.is_open = False
        self.is_direct = False
        self.of_backward = self.current
        self.steps_done = 0
        self._first_batches = BoundedDict[int, int](MAX_STEPS)
        """By optimizer step, the first batch since the step before."""
        self._unreached = BoundedDict[int, Moment](MAX_UNREACHED)
        """The ends of the forwards since the last optimizer step that no backward has reached, by their batches."""
        self._sends_at_once = sends_at_once
        self._last_full = -1
        """The number of the last batch that was measured in full."""
        self._root_frame = 0
        """The number of the root's frame in the last forward that was measured in full."""
        self._backwards: list[BatchInProgress] = []
        """Batches whose backward has frames, and is not closed."""
        self._candidate: BatchInProgress | None = None
        self._candidate_part: BatchPart | None = None
        """The last forward of the last candidate, until an optimizer step."""
        self._is_waiting = False
        """Whether ``position`` waits: candidates were seen that had no backward."""
        self._is_of_several = False
        """Whether backwards reached several candidates of the last batch."""
        self.use = Use()
        """Whether a backward has reached any forward."""
        self._awaits_backward = False
        """Whether neither a backward nor a step came after the forward of a batch."""
        self._origin: BatchOrigin | None = None
        """How the last batch began."""
        self._last_step = -1
        """The optimizer steps done when it began."""
        self._last_task = NO_TASK
        """The backward that made it a batch."""

    # --- what the state says ------------------------------------------------------------------------------------------

    @property
    def progress(self) -> Moment:
        """The moment before which this rank is known to have no trip, but of a backward that is to come. For any thread."""
        # Read first, and the step before the position: the training thread moves both on. The last batch has the highest step.
        batches = self.current, self.of_backward, self._candidate or self.current
        step = max(self.steps_done, *[batch.optimizer_step for batch in batches])
        position = self.position
        unjudged = (self.current, self._candidate or self.loose, self.loose, *self._backwards)
        return self.waiting or self.held or self._first_unjudged(unjudged) or Moment(step, *position)

    @property
    def whereabouts(self) -> Whereabouts:
        """For any thread."""
        moment, backward = self.progress, self.of_backward
        # Of several forwards with one backward, the one whose backward runs last is mostly the first.
        runs = [Moment(backward.optimizer_step, *backward.position)] if self.phase == "backward" else []
        settled = min([moment, *runs, *tuple(self._unreached.values())])
        return Whereabouts(moment, self.phase, settled, self.first_of_step(moment.step))

    def first_of_step(self, step: int) -> int:
        """The first batch since the optimizer step before ``step``, or the one that will be."""
        return self._first_batches.get(step, self.position.batch + 1)

    def _first_unjudged(self, batches: Iterable[BatchInProgress]) -> Moment | None:
        # In this order: a part is added to the closed ones before its batch drops it.
        late = [part.moment for part in [batch.part for batch in batches] if part.frames and self.is_late(part)]
        late += [part.moment for part in tuple(self.closed)]
        return min(late, default=None)

    def is_late(self, part: BatchPart) -> bool:
        """Whether the frames of a part are judged at its end; a traced batch's always are, so that it is printed in full."""
        return self.judges_late or part.batch.traced or part.loss_of is not None

    @property
    def of_forward(self) -> BatchInProgress:
        """The batch whose forward runs, or ran last: by direct calls, or by the root."""
        return self._candidate if self.is_direct and self._candidate is not None else self.current

    @property
    def next(self) -> Position:
        """The position of the next frame of a forward."""
        return self.of_forward.position if self.is_open or self.is_direct else self.position

    @property
    def may_rest(self) -> bool:
        """Whether only the root is looked at in the forward that runs. In the first batch, what is compiled gets our hooks."""
        return not self.current.is_full and self._root_frame > 0

    def will_rest(self, origin: BatchOrigin | None) -> bool:
        """The same of a forward that is about to begin, where it is known which batch that will be."""
        is_reserved = self._candidate is not None and self._candidate.state is BatchState.RESERVED
        is_known = origin is BatchOrigin.TRAINING and not is_reserved
        return is_known and self._root_frame > 0 and not self._is_full(self.position.batch + 1)

    def _is_full(self, number: int) -> bool:
        return self.full.is_full(number) or number in self.trace_batch_nums

    def begins_by_calls(self, origin: BatchOrigin) -> bool:
        """Whether a direct call with gradients begins a batch: not if it belongs to the batch of the calls before."""
        is_next = self.is_direct and self._candidate is not None and self._candidate.origin is origin
        return not self._awaits_backward and not is_next

    def candidate_before(self, steps: int) -> BatchPart | None:
        """The candidate's forward from which an optimizer learns: the last one, if no batch came since its last step.

        ``steps``: those that this optimizer has done.
        """
        return self._candidate_part if self._last_step < steps else None

    @property
    def candidate_part(self) -> BatchPart | None:
        """The candidate's forward that a backward now belongs to, if no hook tells which one it reaches."""
        return self._candidate_part if self._candidate is self.of_backward else None

    @property
    def awaits_backward(self) -> bool:
        """Whether a forward has no backward yet."""
        return self._awaits_backward or self.candidate_part is not None

    @property
    def position_waits(self) -> bool:
        return self._is_waiting and self._candidate is not None and self._candidate.state is BatchState.RESERVED

    # --- frames: a few steps for each, so no events --------------------------------------------------------------------

    def take(self, frame: Any) -> BatchInProgress | None:
        """Adds a frame of a forward to the part that it belongs to. None: nothing is measured."""
        batch = self.current if self.is_open else self.of_forward if self.is_direct else self.loose
        if batch.state is BatchState.REHEARSAL:
            return None
        at, evaluation, number = frame.position
        batch.position = Position(at, evaluation, number + 1)
        batch.part.frames.append(frame)
        return batch

    def passed(self, batch: BatchInProgress, *, is_early: bool) -> bool:
        """A frame was added, and judged if frames are judged as they come. Returns whether ``PartIsFull`` follows.

        ``is_early``: the frame does not show what came before it.
        """
        if not is_early and not (self._is_waiting and self.position_waits):
            self.position = batch.position
        if self.is_open:
            return False
        if batch is self.loose:
            return len(batch.part.frames) >= LOOSE_FRAMES
        return self.is_direct and len(batch.part.frames) >= DIRECT_FRAMES

    def take_graph(self, frames: list[Any]) -> None:
        """Adds all frames of a compiled graph."""
        self.current.add(*frames)
        self.position = self.current.position

    def take_backward(self, frame: Any) -> BatchInProgress:
        """Adds a frame to the batch whose backward runs."""
        batch = self.of_backward
        if batch not in self._backwards:
            self._backwards.append(batch)
            self._unreached.pop(batch.position.batch, None)
        batch.add(frame)
        return batch

    def move_on(self, batch: BatchInProgress) -> None:
        """The rank is where this batch is."""
        if batch.position[:2] == self.position[:2]:
            self.position = batch.position

    def come_to_root(self) -> None:
        """The root returns. Its frame has its number of the last full batch, though no module has one before: ranks compare it.

        Calls of modules before the root's are not counted in such a batch.
        """
        batch = self.current
        later = self._root_frame - batch.position.frame
        if not batch.is_full and later > 0:
            for frame in batch.part.frames:  # of tensors that were marked
                frame.position = frame.position._replace(frame=frame.position.frame + later)
            batch.position = batch.position._replace(frame=self._root_frame)

    # --- events -> effects --------------------------------------------------------------------------------------------

    def handle(self, event: Event) -> list[Effect]:
        match event:
            case ForwardComes(steps, waits):
                return [*self._settle(steps), Poll(waits)]
            case RootBegan():
                return self._open(event)
            case DirectCall(origin, steps):
                closing = self._close_direct()
                self._next_candidate(origin, steps)
                self.is_direct, self.phase = True, "forward"
                return [*closing, Begin(self.position.batch)]
            case RootReturned():
                return self._returned()
            case RootLeft():
                self.is_open = False
                return []
            case RootRaised(is_judged, runs_again):
                self.is_open = self._awaits_backward = False
                self.phase = "idle"
                return [Forget(), *([Abandon(self._cut(self.current), runs_again)] if is_judged else [])]
            case BackwardReached(part, task, steps, _):
                return self._reached(part, task, steps)
            case StepBegins(steps, _):
                self.phase = "optimizer"
                self._awaits_backward = False
                self._unreached.clear()
                closing = self._close_direct()
                self._candidate_part = None
                return [*closing, *self._settle(steps), Poll(False)]
            case PartIsFull(batch, steps):
                if batch is self.loose:
                    return self._settle_loose(steps)
                closed = self._cut(batch)
                self._candidate_part = batch.part
                return [Close(closed)]

    def _open(self, event: RootBegan) -> list[Effect]:
        origin, steps = event.origin, event.steps
        closing: list[Effect] = []
        if event.is_rehearsal:
            self.current = self.of_backward = BatchInProgress(self.position, steps.number, state=BatchState.REHEARSAL)
        elif origin is None:
            closing = self._close_direct()
            if self._candidate is None or self._candidate.state is not BatchState.RESERVED:
                self._begin_eval()
            self.current = BatchInProgress(self.position, steps.number, state=BatchState.EVAL)
        elif origin is BatchOrigin.TRAINING:
            closing, self.current = self._next_batch(steps)
            self.of_backward = self.current
        else:
            closing = self._close_direct()
            self.current = self._next_candidate(origin, steps)
        self.is_open, self.phase = True, "forward"
        return [*closing, Begin(self.position.batch)]

    def _next_batch(self, steps: Steps) -> tuple[list[Effect], BatchInProgress]:
        candidate, closing, began = self._candidate, list[Effect](), BatchOrigin.TRAINING
        if candidate is None or candidate.state is not BatchState.RESERVED:
            closing = self._close_direct()
            batch = self._numbered(BatchOrigin.TRAINING, steps)
        else:
            if candidate.origin is not BatchOrigin.TRAINING_CALLS or candidate.optimizer_step != steps.number:
                closing = self._close_direct()
            else:  # the direct calls before this forward are a part of its batch
                self.position, began = max(candidate.position, self.position), candidate.origin
            batch = self._take_over(candidate, BatchOrigin.TRAINING, steps)
        self._be_batch(batch, NO_TASK, steps)
        self._origin = began
        self._awaits_backward = True
        return closing, batch

    def _next_candidate(self, origin: BatchOrigin, steps: Steps) -> BatchInProgress:
        batch = self._candidate
        if batch is not None and batch.state is BatchState.RESERVED:
            self._is_waiting = not self._is_of_several
            batch = self._take_over(batch, origin, steps)
        elif self._origin in (None, origin):
            batch = self.of_backward = self._numbered(origin, steps)
        else:
            if origin.is_root:
                self._begin_eval()
            batch = BatchInProgress(self.position, steps.number, origin=origin, state=BatchState.CANDIDATE)
        self._candidate, self._candidate_part = batch, batch.part
        return batch

    def _numbered(self, origin: BatchOrigin, steps: Steps) -> BatchInProgress:
        number = self.position.batch + 1
        self._count_from(number, steps)
        self.position = Position(number, 0, 0)
        traced = number in self.trace_batch_nums
        state = BatchState.BATCH if origin is BatchOrigin.TRAINING else BatchState.RESERVED
        is_full = self._is_full(number)
        batch = BatchInProgress(self.position, steps.number, origin=origin, state=state, traced=traced, is_full=is_full)
        self._note_full(batch)
        return batch

    def _note_full(self, batch: BatchInProgress) -> None:
        """A batch has its number."""
        if batch.is_full:
            number = batch.position.batch
            batch.is_first_full, self._last_full = number // EVERY > self._last_full // EVERY, number

    def _take_over(self, batch: BatchInProgress, origin: BatchOrigin, steps: Steps) -> BatchInProgress:
        """No backward has reached the candidate: what begins now has its number."""
        self._count_from(self.position.batch, steps)
        batch.position, batch.optimizer_step = self.position, steps.number
        batch.origin, batch.is_compiled = origin, False
        return batch

    def _count_from(self, number: int, steps: Steps) -> None:
        """A batch of this number begins."""
        if steps.number not in self._first_batches:
            self._first_batches[steps.number] = number

    def _begin_eval(self) -> None:
        batch, evaluation, _ = self.position
        self.position = Position(batch, evaluation + 1, 0)

    def _returned(self) -> list[Effect]:
        batch = self.current
        if batch.is_full and batch.is_streamed and not batch.part.first.frame:
            self._root_frame = batch.position.frame - 1
        if batch.is_streamed:
            self._unreached[batch.position.batch] = Moment(batch.optimizer_step, *batch.position)
        self.phase = "backward" if batch.state is BatchState.BATCH else "idle"
        return [Close(self._cut(batch), awaits_loss=batch.is_streamed and not self._sends_at_once)]

    def _reached(self, part: BatchPart, task: int, steps: Steps) -> list[Effect]:
        batch, effects = part.batch, list[Effect]()
        if Gate.BACKWARD in part.gates:
            is_further = batch.state is BatchState.BATCH  # several forwards with one backward are one batch
            self._is_of_several = is_further
            if is_further:
                self._is_waiting = False
            else:
                self._be_batch(batch, task, steps)
            if is_further or part.first[:2] != batch.position[:2]:
                self._move(part)
            part.gates.discard(Gate.BACKWARD)  # last: an interruption before this leaves it to the step
            is_last = part is batch.part
            effects.append(Close(self._cut(batch), awaits_loss=not self._sends_at_once) if is_last else Release(part))
        return effects

    def begin_backward(self, batch: BatchInProgress) -> None:
        self.of_backward, self.use.has_trained = batch, True
        self._unreached.pop(batch.position.batch, None)
        if batch.position is not self.position and batch.position[:2] == self.position[:2]:
            batch.position = self.position = max(batch.position, self.position)
        if batch is self.current:
            self._awaits_backward = False
        self.phase = "backward"

    def _be_batch(self, batch: BatchInProgress, task: int, steps: Steps) -> None:
        candidate = self._candidate
        if batch.state is BatchState.CANDIDATE:
            is_numbered = candidate is not None and candidate.state is BatchState.RESERVED
            if not (task == self._last_task != NO_TASK or is_numbered):
                self.position = Position(self.position.batch + 1, 0, 0)
            batch.position = self.position
            self._note_full(batch)
            batch.move(BatchState.RESERVED)
        elif batch.origin is not BatchOrigin.TRAINING:
            self.position = max(batch.position, self.position)
        # Before it is a batch: if this is interrupted, no later forward may have the number of a batch.
        if candidate is batch or (candidate is not None and candidate.state is not BatchState.RESERVED):
            self._candidate = self._candidate_part = None
            self.is_direct = False
        batch.move(BatchState.BATCH)
        batch.part.gates.discard(Gate.BACKWARD)
        self._origin, self._last_step, self._last_task = batch.origin, steps.done, task

    def _move(self, part: BatchPart) -> None:
        """Gives the frames of a part new positions, in its batch."""
        batch = part.batch
        for frame in part.frames:
            frame.position = batch.position
            batch.position = batch.position._replace(frame=batch.position.frame + 1)
        self.move_on(batch)

    # --- the end of parts ---------------------------------------------------------------------------------------------

    def _cut(self, batch: BatchInProgress) -> BatchPart:
        """The part ends; the batch has a new one."""
        if batch.part.frames and self.is_late(batch.part):
            self.closed.append(batch.part)
        return batch.cut()

    def _settle(self, steps: Steps) -> list[Effect]:
        """The next forward or an optimizer step begins: the backward of the last batch, or batches, is over."""
        effects: list[Effect] = [NoLossComes(), Forget()]
        while self._backwards:
            batch = self._backwards[0]
            if batch.part.frames:
                effects.append(Close(self._cut(batch)))
            self._backwards.remove(batch)
        return effects + self._settle_loose(steps)

    def _close_direct(self) -> list[Effect]:
        """The direct calls are over, without a backward."""
        batch, was_direct, self.is_direct = self._candidate, self.is_direct, False
        return [Close(self._cut(batch))] if was_direct and batch is not None and batch.part.frames else []

    def _settle_loose(self, steps: Steps) -> list[Effect]:
        loose = self.loose
        closing: list[Effect] = [Close(self._cut(loose))] if loose.part.frames else []
        self.loose = BatchInProgress(self.position, steps.number, state=BatchState.OUTSIDE)
        return closing
