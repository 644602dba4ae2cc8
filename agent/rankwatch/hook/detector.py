"""Hooks -> frames, and when batches begin and end. ``lifecycle`` has which batch a frame belongs to. The hot path.

An error in here is logged once and switches the detector off: it never stops a healthy training.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import TrainingAborted
from ..judge.batch import BatchInProgress, BatchOrigin, BatchPart
from ..judge.lifecycle import Life
from ..judge.optimizer_steps import OptimizerSteps, after_closure, has_closure
from ..judge.settler import Settler, default_check
from ..measure.collectives import Collectives
from ..measure.modules import NamedModule, unwrap
from ..measure.recorder import Recorder
from ..measure.sweep import Sweep
from ..measure.tape import Tape
from ..replicas.fingerprints import FingerprintTaker
from ..rerun.careful import passed_again
from ..shared.types.config import Config, Policy
from ..shared.types.frame import BatchSummary, FrameTable, Kind, Moment, Phase, Position
from ..shared.types.tuning import Tuning, taken_from
from . import backward
from .batches import Batches
from .compiled.entry import CompiledEntry
from .compiled.readings import HandedCalls
from .compiled.traced import Calls, Numbers
from .fails_open import DetectorObserver, FailsOpen
from .gradients import Gradients
from .hooks import Hooks
from .loss import BackwardWatch, Losses, losses_of
from .running import RunningRoots, is_capturing
from .step.guard import Guard
from .step.scaler import LossScales, Scale

log = logging.getLogger(__name__)


class Detector(FailsOpen):
    """Watches ``model`` until ``remove``. ``progress``, ``phase``, ``obey`` and ``tune`` may be used from other threads.

    Args:
        count_all: as the Hugging Face detector does, count every root forward as a batch, not only those in training mode,
            add a module that is called between two batches to the second one, not the first, and look at no loss.
        judge_traced: judge traced batches too, at their end (the Hugging Face detector does not).
        sends_at_once: send a forward when it ends, not with its loss: the other stages of a pipeline are waited for.
    """

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        observer: DetectorObserver,
        *,
        count_all: bool = False,
        judge_traced: bool = True,
        sends_at_once: bool = False,
    ) -> None:
        self._life = Life(config.first_batch, config.every, config.trace_batch_nums, sends_at_once=sends_at_once)
        root = unwrap(model)
        super().__init__(config.stop, observer, self._life, root)
        self._config, self._observer, self._count_all = config, observer, count_all
        self._tunings: deque[Tuning] = deque()
        # What hooks call: each catches the errors of its body.
        self.enter, self.leave = self._hook(self._enter), self._hook(self._leave)
        self.leave_root, self.handed = self.guarded(self._leave_root), self._hook(self._take_handed)
        self.before_step, self.after_step = self.guarded(self._before_step), self.guarded(self._after_step)
        self.compiled_given = self.guarded(self._compiled_given)
        self.compiled_returned = self.guarded(self._compiled_returned)
        self.backward_begins = self.guarded(self._backward_begins)
        self.backward_ends = self.guarded(self._backward_ends)
        self.look_back = self.guarded(self._look_back)
        self._reached = self.guarded(self._arrive)
        self._return_root = self._hook(self._root_returned)
        self._judge_before_step = self._hook(self._judge_step)
        self._guard_update = self._hook(self._guard_before_update)

        tape = Tape()
        self._steps = OptimizerSteps(model)
        self._recorder = Recorder(tape, 0 if config.policy is Policy.STRICT else config.weights_every)
        self._running = RunningRoots(root, self)
        self._hooks = Hooks(model, self, config.modules)
        self._loss_scales = LossScales(config, self._life, self.guarded(self._scaler_stepped))
        self._sweep = Sweep(model, self._recorder, self._hooks)
        self._settler = Settler(
            config,
            default_check(model),
            self._life,
            tape,
            self._recorder,
            self._sweep,
            observer,
            judge_traced=judge_traced,
            steps=self._steps,
            model=self._hooks,
        )
        self._batches = Batches(self._life, self._settler, self._recorder, self._loss_scales, self._steps)
        self._collectives = Collectives(
            self._recorder, self.guarded, is_watched=self._is_watched, is_measured=self._is_measured
        )
        self._losses = Losses(self._batches, self._loss_scales, self._recorder, self._hooks, self._settler)
        self._gradients = Gradients(
            config.gradients,
            self._batches,
            self._recorder,
            self._hook,
            self._reach,
            model=self._hooks,
            collectives=self._collectives,
            losses=self._losses,
        )
        self._handed = HandedCalls(root, self._running, self._batches, self._recorder, self._gradients, self)
        self._compiled = CompiledEntry(model, self)
        self._guard = Guard(
            config,
            self._batches,
            self._settler,
            self._recorder,
            self._loss_scales,
            self._steps,
            self._hooks,
            self._collectives,
            self,
        )
        self._fingerprints = FingerprintTaker(
            model,
            0 if count_all else config.fingerprints,
            self._steps,
            self._collectives,
            guard=self.guarded,
            modules=self._hooks,
            send=observer.on_fingerprint,
            notify=observer.on_notice,
        )
        self._backwards = BackwardWatch(self)
        self._inside = 0

    @property
    def root(self) -> nn.Module:
        """The watched module, without its wrappers."""
        return self._hooks.root

    @property
    def position(self) -> Position:
        """The position of the next frame."""
        return self._life.position

    @property
    def phase(self) -> str:
        return self._life.phase

    @property
    def progress(self) -> Moment:
        """The moment before which this rank is known to have no trip."""
        return self._life.progress

    @property
    def optimizer_step(self) -> int:
        """The number of the optimizer step that comes next."""
        return self._steps.number

    @optimizer_step.setter
    def optimizer_step(self, number: int) -> None:
        self._steps.count_from(number)

    def unsent(self) -> tuple[FrameTable, BatchSummary] | None:
        """The last forward, if it is judged, and not sent yet: its loss is sent with it."""
        return self._settler.unsent()

    def tune(self, tuning: Tuning) -> None:
        """Changes options from the next forward on."""
        self._tunings.append(tuning)

    def remove(self) -> None:
        """Takes all hooks away; the model is as it was. Pending frames are judged and sent, but nothing is raised."""
        self._off, self._stop = True, None
        try:
            if not self.fault:  # first, as a batch may be run again with its hooks
                self.guarded(partial(self._batches.settle, wait=True))()
                self.guarded(partial(self._fingerprints.flush, wait=True))()
        except TrainingAborted:
            log.debug("a trip was found as the watch was closed")
        finally:
            self._hooks.remove()
            self._compiled.remove()
            self._gradients.remove()
            self._loss_scales.close()
            self._backwards.remove()
            self._guard.remove()
            self._fingerprints.remove()
            self._collectives.close()

    def is_inside(self) -> bool:
        """Whether the calling thread is inside a watched forward."""
        return self._running.is_here() and not self._off

    def _is_watched(self) -> bool:
        """Whether what the calling thread does may be part of the watched training."""
        return not self._off and self._running.is_watched()

    def _is_measured(self) -> bool:
        """Whether tensors of the forward or backward that runs are measured."""
        if self._running.depth or self._life.is_direct:
            return self._life.of_forward.is_full
        return self._config.gradients and backward.is_running() and self._life.of_backward.is_full

    def mark(self, tensor: Tensor, label: str) -> None:
        """Records a tensor that the user marked, as a frame of its own under the name of the running module."""
        if not passed_again(label, ((), {}, tensor)):
            self.guarded(self._mark)(tensor, label, self._hooks.running())

    # --- forward ------------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        self._hooks.wake()

    def root_ended(self) -> None:
        """The outermost forward of the root has ended, however it did."""
        self._wake()

    def root_interrupted(self) -> None:
        """It has ended without a call of its last hook."""
        self._batches.interrupted(is_judged=not self._off)

    def wrapped(self, wrapper: nn.Module, module: nn.Module) -> None:
        """``torch.compile`` wraps a module."""
        self._compiled.wrapped(wrapper, module)

    def released(self, number: int) -> None:
        """A module is no part of the model any more."""
        self._recorder.release(number)

    def _take_handed(self, calls: Calls, numbers: Numbers) -> None:
        self._handed.take(calls, numbers)

    def _compiled_given(self, args: Any, kwargs: Any) -> None:
        self._batches.given(self._hooks.root, args, kwargs)

    def _enter(self, named: NamedModule, args: Any, kwargs: Any) -> None:
        if self._running.is_recomputing():
            return
        if (is_outermost := self._running.enter()) is None:
            return
        if is_outermost:
            self._open_batch(self._origin_of(self.root.training, torch.is_grad_enabled()))
            self._batches.enter(named, args, kwargs)
            self._hooks.rest(unless=not self._life.may_rest or self.abort is not None)
            self._fingerprints.forward_begins(self._life.current)
        self._settler.raise_waiting()

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
        elif not self._running.is_captured():
            self._leave_alone(named, args, kwargs, output)

    def _leave_alone(self, named: NamedModule, args: Any, kwargs: Any, output: Any) -> None:
        """A module was called directly, between two batches."""
        self._settler.raise_waiting()
        is_first = self.open_direct(torch.is_grad_enabled())
        batch = self._life.of_forward
        if not batch.is_sure:
            self._losses.returned(backward.mark_outputs(output, partial(self._reached, batch.part, None)))
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
        if self._running.leave_unwatched():
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
            if not batch.is_full:
                args, kwargs = (), {}
            self._call(named, args, kwargs, output)
            if ends_batch:
                self._losses.returned(self._guard.mark(batch.part, batch.entry, output, self._reached))
                self.end_batch()

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
                    self._batches.leave()

    def enter_compiled(self, is_training: bool, has_gradients: bool) -> None:
        if self._running.depth and self._life.current.is_compiled:
            self._raised()  # no hook may have been called when a graph raised: the next graph that begins shows it
        if self._running.enter(is_compiled=True):
            self._open_batch(self._origin_of(is_training, has_gradients))
            self._batches.enter_compiled()
            if not self._batches.is_given:
                self._compiled.look_again()
            self._fingerprints.forward_begins(self._life.current)

    def _compiled_returned(self, output: Any) -> None:
        """A compiled root has returned, or, with output None, may have raised."""
        if output is None and self._running.is_here() and self._running.is_raising():
            self._raised()
        else:
            self._losses.returned(self._guard.mark_compiled(output, self._reached))

    def _call(self, named: NamedModule, args: Any, kwargs: Any, output: Any) -> None:
        frame = self._recorder.call(self._life.next, named, Phase.FORWARD, args, kwargs, output)
        self._batches.add(frame, (args, kwargs, output))
        self._gradients.watch_call(named, args, kwargs, output, self._life.of_forward)

    def _mark(self, tensor: Tensor, label: str, named: NamedModule) -> None:
        self._batches.add(self._recorder.values(self._life.next, named, [(Kind.MARKED, label, tensor)]), ((), {}, tensor))

    # --- batches ------------------------------------------------------------------------------------------------------

    def _origin_of(self, is_training: bool, has_gradients: bool) -> BatchOrigin | None:
        """How a root forward begins; None: it is an eval."""
        if self._count_all:
            return BatchOrigin.TRAINING
        return BatchOrigin.of_root(is_training) if has_gradients else None

    def _open_batch(self, origin: BatchOrigin | None) -> None:
        if not self._life.is_open:
            self._prepare()
            self._batches.open(origin)
            self._look_at_model()

    def open_direct(self, has_gradients: bool) -> bool:
        """A module was called directly. Returns whether this call is the first one of a batch without a root forward."""
        origin = BatchOrigin.of_calls(self.root.training)
        if self._count_all:
            self._open_batch(BatchOrigin.TRAINING)
        elif has_gradients and self._life.begins_by_calls(origin):
            self._prepare()
            self._batches.open_direct(origin)
            self._look_at_model()
            self._fingerprints.forward_begins(self._life.of_forward)
            return True
        return False

    def _look_at_model(self) -> None:
        batch = self._life.of_forward
        self._hooks.refresh(rarely=not batch.is_full)
        if batch.is_full and not self._count_all:
            batch.part.look = self._sweep.look(batch.position.batch, self._steps.done)

    def _prepare(self) -> None:
        self._gradients.forward_begins()
        self._guard.forward_begins()
        self._batches.settle()
        self._loss_scales.poll()
        self._tune()

    def end_batch(self) -> None:
        self._batches.end()
        self._fingerprints.root_ends()
        self._check_limit(self._life.current)

    def _check_limit(self, batch: BatchInProgress) -> None:
        limit = self._config.abort_after_batch_num
        if limit is not None and batch.is_streamed and batch.is_sure and batch.position.batch >= limit:
            self._settler.poll(wait=True)
            self._settler.expect_no_loss()
            raise self._observer.on_limit(batch.position.batch)

    def _raised(self) -> None:
        """A root forward raised. If it is the outermost one, the frames that ran are judged, and the batch is over."""
        if self._running.leave():
            self._batches.abandon(is_judged=not self._off, runs_again=self._running.may_follow())

    def _tune(self) -> None:
        tuning = taken_from(self._tunings)
        self._batches.tune(tuning)
        self._settler.tune(tuning)
        if tuning.modules is not None:
            self._hooks.select(tuning.modules)

    # --- backward and the optimizer -----------------------------------------------------------------------------------

    def _backward_begins(self, args: Any, kwargs: Any) -> None:
        self._running.recover()
        if not (is_capturing() or self._off or self._count_all or self._running.depth):
            self._losses.begin(losses_of(args, kwargs), is_own=self._running.is_own())
            self._guard.backward_begins(is_first=self._losses.is_first)

    def _backward_ends(self, has_returned: bool) -> None:
        self._losses.end(is_taken=has_returned and not self._off, reach=self._reach)
        if has_returned and not self._off and self._running.is_own():
            self._gradients.backward_ends()

    def _scaler_stepped(self, scale: Scale, optimizer: Optimizer) -> None:
        """The scale of a loss shrinks without end: it is not the cause. The gradients tell where they are not finite."""
        batch = self._life.of_backward
        is_measured = self._config.gradients and batch.is_full
        if self._off or is_measured or not self._steps.is_ours(optimizer) or not batch.is_streamed:
            return
        batch.scaling = self._loss_scales.scaling(scale)
        self._guard.find_origin()

    def _recompute(self, named: NamedModule, args: Any, kwargs: Any, output: Any) -> None:
        self._losses.take()
        batch = self._life.of_backward
        self._batches.add_backward(self._recorder.call(batch.position, named, Phase.RECOMPUTE, args, kwargs, output))
        self._gradients.watch_call(named, args, kwargs, output, batch)

    def _arrive(self, part: BatchPart, keep: Callable[..., None] | None, number: int, gradient: Tensor | None) -> None:
        """A backward hands a gradient to what the forward of this part returned."""
        if keep is not None and not self._off:
            keep(number, gradient)  # first: a bad loss may have the forward run again
        self._reach(part)

    def _reach(self, part: BatchPart) -> None:
        """A backward has reached what the forward of this part returned."""
        if self._off:
            return
        was_sure = part.batch.is_sure
        self._batches.reached(part)
        self._losses.take()
        if not was_sure:
            self._check_limit(part.batch)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if is_capturing():
            return None
        self._judge_before_step(optimizer)
        if not self._steps.is_ours(optimizer):
            return None
        if has_closure(args, kwargs):  # it computes the gradients: until then they are those of an earlier step
            return after_closure(args, kwargs, partial(self._before_update, optimizer))
        self._before_update(optimizer)
        return None

    def _guard_before_update(self, optimizer: Optimizer) -> None:
        self._guard.before_step(optimizer)

    def _look_back(self, error: BaseException) -> TrainingAborted | None:
        return None if self._off else self._guard.look_back(error)

    def _before_update(self, optimizer: Optimizer) -> None:
        self._guard_update(optimizer)
        if self._is_stopping:
            optimizer.zero_grad(set_to_none=True)  # without gradients it leaves the weights alone

    def _judge_step(self, optimizer: Optimizer) -> None:
        if not self._steps.is_ours(optimizer):
            return
        self._running.recover()
        if (candidate := self._batches.candidate_before(optimizer)) is not None:
            self._reach(candidate)
        self._gradients.before_step()
        self._batches.before_step()
        self._fingerprints.before_step(optimizer)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if is_capturing():
            return
        self._life.phase = "idle"
        self._steps.count(optimizer)
        if self._steps.of(optimizer) and not self._off:
            self._fingerprints.after_step(optimizer, self._life.position.batch)
