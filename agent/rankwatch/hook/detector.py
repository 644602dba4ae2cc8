"""Hooks -> batches of records: which forward is a batch, which frame belongs to which. The hot path.

Whatever goes wrong in here is logged once and switches the detector off: it never stops a healthy training.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import deque
from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import wraps
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import TrainingAborted
from ..judge.batch import BatchInProgress
from ..judge.health import is_looked_at
from ..judge.policy import Judge
from ..judge.settler import Again, Observer, Settler
from ..measure.modules import NamedModule
from ..measure.recorder import Record, Recorder
from ..measure.tape import Cell, Tape
from ..shared.config import Config, Policy
from ..shared.frame import NOWHERE, Kind, Phase, Position, ReadingSpec
from ..shared.tuning import NO_CHANGE, Check, Tuning
from . import backward
from .hooks import Hooks
from .scaler import LossScale
from .stage import is_rehearsal
from .steps import OptimizerSteps
from .traced import What

log = logging.getLogger(__name__)

LOOSE_FRAMES = 256
"""How many frames outside of any batch are judged together where frames are not judged as they come."""


class DetectorObserver(Observer, Protocol):
    def on_limit(self, batch: int) -> TrainingAborted: ...


class Detector:
    """Watches ``model`` until ``remove``. ``progress``, ``phase``, ``abort`` and ``tune`` may be used from other threads.

    Args:
        count_all: count every root forward as a batch, not only those in training mode, and file a module that is called
            between two batches under the second, not the first (the Hugging Face way).
        judge_traced: judge traced batches too, once they are traced to their end (the Hugging Face detector does not).
    """

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        observer: DetectorObserver,
        *,
        count_all: bool = False,
        judge_traced: bool = True,
    ) -> None:
        self.position = NOWHERE._replace(batch=config.first_batch - 1)
        """The next frame's."""
        self.phase = "idle"
        self.abort: Callable[[], TrainingAborted] | None = None
        """Set from outside to stop the training: the next hook raises what it returns."""
        self.fault = ""
        """The error of ours that switched the detector off."""

        self._stop = config.stop
        self._is_stopping = False
        self._config = config
        self._observer = observer
        self._count_all = count_all
        self._every = config.every
        self._trace_batch_nums = config.trace_batch_nums
        self._tunings: deque[Tuning] = deque()
        self._steps = OptimizerSteps(model)
        self._loss_scale = LossScale(config)
        tape = Tape()
        self._recorder = Recorder(tape, 0 if config.policy is Policy.STRICT else config.weights_every)
        self._settler = Settler(
            config.check or _default_check(model),
            Judge(config.policy, config.ignore),
            config.max_frames_to_save,
            tape,
            self._recorder,
            observer,
            judge_traced=judge_traced,
            steps=lambda: self._steps.done,
        )
        self._off = False
        self._thread = 0
        self._entry = threading.Lock()
        self._roots = 0  # root forwards running: more than one when the root calls itself
        self._raised_before: BaseException | None = None
        self._batch = self._loose = BatchInProgress(self.position, 0, is_told=False)
        self._is_open = False  # whether frames belong to the batch, or are loose
        self._behind = self._batch  # the batch whose backward is running
        self._behinds: list[BatchInProgress] = []  # those whose backward has frames that are not told yet
        self._parameters = backward.ParameterGradients(
            self._recorder.cell, self._guarded(self._gradients), lambda: is_looked_at(self._behind.position.batch)
        )
        self._hooks = Hooks(
            model,
            self._guarded,
            select=_selector(config.modules),
            enter=self._enter,
            leave=self._leave,
            leave_root=self._leave_root,
            handed=self._handed,
            before_step=self._before_step,
            after_step=self._after_step,
        )

    @property
    def root(self) -> nn.Module:
        """The watched module, out of its wrappers."""
        return self._hooks.root

    @property
    def progress(self) -> Position:
        """How far this rank is known to be free of trips."""
        position = self.position  # before the rest: it must not move on meanwhile
        waiting = self._settler.waiting
        if waiting is not None:
            return waiting.trip.position
        return self._settler.unsettled((self._batch, self._loose, *self._behinds)) or position

    @property
    def optimizer_step(self) -> int:
        """The number of the optimizer step that comes next."""
        return self._steps.number

    @optimizer_step.setter
    def optimizer_step(self, number: int) -> None:
        self._steps.offset = number - self._steps.done

    def tune(self, tuning: Tuning) -> None:
        """Changes options of the running watch, from the next forward on."""
        self._tunings.append(tuning)

    def remove(self) -> None:
        """Takes all hooks away; the model is as it was. What is still on its way is judged and told, but raises no more."""
        self._off, self._stop = True, None
        self._hooks.remove()
        self._parameters.remove()
        self._loss_scale.close()
        if not self.fault:
            try:
                self._guarded(self._tell_rest)()
            except TrainingAborted:
                log.debug("a trip was found as the watch was closed")

    def is_inside(self) -> bool:
        """Whether the calling thread is inside a watched forward."""
        return bool(self._roots) and self._thread == threading.get_ident() and not self._off

    def mark(self, tensor: Tensor, label: str) -> None:
        """Records a tensor the user pointed at as a frame of its own, in the name of the running module."""
        self._guarded(self._mark)(tensor, label, self._hooks.running())

    def _guarded(self, body: Callable[..., None]) -> Callable[..., None]:
        """``body`` as a hook that fails open."""

        @wraps(body)
        def hook(*args: Any) -> None:
            try:
                body(*args)
            except TrainingAborted as error:
                if self._stop is None:
                    raise
                self._ask_to_stop(self._stop, error)
            except Exception as error:
                self._off = True
                self.fault = f"switched itself off in batch {self.position.batch} by an error of its own: {error!r}"
                log.exception("rankwatch: %s", self.fault)

        return hook

    def _ask_to_stop(self, stop: Callable[[TrainingAborted], None], error: TrainingAborted) -> None:
        """Has the training stopped by its own means, which may take until the end of its step: nothing is judged till then."""
        if not self._is_stopping:
            self._off = self._is_stopping = True
            stop(error)

    # --- forward ------------------------------------------------------------------------------------------------------

    def _enter(self, named: NamedModule, args: Any, kwargs: Any) -> None:
        if self.abort is not None:
            raise self.abort()
        if self._off or self._is_recomputing():
            return
        is_outermost = self._enter_root()
        if is_outermost is None:
            return
        if is_outermost:
            self._open_batch(self._count_all or (self.root.training and torch.is_grad_enabled()))
            # What the root was fed is evidence that the root's own frame, the last one, would bring too late.
            self._batch.root_inputs = self._recorder.inputs(self.position, named, args, kwargs)
            self._raised_before = sys.exc_info()[1]
        self._settler.raise_waiting()

    def _leave(self, named: NamedModule, args: Any, kwargs: Any, output: Any) -> None:
        if self.abort is not None:
            raise self.abort()
        if self._off or (threading.get_ident() != self._thread and self._is_elsewhere()):
            return
        if self._roots:
            if self._batch.is_full:
                if self._settler.waiting is not None:
                    self._settler.raise_waiting()
                self._call(named, args, kwargs, output)
        elif backward.is_running():
            if self._behind.is_full:
                self._recompute(named, args, kwargs, output)
        elif self._batch.is_full:
            self._leave_alone(named, args, kwargs, output)

    def _leave_alone(self, named: NamedModule, args: Any, kwargs: Any, output: Any) -> None:
        """A module was called on its own, between two batches."""
        self._settler.raise_waiting()
        if self._count_all:
            self._open_batch(True)
        try:
            self._call(named, args, kwargs, output)
        finally:
            self._recorder.forget()

    def _leave_root(self, named: NamedModule, args: Any, kwargs: Any, output: Any) -> None:
        if output is None and sys.exc_info()[1] is not self._raised_before:
            if self._roots and self._thread == threading.get_ident():
                self._raised()
            return
        if self.abort is not None:
            raise self.abort()
        if self._off or self._is_elsewhere():
            return
        if self._is_recomputing():
            self._recompute(named, args, kwargs, output)
            return
        self._settler.raise_waiting()
        if not self._batch.is_full:
            args, kwargs = (), {}
        with _LeavingRoot(self) as ends_batch:
            self._call(named, args, kwargs, output)
            if ends_batch:
                self._watch_backward(output, self._batch)
                self._end_batch()

    def _handed(self, named: NamedModule, what: What, numbers: list[Tensor]) -> None:
        """What a compiled graph hands over in the place of ``_enter``, ``_leave`` and ``_leave_root``."""
        if self.abort is not None:
            raise self.abort()
        if self._off or self._is_elsewhere():
            return
        if what.event != "leave":
            if self._roots and self._batch.is_compiled:
                self._raised()  # no hook hears of a graph that raises: the next one that begins tells
            is_outermost = self._enter_root()
            if is_outermost:
                self._open_batch(self._count_all or what.event == "train")
                cells = self._recorder.handed(numbers, what.states)
                self._batch.root_inputs = self._recorder.cells(self.position, named, Phase.FORWARD, what.rows, cells)
                self._batch.is_compiled = True
        elif named.module is self._hooks.root:
            with _LeavingRoot(self) as ends_batch:
                self._traced(named, what, numbers)
                if ends_batch:
                    self._end_batch()
        elif self._batch.is_full:
            self._traced(named, what, numbers)

    def _call(self, named: NamedModule, args: Any, kwargs: Any, output: Any) -> None:
        record = self._recorder.call(self.position, named, Phase.FORWARD, args, kwargs, output)
        self._record(record, lambda: self._recorder.again(record, args, kwargs, output))
        if self._config.gradients:
            self._watch_gradients(named, args, kwargs, output, self._batch)

    def _traced(self, named: NamedModule, what: What, numbers: list[Tensor]) -> None:
        cells = self._recorder.handed(numbers, what.states)
        self._record(self._recorder.traced(self.position, named, what.rows, cells), None)
        if self._config.gradients and self._batch.is_told and torch.is_grad_enabled():
            self._parameters.watch(named)

    def _mark(self, tensor: Tensor, label: str, named: NamedModule) -> None:
        record = self._recorder.values(self.position, named, [(Kind.MARKED, label, tensor)])
        self._record(record, lambda: (record, [tensor]))

    def _record(self, record: Record, again: Again | None) -> None:
        into = self._batch if self._is_open else self._loose
        if into.is_rehearsal:
            return
        into.add(record)
        self._settler.frame(record, into.part, again)
        self.position = into.position
        if into is self._loose and len(into.part.records) >= LOOSE_FRAMES:
            self._settle_loose()

    def _enter_root(self) -> bool | None:
        """Counts a root forward that begins: whether it is the outermost; None if another thread's is running."""
        with self._entry:
            if self._is_elsewhere():
                return None
            self._roots += 1
            return self._roots == 1

    def _is_elsewhere(self) -> bool:
        """Whether this is another thread than the one whose root forward is running."""
        current = threading.get_ident()
        if current == self._thread:
            return False
        if backward.is_running():  # in threads of torch's own, while ours waits for it
            return False
        if self._roots:
            return True
        self._thread = current
        return False

    # --- batches ------------------------------------------------------------------------------------------------------

    def _open_batch(self, is_training: bool) -> None:
        if self._is_open:
            return
        self._tell_backward()
        self._settle_loose()
        self._settler.poll()
        self._loss_scale.poll()
        self._tune()
        self._batch = self._next_batch(is_training)
        if is_training or self._batch.is_rehearsal:
            self._behind = self._batch
        self._is_open = True
        self.phase = "forward"
        self._recorder.begin(self._steps.done)

    def _next_batch(self, is_training: bool) -> BatchInProgress:
        if is_rehearsal():
            return BatchInProgress(self.position, self._steps.number, is_rehearsal=True)
        batch, evaluation, _ = self.position
        self.position = Position(batch + 1, 0, 0) if is_training else Position(batch, evaluation + 1, 0)
        traced = is_training and self.position.batch in self._trace_batch_nums
        is_full = traced or not is_training or self.position.batch % self._every == 0
        return BatchInProgress(self.position, self._steps.number, traced=traced, is_full=is_full)

    def _end_batch(self) -> None:
        batch = self._batch
        self.phase = "backward" if batch.is_told else "idle"
        self._settler.close(batch)
        limit = self._config.abort_after_batch_num
        if limit is not None and batch.is_told and self.position.batch >= limit:
            self._settler.poll(wait=True)
            raise self._observer.on_limit(self.position.batch)

    def _raised(self) -> None:
        """A root's forward raised. With the outermost, what ran of the batch is judged, and the next forward begins anew."""
        self._roots -= 1
        if self._roots:
            return
        self._is_open = False
        self._recorder.forget()
        self.phase = "idle"
        if not self._off:
            self._settler.abandon(self._batch)

    def _settle_loose(self) -> None:
        loose = self._loose
        if loose.part.records:
            self._settler.close(loose)
        self._loose = BatchInProgress(self.position, self._steps.number, is_told=False)

    def _tell_rest(self) -> None:
        self._tell_backward()
        self._settle_loose()
        self._settler.poll(wait=True)

    def _tune(self) -> None:
        tuning = NO_CHANGE
        while self._tunings:
            tuning = tuning.then(self._tunings.popleft())
        if tuning.every is not None:
            self._every = tuning.every
        if tuning.trace_batch_nums is not None:
            self._trace_batch_nums = frozenset(tuning.trace_batch_nums)
        if tuning.check is not None:
            self._settler.poll(wait=True)
            self._settler.check = tuning.check
        if tuning.ignore is not None:
            self._settler.judge = Judge(self._config.policy, tuning.ignore)
        if tuning.modules is not None:
            self._hooks.select(_selector(tuning.modules))

    # --- backward and the optimizer -----------------------------------------------------------------------------------

    def _is_recomputing(self) -> bool:
        """Whether a forward that runs now is the recomputation of a checkpoint."""
        return backward.is_running() and not self._roots

    def _recompute(self, named: NamedModule, args: Any, kwargs: Any, output: Any) -> None:
        self._record_behind(self._recorder.call(self._behind.position, named, Phase.RECOMPUTE, args, kwargs, output))
        if self._config.gradients:
            self._watch_gradients(named, args, kwargs, output, self._behind)

    def _record_behind(self, record: Record) -> None:
        """Adds a frame to the batch whose backward is running."""
        if self._behind not in self._behinds:
            self._behind.is_absorbed, self._behind.loss_scale = self._loss_scale.absorbs(), self._loss_scale.scale
            self._behinds.append(self._behind)
        self._behind.add(record)
        self._settler.frame(record, self._behind.part, None)
        if self._behind.position[:2] == self.position[:2]:
            self.position = self._behind.position

    def _watch_backward(self, output: Any, batch: BatchInProgress) -> None:
        def reached() -> None:
            self._behind = batch

        if batch.is_told and torch.is_grad_enabled():
            backward.mark_outputs(output, self._guarded(reached))

    def _watch_gradients(self, named: NamedModule, args: Any, kwargs: Any, output: Any, batch: BatchInProgress) -> None:
        if not (torch.is_grad_enabled() and batch.is_told):
            return

        def emit(named: NamedModule, rows: tuple[ReadingSpec, ...], cells: list[Cell]) -> None:
            self._behind = batch
            self._gradients(named, rows, cells)

        backward.watch_call(named, args, kwargs, output, self._recorder.cell, self._guarded(emit))
        self._parameters.watch(named)

    def _gradients(self, named: NamedModule, rows: tuple[ReadingSpec, ...], cells: list[Cell]) -> None:
        if self.abort is not None:
            raise self.abort()
        if not self._off and self._behind.is_full:
            self._record_behind(self._recorder.cells(self._behind.position, named, Phase.BACKWARD, rows, cells))

    def _tell_backward(self) -> None:
        """The backward of the last batch, or batches, is over: an optimizer step or the next forward begins."""
        self._recorder.forget()
        while self._behinds:
            batch = self._behinds[0]
            try:
                if batch.part.records:
                    self._settler.close(batch)
            finally:
                self._behinds.remove(batch)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._guarded(self._judge_step)(optimizer)
        if self._is_stopping and self._steps.is_ours(optimizer):
            optimizer.zero_grad(set_to_none=True)  # without gradients it leaves the weights alone

    def _judge_step(self, optimizer: Optimizer) -> None:
        if self.abort is not None:
            raise self.abort()
        if self._off or not self._steps.is_ours(optimizer):
            return
        self.phase = "optimizer"
        if self._config.gradients and self._behind.is_told and self._behind.is_full:
            self._parameters.sweep(self._hooks.watched)
        self._tell_backward()
        self._settle_loose()
        self._settler.poll()

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.phase = "idle"
        self._steps.count(optimizer)


class _LeavingRoot:
    """The root's forward ends, and with the outermost of them the batch, whatever its judgement raises."""

    def __init__(self, detector: Detector) -> None:
        self._detector = detector
        self._ends_batch = detector._roots == 1
        detector._roots = max(0, detector._roots - 1)

    def __enter__(self) -> bool:
        return self._ends_batch

    def __exit__(self, *error: object) -> None:
        if not self._detector._roots:
            self._detector._recorder.forget()
        if self._ends_batch:
            self._detector._is_open = False


def _selector(patterns: tuple[str, ...]) -> Callable[[str], bool]:
    return lambda name: not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)


def _default_check(model: nn.Module) -> Check:
    """Where reading a number stops the device for it, numbers are read once a batch."""
    parameter = next(model.parameters(), None)
    return Check.FRAME if parameter is None or parameter.device.type in ("cpu", "meta") else Check.BATCH
