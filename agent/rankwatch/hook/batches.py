"""Frames -> the batch that they belong to: has ``lifecycle`` decide, and does what it decides."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..judge.batch import BatchPart, no_norm
from ..judge.events import (
    BackwardReached,
    DirectCall,
    Feed,
    ForwardComes,
    Interrupted,
    PartIsFull,
    RootBegan,
    RootLeft,
    RootRaised,
    RootReturned,
    StepBegins,
    TuningCame,
)
from ..judge.lifecycle import Abandon, Begin, Close, Effect, Event, Forget, Life, NoLossComes, Poll, Release
from ..judge.settler import Settler
from ..judge.steps.optimizer_steps import OptimizerSteps
from ..measure.modules import NamedModule
from ..measure.recorder import Call, CompiledCall, PendingFrame, Recorder
from ..rerun.forward import RootEntry
from ..rerun.loss_graph import LossOrigin
from ..shared.types.frame import Kind, Phase
from ..shared.types.tuning import Tuning
from ..touch.torch_private import graph_task
from .step.scaler import LossScales


class Batches:
    """The batches of one model: adds frames, hands events to ``life``, and does what it answers.

    An effect may raise, a trip for instance. What was to be done after it is done with the next event.
    """

    events = (
        TuningCame, ForwardComes, RootBegan, DirectCall, RootReturned, RootLeft, RootRaised, Interrupted, BackwardReached,
        StepBegins,
    )  # fmt: skip

    def __init__(
        self, life: Life, settler: Settler, recorder: Recorder, loss_scales: LossScales, steps: OptimizerSteps, feed: Feed
    ) -> None:
        self.life = life
        self.norm: Callable[[], float] = no_norm
        """The norm of the gradients of the last optimizer step."""
        self._settler = settler
        self._recorder = recorder
        self._loss_scales = loss_scales
        self._steps = steps
        self._feed = feed
        self._to_do: deque[Effect] = deque()
        self._compiled_entry: RootEntry | None = None
        """What a compiled root that runs was given."""
        self._compiled_part: BatchPart | None = None

    # --- events -------------------------------------------------------------------------------------------------------

    def on(self, event: Event | Interrupted | TuningCame) -> None:
        match event:
            case TuningCame(tuning):
                self._tune(tuning)
            case Interrupted():
                self._compiled_part = self._compiled_entry = None
            case ForwardComes() | StepBegins():
                self._do()
                self._settler.drop_interrupted()
                self._see(event)
            case RootBegan() | DirectCall():
                self._see(event)
                self.life.of_forward.norm = self.norm
            case BackwardReached(part):
                self._see(event)
                self.life.begin_backward(part.batch)
            case _:
                self._see(event)

    def reach(self, part: BatchPart) -> None:
        """A backward has reached what the forward of this part returned."""
        self._feed.tell(BackwardReached(part, graph_task(), self._steps.now, is_new=not part.batch.is_sure))

    def settle(self) -> None:
        """The backward of the last batch, or batches, is over, and all of it is to be judged."""
        self.on(ForwardComes(self._steps.now, waits=True))

    def _tune(self, tuning: Tuning) -> None:
        self.life.full.tune(tuning)
        if tuning.trace_batch_nums is not None:
            self.life.trace_batch_nums = frozenset(tuning.trace_batch_nums)

    def _see(self, event: Event) -> None:
        self._do()
        self._to_do.extend(self.life.handle(event))
        self._do()

    def _do(self) -> None:
        while self._to_do:
            match self._to_do.popleft():
                case Begin(batch):
                    self._recorder.begin(self._steps.done, batch)
                case Forget():
                    self._recorder.forget()
                case Close(part, awaits_loss):
                    self._settler.close(part, awaits_loss=awaits_loss)
                case Abandon(part, runs_again):
                    self._settler.abandon(part, runs_again=runs_again)
                case Release(part):
                    self._settler.release(part)
                case NoLossComes():
                    self._settler.expect_no_loss()
                case Poll(waits):
                    self._settler.poll(wait=waits)

    # --- what the root is given ---------------------------------------------------------------------------------------

    def enter(self, named: NamedModule, args: Any, kwargs: Any) -> None:
        """What the root is given is evidence; the root's own frame is the last one of the batch: too late."""
        batch = self.life.current
        batch.began, batch.is_run_again = batch.position, False
        batch.root_inputs = self._recorder.inputs(self.life.next, named, args, kwargs)
        batch.entry = RootEntry(named.module, args, kwargs)

    def given(self, root: nn.Module, args: Any, kwargs: Any) -> None:
        """A forward of a compiled root begins."""
        self._compiled_entry = RootEntry(root, args, kwargs)

    def enter_compiled(self) -> None:
        """The graph of the root begins."""
        batch = self.life.current
        batch.began, batch.is_run_again = batch.position, False
        batch.entry, self._compiled_part = self._compiled_entry, batch.part
        batch.is_compiled = True

    def compiled_given(self, call: CompiledCall) -> None:
        """The graph of the root has these readings of what it was given."""
        batch = self.life.current
        batch.root_inputs = self._recorder.cells(batch.began, call.named, Phase.FORWARD, call.rows, call.cells)

    def returned(self) -> tuple[BatchPart, RootEntry] | None:
        """A forward of a compiled root has returned; None: its graph was not ours, or none ran."""
        part, entry = self._compiled_part, self._compiled_entry
        self._compiled_part = self._compiled_entry = None
        return None if part is None or entry is None else (part, entry)

    @property
    def is_given(self) -> bool:
        """Whether it is known what the compiled root that runs was given."""
        return self._compiled_entry is not None

    # --- frames -------------------------------------------------------------------------------------------------------

    def add(self, frame: PendingFrame, call: Call | None) -> None:
        """Adds a frame of a forward."""
        life = self.life
        batch = life.take(frame)
        if batch is None:
            return
        if self._recorder.reductions:
            frame.reductions = self._recorder.take_reductions()
        self._settler.add(frame, batch.part, call)
        # A tensor that is marked in a forward of which only the root is measured does not show what came before it.
        is_early = not batch.is_full and life.is_open and frame.spec.readings[0].kind is Kind.MARKED
        if life.passed(batch, is_early=is_early):
            self._see(PartIsFull(batch, self._steps.now))

    def add_compiled(self, frames: list[PendingFrame]) -> None:
        """Adds frames of a compiled graph: all at once where none of them has to be judged yet."""
        life, batch = self.life, self.life.current
        is_simple = life.is_open and batch.is_full and not life.position_waits
        if is_simple and self._settler.need_no_look(frames, batch.part):
            frames[0].reductions = self._recorder.take_reductions()
            life.take_graph(frames)
        else:
            for frame in frames:
                self.add(frame, None)

    def add_backward(self, frame: PendingFrame) -> None:
        """Adds a frame to the batch whose backward runs."""
        batch = self.life.of_backward
        if self._recorder.reductions:
            frame.reductions = self._recorder.take_reductions()
        if frame.spec.phase is Phase.BACKWARD:
            batch.scaling = batch.scaling or self._loss_scales.scaling(self._loss_scales.last())
            frame.is_absorbed = batch.scaling.absorbs
        self.life.take_backward(frame)
        self._settler.add(frame, batch.part, None)
        self.life.move_on(batch)

    def add_loss(self, frame: PendingFrame, values: list[Tensor], origin: LossOrigin | None) -> None:
        """Adds the frame of a loss to the batch whose backward runs: to its forward, while that is not sent yet."""
        batch = self.life.of_backward
        if self._settler.awaits_loss_of(batch):
            self._settler.add_loss(frame, values, origin)
            batch.pass_frames()
            self.life.move_on(batch)
        else:
            batch.part.loss_origin = batch.part.loss_origin or origin
            self.add_backward(frame)
