"""Batches, frames, the ring of last frames, and the judgement of each frame: what the hooks do. The hot path.

Whatever goes wrong in here is logged once and switches the detector off: it never stops a healthy training.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .batch import BatchInProgress, Tables
from .config import Config
from .errors import TrainingAborted
from .frame import NOWHERE, BatchSummary, Frame, FrameTable, Kind, Position, Reading
from .hooks import Hooks
from .measure import Counts, count_non_finite
from .modules import NamedModule
from .recorder import Ingredient, Recorder, ingredients, inputs
from .trip import Judge, Trip

log = logging.getLogger(__name__)


class Finding(NamedTuple):
    """A tripping reading of a frame, counted."""

    label: str
    nans: int
    infs: int


class Observer(Protocol):
    """What the detector tells, in the training thread. The exceptions that are returned are raised in the training.

    A trip is first told by ``on_found``, before anything that shows this rank further on; ``on_trip`` then asks what to raise.
    """

    def on_batch(self, table: FrameTable, summary: BatchSummary) -> None: ...
    def on_trace(self, frames: list[Frame]) -> None: ...
    def on_found(self, trip: Trip) -> None: ...
    def on_trip(self, trip: Trip, findings: list[Finding]) -> TrainingAborted: ...
    def on_limit(self, batch: int) -> TrainingAborted: ...


class Detector:
    """Watches ``model`` until ``remove``. ``progress``, ``phase`` and ``abort`` may be used from other threads.

    Args:
        count_all: count every root forward as a batch, not only those in training mode, and file a module that is called
            between two batches under the second, not the first (the Hugging Face way).
        judge_traced: judge traced batches too, once they are traced to their end (the Hugging Face detector does not).
    """

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        observer: Observer,
        *,
        count_all: bool = False,
        judge_traced: bool = True,
    ) -> None:
        self.position = NOWHERE
        self.phase = "idle"
        self.abort: Callable[[], TrainingAborted] | None = None
        """Set from outside to stop the training: the next hook raises what it returns."""

        self._config = config
        self._observer = observer
        self._count_all = count_all
        self._judge_traced = judge_traced
        self._judge = Judge(config.policy, config.ignore)
        self._recorder = Recorder()
        self._tables = Tables()
        self._ring: deque[Frame] = deque(maxlen=config.max_frames_to_save)
        self._steps = OptimizerSteps(model)
        self._off = False
        self.fault = ""
        """The error of ours that switched the detector off."""

        self._stack: list[NamedModule] = []
        self._thread = 0
        self._roots = 0  # root forwards running: more than one when the root calls itself
        self._raised_before: BaseException | None = None
        self._root_inputs: tuple[Reading, ...] = ()
        self._batch = BatchInProgress(self.position, 0, traced=False)
        self._is_open = False  # whether frames belong to the batch in progress
        self._waiting: tuple[Trip, list[Finding]] | None = None  # a trip that is raised later than it was found

        self._hooks = Hooks(
            model,
            self._guarded,
            enter=self._enter,
            leave=self._leave,
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
        waiting = self._waiting
        return self.position if waiting is None else waiting[0].position

    def remove(self) -> None:
        """Takes all hooks away; the model is as it was. Hands out what a forward that raised had traced."""
        self._off = True
        self._hooks.remove()
        self._flush_trace()

    def is_inside(self) -> bool:
        """Whether the calling thread is inside a watched forward."""
        return bool(self._stack) and self._thread == threading.get_ident() and not self._off

    def mark(self, tensor: Tensor, label: str) -> None:
        """Records a tensor the user pointed at as a frame of its own, in the name of the running module."""
        self._guarded(self._frame)(self._stack[-1], [Ingredient(Kind.MARKED, label, tensor)])

    def _guarded(self, body: Callable[..., None]) -> Callable[..., None]:
        """``body`` as a hook that fails open."""

        @wraps(body)
        def hook(*args: Any) -> None:
            try:
                body(*args)
            except TrainingAborted:
                raise
            except Exception as error:
                self._off = True
                self.fault = f"switched itself off in batch {self.position.batch} by an error of its own: {error!r}"
                log.exception("rankwatch: %s", self.fault)

        return hook

    # --- hooks --------------------------------------------------------------------------------------------------------

    def _enter(self, named: NamedModule, args: Any, kwargs: Any) -> None:
        self._raise_abort()
        if self._off or self._is_elsewhere():
            return
        is_root = named.module is self.root
        if not self._is_open and (is_root or self._count_all):
            self._begin_batch()
        if is_root and not self._roots:
            # What the root was fed is evidence that the root's own frame, the last one, would bring too late.
            self._root_inputs = tuple(self._recorder.readings(list(inputs(args, kwargs))))
            self._raised_before = sys.exc_info()[1]
        self._roots += is_root
        self._raise_marked()
        self._stack.append(named)

    def _leave(self, named: NamedModule, args: Any, kwargs: Any, output: Any) -> None:
        is_root = named.module is self.root
        if is_root and output is None and sys.exc_info()[1] is not self._raised_before:
            self._abandon_batch()
            return
        self._raise_abort()
        if self._off or self._is_elsewhere() or not self._stack:
            return
        self._raise_marked()
        # A module whose forward raised, and was caught by the user's code, was never popped.
        while self._stack and self._stack.pop() is not named:
            pass
        self._roots -= is_root
        try:
            self._frame(named, ingredients(named.module, args, kwargs, output))
            if is_root and not self._roots:
                self._end_batch()
        finally:
            if not self._roots:
                self._recorder.forget()
                self._is_open = self._is_open and not is_root

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._raise_abort()
        self.phase = "optimizer"

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.phase = "idle"
        self._steps.count(optimizer)

    def _is_elsewhere(self) -> bool:
        """Whether this is another thread than the one whose root forward is running."""
        current = threading.get_ident()
        if current == self._thread:
            return False
        if self._roots:
            return True
        self._thread = current
        self._stack.clear()
        return False

    # --- batches ------------------------------------------------------------------------------------------------------

    def _begin_batch(self) -> None:
        self._flush_trace()
        batch, evaluation, _ = self.position
        if self._count_all or (self.root.training and torch.is_grad_enabled()):
            self.position = Position(batch + 1, 0, 0)
        else:
            self.position = Position(batch, evaluation + 1, 0)
        traced = self.position.eval == 0 and self.position.batch in self._config.trace_batch_nums
        self._batch = BatchInProgress(self.position, self._steps.done, traced)
        self._stack.clear()
        self._waiting = None
        self._root_inputs = ()
        self._is_open = True
        self.phase = "forward"
        self._recorder.forget()

    def _end_batch(self) -> None:
        is_batch = self.position.eval == 0
        self.phase = "backward" if is_batch else "idle"
        self._flush_trace()
        waiting, self._waiting = self._waiting, None
        if waiting is not None and self._batch.traced:
            self._observer.on_found(waiting[0])
        if is_batch:
            self._observer.on_batch(*self._batch.finish(self._tables))
        if waiting is not None:
            raise self._observer.on_trip(*waiting)
        limit = self._config.abort_after_batch_num
        if limit is not None and is_batch and self.position.batch >= limit:
            raise self._observer.on_limit(self.position.batch)

    def _abandon_batch(self) -> None:
        """The root's forward raised: what ran of it stays in the ring, and the next forward begins anew."""
        self._stack.clear()
        self._roots = 0
        self._is_open = False
        self._recorder.forget()
        self.phase = "idle"
        self._flush_trace()
        waiting, self._waiting = self._waiting, None
        if waiting is not None and self._batch.traced:
            self._observer.on_found(waiting[0])  # the exception on its way is the user's; the verdict is ours all the same

    def _flush_trace(self) -> None:
        if self._batch.trace:
            trace, self._batch.trace = self._batch.trace, []
            self._observer.on_trace(trace)

    # --- frames -------------------------------------------------------------------------------------------------------

    def _frame(self, named: NamedModule, found: list[Ingredient]) -> None:
        frame = self._recorder.frame(self.position, named, found)
        tripping = self._tripping(frame)
        if tripping:
            # As evidence nothing counts that was measured earlier: x.data.mul_() changes a tensor behind autograd's back.
            self._recorder.forget()
            frame = self._recorder.frame(self.position, named, found)
        self._ring.append(frame)
        if self._is_open:
            self._batch.add(frame)
        if tripping:
            self._trip(found, tripping)
        batch, evaluation, done = self.position
        self.position = Position(batch, evaluation, done + 1)

    def _tripping(self, frame: Frame) -> list[int]:
        is_judged = self._judge_traced or not (self._is_open and self._batch.traced)
        return self._judge.tripping(frame.spec, frame.states) if is_judged else []

    def _trip(self, found: list[Ingredient], tripping: list[int]) -> None:
        first = min(tripping, key=lambda row: (_CAUSAL_ORDER.index(found[row].kind), row))
        counts = {row: _counts(found[row].value) for row in tripping}
        trip = Trip(
            position=self.position,
            reading=first,
            frames=tuple(self._ring),
            root_inputs=self._root_inputs,
            optimizer_step=self._batch.optimizer_step,
            shape=counts[first].shape,
            numel=counts[first].numel,
            nan_count=counts[first].nans,
            inf_count=counts[first].infs,
            time=time.time(),
        )
        tripped = trip, [Finding(found[row].label, counts[row].nans, counts[row].infs) for row in tripping]
        if self._is_open and self._batch.traced:
            self._waiting = self._waiting or tripped  # a traced batch is traced to its end, and only then told
            return
        self._observer.on_found(trip)
        if found[first].kind is Kind.MARKED:
            self._waiting = self._waiting or tripped  # detect_overflow returns to its caller, and the next hook raises
        else:
            raise self._observer.on_trip(*tripped)

    def _raise_abort(self) -> None:
        if self.abort is not None:
            raise self.abort()

    def _raise_marked(self) -> None:
        if self._waiting is not None and not (self._is_open and self._batch.traced):
            tripped, self._waiting = self._waiting, None
            raise self._observer.on_trip(*tripped)


def _counts(value: Any) -> Counts:
    try:
        return count_non_finite(value)
    except RuntimeError as error:  # out of memory, say: the trip counts for more than its counts
        log.debug("cannot count what is not finite: %s", error)
        return Counts(tuple(getattr(value, "shape", ())), 0, 0, 0)


_CAUSAL_ORDER = (Kind.PARAMETER, Kind.MARKED, Kind.OUTPUT, Kind.INPUT, Kind.KEYWORD, Kind.BUFFER)
"""Of several tripping readings the first in this order is named: a bad weight explains a bad output."""


class OptimizerSteps:
    """Counts the steps of the optimizers that hold a parameter of the model."""

    def __init__(self, model: nn.Module) -> None:
        self.done = 0
        self._model = model
        self._steps: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()

    def count(self, optimizer: Optimizer) -> None:
        if optimizer not in self._steps and not self._is_ours(optimizer):
            return
        # Several optimizers may share out the parameters: one step of each of them is one step of the training.
        self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        self.done = max(self.done, self._steps[optimizer])

    def _is_ours(self, optimizer: Optimizer) -> bool:
        ours = {id(parameter) for parameter in self._model.parameters()}
        return any(id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"])
