"""Forwards of the root and calls of its modules -> batches that begin and end, and a frame for each call. The hot path."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..judge.batch import BatchOrigin
from ..judge.events import (
    DirectCall,
    Feed,
    ForwardBegan,
    ForwardComes,
    GraphBegan,
    Interrupted,
    OutputsCame,
    RootBegan,
    RootLeft,
    RootRaised,
    RootReturned,
    TuningCame,
)
from ..judge.settler import Settler
from ..judge.steps.optimizer_steps import OptimizerSteps
from ..measure.modules import NamedModule
from ..measure.recorder import PendingFrame, Recorder
from ..measure.sweep import Sweep
from ..shared.types.frame import Kind, Phase
from ..shared.types.tuning import Tuning, taken_from
from . import backward
from .batches import Batches
from .compiled.readings import HandedCalls
from .fails_open import FailsOpen
from .gradients import Gradients
from .hooks import Hooks
from .loss import Losses
from .running import RunningRoots
from .stage import is_rehearsal


class Forwards:
    """What the hooks of modules call; see ``ForwardHooks`` and ``CompiledListener``.

    Args:
        count_all: see ``Detector``.
        doors: catch errors of ours.
        hooks: the modules of the model.
    """

    events = (Interrupted,)

    def __init__(
        self,
        count_all: bool,
        doors: FailsOpen,
        feed: Feed,
        running: RunningRoots,
        batches: Batches,
        settler: Settler,
        recorder: Recorder,
        sweep: Sweep,
        steps: OptimizerSteps,
        hooks: Hooks,
        gradients: Gradients,
        losses: Losses,
    ) -> None:
        self._count_all = count_all
        self._doors = doors
        self._feed = feed
        self._running = running
        self._batches = batches
        self._life = batches.life
        self._settler = settler
        self._recorder = recorder
        self._sweep = sweep
        self._steps = steps
        self._hooks = hooks
        self._gradients = gradients
        self._losses = losses
        self._tunings: deque[Tuning] = deque()
        handed = HandedCalls(hooks.root, running, batches, recorder, gradients, self)
        # What hooks call: each catches the errors of its body.
        self.enter, self.leave = doors.hook(self._enter), doors.hook(self._leave)
        self.leave_root, self._return_root = doors.guarded(self._leave_root), doors.hook(self._root_returned)
        self.mark, self.handed = doors.guarded(self._mark), doors.hook(handed.take)
        self.compiled_given = doors.guarded(self._compiled_given)
        self.compiled_returned = doors.guarded(self._compiled_returned)

    def is_running(self) -> bool:
        return self._running.is_here()

    def tune(self, tuning: Tuning) -> None:
        """Changes options from the next forward on. For any thread."""
        self._tunings.append(tuning)

    def on(self, event: Interrupted) -> None:
        self._feed.tell(RootRaised(is_judged=not self._doors.is_off, runs_again=False))
        self._recorder.restart()

    # --- what hooks call ----------------------------------------------------------------------------------------------

    def _enter(self, named: NamedModule, args: Any, kwargs: Any) -> None:
        if self._running.is_recomputing() or (self._may_be_step() and self._running.enter_step()):
            return
        if (is_outermost := self._running.enter()) is None:
            return
        if is_outermost:
            self._open_batch(self._origin_of(self._hooks.root.training, torch.is_grad_enabled()))
            self._batches.enter(named, args, kwargs)
            if self._doors.abort is None:
                self._hooks.rest(wholly=self._life.may_rest)
            self._feed.tell(ForwardBegan(self._life.current))
        self._settler.raise_waiting()

    def _may_be_step(self) -> bool:
        return self._hooks.root.training and torch.is_grad_enabled()

    def _leave(self, named: NamedModule, args: Any, kwargs: Any, output: Any) -> None:
        if self._running.is_elsewhere():
            return
        if self._running.depth:
            if self._life.current.is_full and not (self._running.has_device and self._running.is_captured()):
                if self._settler.waiting is not None:
                    self._settler.raise_waiting()
                self._call(named, args, kwargs, output)
        elif backward.is_running():
            if self._life.of_backward.is_full and not self._running.is_captured():
                self._recompute(named, args, kwargs, output)
        elif not self._running.is_captured() and not self._hooks.is_run_by_another(named.module):
            self._leave_alone(named, args, kwargs, output)

    def _leave_alone(self, named: NamedModule, args: Any, kwargs: Any, output: Any) -> None:
        """A module was called directly, between two batches."""
        if is_rehearsal():  # the loss, say, calls a part of the stage
            return
        self._settler.raise_waiting()
        is_first = self.open_direct(torch.is_grad_enabled())
        batch = self._life.of_forward
        if not batch.is_sure:
            self._feed.tell(OutputsCame(batch.part, None, output))
        if not batch.is_full:
            return
        try:
            if is_first:
                batch.root_inputs = self._recorder.inputs(batch.position, named, args, kwargs, f"{named.names[0]}:")
            self._call(named, args, kwargs, output)
        finally:
            if not self._life.is_direct:
                self._recorder.forget()

    def _leave_root(self, named: NamedModule, args: Any, kwargs: Any, output: Any) -> None:
        if self._running.leave_unwatched() or (not self._running.is_recomputing() and self._running.leave_step()):
            return
        if output is not None or not self._running.is_raising():
            self._return_root(named, args, kwargs, output)
        elif self._running.is_here():
            self._raised()

    def _root_returned(self, named: NamedModule, args: Any, kwargs: Any, output: Any) -> None:
        if self._running.is_elsewhere():
            return
        if self._running.is_recomputing():
            self._recompute(named, args, kwargs, output)
            return
        self._settler.raise_waiting()
        batch = self._life.current
        with self.leaving_root() as ends_batch, batch.holding((args, kwargs) if ends_batch else None):
            if batch.is_full:
                self._call(named, args, kwargs, output)
            else:
                frame = self._recorder.of_root(self._life.next, named, output)
                self._add(frame, named, (), {}, output)
            if ends_batch:
                if batch.is_streamed and torch.is_grad_enabled():
                    self._feed.tell(OutputsCame(batch.part, batch.entry, output))
                self.end_batch()

    def _raised(self) -> None:
        """A root forward raised. If it is the outermost one, the frames that ran are judged, and the batch is over."""
        if self._running.leave():
            self._feed.tell(RootRaised(is_judged=not self._doors.is_off, runs_again=self._running.may_follow()))

    def _compiled_given(self, args: Any, kwargs: Any) -> None:
        self._batches.given(self._hooks.root, args, kwargs)
        if not self._running.depth and self._doors.abort is None:  # which graph runs is decided before it begins
            origin = None if is_rehearsal() else self._origin_of(self._hooks.root.training, torch.is_grad_enabled())
            self._hooks.lean.begin(wanted=self._life.will_rest(origin))

    def _compiled_returned(self, output: Any) -> None:
        """A compiled root has returned, or, with output None, may have raised."""
        if output is None and self._running.is_here() and self._running.is_raising():
            self._raised()
        elif (forward := self._batches.returned()) is not None:
            part, entry = forward
            if part.batch.is_streamed and torch.is_grad_enabled():
                self._feed.tell(OutputsCame(part, entry, output))

    # --- frames -------------------------------------------------------------------------------------------------------

    def _call(self, named: NamedModule, args: Any, kwargs: Any, output: Any) -> None:
        frame = self._recorder.call(self._life.next, named, Phase.FORWARD, args, kwargs, output)
        self._add(frame, named, args, kwargs, output)

    def _add(self, frame: PendingFrame, named: NamedModule, args: Any, kwargs: Any, output: Any) -> None:
        self._batches.add(frame, (args, kwargs, output))
        if self._gradients.is_on:  # asked here: most trainings save two calls a module
            self._gradients.watch_call(named, args, kwargs, output, self._life.of_forward)

    def _mark(self, tensor: Tensor, label: str, named: NamedModule) -> None:
        self._batches.add(self._recorder.values(self._life.next, named, [(Kind.MARKED, label, tensor)]), ((), {}, tensor))

    def _recompute(self, named: NamedModule, args: Any, kwargs: Any, output: Any) -> None:
        """A checkpoint runs a forward again, in the backward."""
        self._losses.take()
        batch = self._life.of_backward
        self._batches.add_backward(self._recorder.call(batch.position, named, Phase.RECOMPUTE, args, kwargs, output))
        self._gradients.watch_call(named, args, kwargs, output, batch)

    # --- batches begin and end ----------------------------------------------------------------------------------------

    def _origin_of(self, is_training: bool, has_gradients: bool) -> BatchOrigin | None:
        """How a root forward begins; None: it is an eval."""
        if self._count_all:
            return BatchOrigin.TRAINING
        return BatchOrigin.of_root(is_training) if has_gradients else None

    def _open_batch(self, origin: BatchOrigin | None) -> None:
        if not self._life.is_open:
            self._prepare()
            self._feed.tell(RootBegan(origin, self._steps.now, is_rehearsal()))
            self._look_at_model()

    def open_direct(self, has_gradients: bool) -> bool:
        """A module was called directly. Returns whether this call is the first one of a batch without a root forward."""
        origin = BatchOrigin.of_calls(self._hooks.root.training)
        if self._count_all:
            self._open_batch(BatchOrigin.TRAINING)
        elif has_gradients and self._life.begins_by_calls(origin):
            self._prepare()
            self._feed.tell(DirectCall(origin, self._steps.now))
            self._look_at_model()
            self._feed.tell(ForwardBegan(self._life.of_forward))
            return True
        return False

    def enter_compiled(self, is_training: bool, has_gradients: bool) -> None:
        """The graph of a compiled root begins."""
        if self._running.depth and self._life.current.is_compiled:
            self._raised()  # no hook may have been called when a graph raised: the next graph that begins shows it
        if self._running.enter(is_compiled=True):
            self._open_batch(self._origin_of(is_training, has_gradients))
            if self._hooks.lean.is_on:  # its graph was chosen before the batch became full: the next one is
                self._life.current.is_full = False
            self._batches.enter_compiled()
            self._feed.tell(GraphBegan(self._batches.is_given))
            self._feed.tell(ForwardBegan(self._life.current))

    def _prepare(self) -> None:
        self._feed.tell(ForwardComes(self._steps.now))
        if self._tunings:
            self._feed.tell(TuningCame(taken_from(self._tunings)))

    def _look_at_model(self) -> None:
        batch = self._life.of_forward
        self._hooks.refresh(rarely=not batch.is_full)
        if batch.is_full and not self._count_all:
            batch.part.look = self._sweep.look(batch.position.batch, self._steps.done)

    @contextmanager
    def leaving_root(self) -> Iterator[bool]:
        """A root forward ends. The outermost one ends the batch, even if judging it raises; yields whether this is it."""
        with self._running.leaving() as is_outermost:
            if is_outermost:
                self._life.come_to_root()
            try:
                yield is_outermost
            finally:
                if not self._running.depth:
                    self._recorder.forget()
                if is_outermost:
                    self._feed.tell(RootLeft())

    def end_batch(self) -> None:
        self._feed.tell(RootReturned())
