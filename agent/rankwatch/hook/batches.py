"""Which batch is open, and which batch a frame belongs to: between the hooks and the settler.

A forward of the root in training mode, with gradients, is a batch. Of the other forwards with gradients, those are batches
that a backward follows: forwards of a root in eval mode, and direct calls of the model's modules, in a training that never
calls the root. Such a batch is unsure at first. Its frames are judged as always, but are held until a backward reaches them.
If none does, they are never sent: it was an evaluation.

An unsure batch that begins in the style of the last batch, or before there was any, has the next number from its start. It
keeps this number, whatever runs until a backward comes: the next unsure forward has it, too. Since positions must not go
back, the first time its frames are counted on; from then on ``position`` waits at the start of unsure batches.
An unsure batch in another style has the position of an eval, or of loose frames, until a backward reaches it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..judge.batch import USUAL, BatchInProgress, BatchPart, Style
from ..judge.optimizer_steps import OptimizerSteps
from ..judge.settler import Settler
from ..measure.modules import NamedModule
from ..measure.recorder import Call, CompiledCall, PendingFrame, Recorder
from ..rerun.forward import RootEntry
from ..rerun.loss_graph import LossOrigin
from ..shared.types.config import Config
from ..shared.types.frame import NO_NORM, NOWHERE, Kind, Moment, Phase, Position
from ..shared.types.tuning import Tuning
from ..touch.torch_private import graph_task
from .stage import is_rehearsal
from .step.scaler import LossScales

LOOSE_FRAMES = 256
"""Frames outside of any batch are judged together when this many have come, unless each is judged as it comes."""

DIRECT_FRAMES = 4096
"""Frames of direct calls are judged together when this many have come without a backward."""


class Batches:
    """The batches of one model. ``position`` is where this rank is; all before it is known to have run.

    ``current`` is the batch whose root forward runs, or ran last; frames belong to it while ``is_open``.
    ``is_direct``: direct calls belong to an unsure batch. ``of_backward`` is the batch whose backward runs, or ran last.

    Args:
        sends_at_once: see ``Detector``.
    """

    def __init__(
        self,
        config: Config,
        settler: Settler,
        recorder: Recorder,
        loss_scales: LossScales,
        steps: OptimizerSteps,
        *,
        sends_at_once: bool,
    ) -> None:
        self.position = NOWHERE._replace(batch=config.first_batch - 1)
        self.phase = "idle"
        self.every = config.every
        self.trace_batch_nums = config.trace_batch_nums
        self.current = self._loose = BatchInProgress(self.position, 0, is_streamed=False)
        self.is_open = False
        self.is_direct = False
        self.of_backward = self.current
        self._root_frame = 0  # the number of the root's frame in the last forward that was measured in full
        self._backwards: list[BatchInProgress] = []  # batches whose backward has frames, and is not closed
        self._unsure: BatchInProgress | None = None  # the last unsure batch
        self._unsure_part: BatchPart | None = None  # its last forward, until an optimizer step
        self._is_waiting = False  # whether ``position`` waits: unsure forwards were seen that had no backward
        self._awaits_backward = False  # whether neither a backward nor a step came after the forward of a sure batch
        self._compiled_entry: RootEntry | None = None  # of a compiled root that runs
        self._compiled_part: BatchPart | None = None
        self.norm: Callable[[], float] = lambda: NO_NORM  # of the gradients of the last optimizer step
        self._style: Style | None = None  # how the last sure batch began
        self._last_step = -1  # the optimizer steps done when it began
        self._last_backward = -1  # the backward that made it sure
        self._settler = settler
        self._recorder = recorder
        self._loss_scales = loss_scales
        self._steps = steps
        self._sends_at_once = sends_at_once

    @property
    def progress(self) -> Moment:
        """The moment before which this rank is known to have no trip. For any thread."""
        # Read first, and the step before the position: the training thread moves both on. The last batch has the highest step.
        step = max(batch.optimizer_step for batch in (self.current, self.of_backward, self._unsure or self.current))
        position = self.position
        waiting = self._settler.waiting
        if waiting is not None:
            return Moment(waiting.trip.optimizer_step, *waiting.trip.position)
        unsettled = self._settler.unsettled((self.current, self._unsure or self._loose, self._loose, *self._backwards))
        return unsettled or Moment(step, *position)

    @property
    def of_forward(self) -> BatchInProgress:
        """The batch whose forward runs, or ran last: by direct calls, or by the root."""
        return self._unsure if self.is_direct and self._unsure is not None else self.current

    @property
    def next(self) -> Position:
        """The position of the next frame of a forward."""
        return self.of_forward.position if self.is_open or self.is_direct else self.position

    def tune(self, tuning: Tuning) -> None:
        """Changes options from the next forward on."""
        if tuning.every is not None:
            self.every = tuning.every
        if tuning.trace_batch_nums is not None:
            self.trace_batch_nums = frozenset(tuning.trace_batch_nums)

    # --- forwards -----------------------------------------------------------------------------------------------------

    def open(self, style: Style | None) -> None:
        """A forward of the root begins: its frames belong to the next batch; with style None, to the next eval."""
        if is_rehearsal():
            self.current = self.of_backward = BatchInProgress(self.position, self._steps.number, is_rehearsal=True)
        elif style is None:
            self._close_direct()
            self.current = self._next_eval()
        elif style == USUAL:
            self.current = self.of_backward = self._next_sure()
        else:
            self._close_direct()
            self.current = self._next_unsure(style)
        self.is_open = True
        self.phase = "forward"
        self._recorder.begin(self._steps.done, self.position.batch)

    def enter(self, named: NamedModule, args: Any, kwargs: Any) -> None:
        """What the root is given is evidence; the root's own frame is the last one of the batch: too late."""
        self.current.began, self.current.is_run_again = self.current.position, False
        self.current.root_inputs = self._recorder.inputs(self.next, named, args, kwargs)
        self.current.entry = RootEntry(named.module, args, kwargs)

    def given(self, root: nn.Module, args: Any, kwargs: Any) -> None:
        """A forward of a compiled root begins."""
        self._compiled_entry = RootEntry(root, args, kwargs)

    def enter_compiled(self) -> None:
        """The graph of the root begins."""
        self.current.began, self.current.is_run_again = self.current.position, False
        self.current.entry, self._compiled_part = self._compiled_entry, self.current.part
        self.current.is_compiled = True

    def compiled_given(self, call: CompiledCall) -> None:
        """The graph of the root has these readings of what it was given."""
        self.current.root_inputs = self._recorder.cells(self.current.began, call.named, Phase.FORWARD, call.rows, call.cells)

    def returned(self) -> tuple[BatchPart, RootEntry] | None:
        """A forward of a compiled root has returned; None: its graph was not ours, or none ran."""
        part, entry = self._compiled_part, self._compiled_entry
        self._compiled_part = self._compiled_entry = None
        return None if part is None or entry is None else (part, entry)

    @property
    def is_given(self) -> bool:
        """Whether it is known what the compiled root that runs was given."""
        return self._compiled_entry is not None

    def is_opened_by_direct(self, style: Style) -> bool:
        """Whether a direct call with gradients begins a batch: not if it belongs to the batch of the calls before."""
        is_next = self.is_direct and self._unsure is not None and self._unsure.style == style
        return not self._awaits_backward and not is_next

    def open_direct(self, style: Style) -> None:
        self._close_direct()
        self._next_unsure(style)
        self.is_direct = True
        self.phase = "forward"
        self._recorder.begin(self._steps.done, self.position.batch)

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

    @property
    def may_rest(self) -> bool:
        """Whether only the root is looked at in the forward that runs. In the first batch, what is compiled gets our hooks."""
        return not self.current.is_full and self._root_frame > 0

    def end(self) -> None:
        """The forward has returned; frames belong to the batch until ``is_open`` is set to False."""
        batch = self.current
        if batch.is_full and batch.is_streamed and not batch.part.first.frame:
            self._root_frame = batch.position.frame - 1
        self.phase = "backward" if batch.is_streamed and batch.is_sure else "idle"
        self._settler.close(batch, awaits_loss=batch.is_streamed and not self._sends_at_once)

    def abandon(self, *, is_judged: bool, runs_again: bool) -> None:
        """The forward has raised. ``is_judged``: the frames that ran are judged; ``runs_again``: also those of a rerun."""
        self.is_open = self._awaits_backward = False
        self._recorder.forget()
        self.phase = "idle"
        if is_judged:
            self._settler.abandon(self.current, runs_again=runs_again)

    def interrupted(self, *, is_judged: bool) -> None:
        """The forward has ended anywhere, perhaps within a hook of ours."""
        self._compiled_part = self._compiled_entry = None
        self.abandon(is_judged=is_judged, runs_again=False)
        self._recorder.restart()

    def add(self, frame: PendingFrame, call: Call | None) -> None:
        """Adds a frame of a forward."""
        into = self.current if self.is_open else self.of_forward if self.is_direct else self._loose
        if into.is_rehearsal:
            return
        if self._recorder.reductions:
            frame.reductions = self._recorder.take_reductions()
        into.position = frame.position
        into.add(frame)
        self._settler.add(frame, into.part, call)
        # A tensor that is marked in a forward of which only the root is measured does not show what came before it.
        is_early = not into.is_full and self.is_open and frame.spec.readings[0].kind is Kind.MARKED
        if not is_early and not self._position_waits:
            self.position = into.position
        if into is self._loose and len(into.part.frames) >= LOOSE_FRAMES:
            self._settle_loose()
        elif self.is_direct and not self.is_open and len(into.part.frames) >= DIRECT_FRAMES:
            self._settler.close(into)
            self._unsure_part = into.part

    def add_compiled(self, frames: list[PendingFrame]) -> None:
        """Adds frames of a compiled graph: all at once where none of them has to be judged yet."""
        batch = self.current
        if self.is_open and batch.is_full and not self._position_waits and self._settler.need_no_look(frames, batch.part):
            frames[0].reductions = self._recorder.take_reductions()
            batch.add(*frames)
            self.position = batch.position
        else:
            for frame in frames:
                self.add(frame, None)

    @property
    def _position_waits(self) -> bool:
        return self._is_waiting and self._unsure is not None and self._unsure.has_number

    def _next_sure(self) -> BatchInProgress:
        unsure, calls = self._unsure, Style(is_root=False, is_training=True)
        if unsure is None or not unsure.has_number:
            self._close_direct()
            batch = self._numbered(USUAL)
        else:
            if unsure.style != calls or unsure.optimizer_step != self._steps.number:
                self._close_direct()
            else:  # the direct calls before this forward are a part of its batch
                self.position = max(unsure.position, self.position)
            batch = self._resume(unsure, USUAL)
        self._be_sure(batch)
        self._awaits_backward = True
        return batch

    def _next_unsure(self, style: Style) -> BatchInProgress:
        batch = self._unsure
        if batch is not None and batch.has_number:
            self._is_waiting = True
            batch = self._resume(batch, style)
        elif self._style in (None, style):
            batch = self.of_backward = self._numbered(style)
        else:
            if style.is_root:
                self._begin_eval()
            batch = BatchInProgress(self.position, self._steps.number, style=style, is_sure=False)
            batch.has_number, batch.norm = False, self.norm
        self._unsure, self._unsure_part = batch, batch.part
        return batch

    def _numbered(self, style: Style) -> BatchInProgress:
        number = self.position.batch + 1
        self.position = Position(number, 0, 0)
        traced = number in self.trace_batch_nums
        is_full = traced or number % self.every == 0
        batch = BatchInProgress(
            self.position, self._steps.number, style=style, is_sure=style == USUAL, traced=traced, is_full=is_full
        )
        batch.norm = self.norm
        return batch

    def _resume(self, batch: BatchInProgress, style: Style) -> BatchInProgress:
        """No backward has reached the unsure batch: what begins now has its number."""
        batch.position, batch.optimizer_step, batch.norm = self.position, self._steps.number, self.norm
        batch.style, batch.is_compiled = style, False
        return batch

    def _next_eval(self) -> BatchInProgress:
        if self._unsure is None or not self._unsure.has_number:
            self._begin_eval()
        return BatchInProgress(self.position, self._steps.number, is_streamed=False)

    def _begin_eval(self) -> None:
        batch, evaluation, _ = self.position
        self.position = Position(batch, evaluation + 1, 0)

    # --- backwards and optimizer steps --------------------------------------------------------------------------------

    def reached(self, part: BatchPart) -> None:
        """A backward has reached what the forward of this part returned."""
        batch = part.batch
        if part.is_held:
            is_further = batch.is_sure  # several forwards with one backward are one batch
            if is_further:
                self._is_waiting = False
            else:
                self._be_sure(batch)
            if is_further or part.first[:2] != batch.position[:2]:
                self._move(part)
            part.is_held = False  # last: an interruption before this leaves it to the step
            if part is batch.part:
                self._settler.close(batch, awaits_loss=not self._sends_at_once)
            else:
                self._settler.release(part)
        self.begin_backward(batch)

    def begin_backward(self, batch: BatchInProgress) -> None:
        self.of_backward = batch
        if batch.position is not self.position and batch.position[:2] == self.position[:2]:
            batch.position = self.position = max(batch.position, self.position)
        if batch is self.current:
            self._awaits_backward = False
        self.phase = "backward"

    def unsure_before(self, optimizer: Optimizer) -> BatchPart | None:
        """The unsure forward from which an optimizer learns: the last one, if no batch was sure since its last step."""
        return self._unsure_part if self._last_step < self._steps.of(optimizer) else None

    @property
    def unsure_part(self) -> BatchPart | None:
        """The unsure forward that a backward now belongs to, if no hook tells which one it reaches."""
        return self._unsure_part if self._unsure is self.of_backward else None

    @property
    def awaits_backward(self) -> bool:
        """Whether a forward has no backward yet."""
        return self._awaits_backward or self.unsure_part is not None

    def before_step(self) -> None:
        """An optimizer of the model is about to step."""
        self.phase = "optimizer"
        self._awaits_backward = False
        self._close_direct()
        self._unsure_part = None
        self.settle()

    def add_backward(self, frame: PendingFrame) -> None:
        """Adds a frame to the batch whose backward runs."""
        batch = self.of_backward
        if batch not in self._backwards:
            self._backwards.append(batch)
        if self._recorder.reductions:
            frame.reductions = self._recorder.take_reductions()
        if frame.spec.phase is Phase.BACKWARD:
            batch.scaling = batch.scaling or self._loss_scales.scaling(self._loss_scales.last())
            frame.is_absorbed = batch.scaling.absorbs
        batch.add(frame)
        self._settler.add(frame, batch.part, None)
        self._move_on(batch)

    def add_loss(self, frame: PendingFrame, values: list[Tensor], origin: LossOrigin | None) -> None:
        """Adds the frame of a loss to the batch whose backward runs: to its forward, while that is not sent yet."""
        batch = self.of_backward
        if self._settler.awaits_loss_of(batch):
            self._settler.add_loss(frame, values, origin)
            batch.pass_frames()
            self._move_on(batch)
        else:
            batch.part.loss_origin = batch.part.loss_origin or origin
            self.add_backward(frame)

    def _be_sure(self, batch: BatchInProgress) -> None:
        backward, unsure = graph_task(), self._unsure
        if not batch.has_number:
            is_further = backward == self._last_backward != -1 or (unsure is not None and unsure.has_number)
            if not is_further:
                self.position = Position(self.position.batch + 1, 0, 0)
            batch.position, batch.has_number = self.position, True
        elif batch.style != USUAL:
            self.position = max(batch.position, self.position)
        # Before the batch is sure: if this is interrupted, no later forward may have the number of a sure one.
        if unsure is batch or (unsure is not None and not unsure.has_number):
            self._unsure = self._unsure_part = None
            self.is_direct = False
        batch.is_sure, batch.part.is_held = True, False
        self._style, self._last_step, self._last_backward = batch.style, self._steps.done, backward

    def _move(self, part: BatchPart) -> None:
        """Gives the frames of a part new positions, in its batch."""
        batch = part.batch
        for frame in part.frames:
            frame.position = batch.position
            batch.position = batch.position._replace(frame=batch.position.frame + 1)
        if batch.position[:2] == self.position[:2]:
            self.position = batch.position

    # --- the end of parts ---------------------------------------------------------------------------------------------

    def settle(self, *, wait: bool = False) -> None:
        """The next forward or an optimizer step begins: the backward of the last batch, or batches, is over."""
        self._settler.drop_interrupted()
        self._settler.expect_no_loss()
        self._close_backwards()
        self._settle_loose()
        self._settler.poll(wait=wait)

    def _close_direct(self) -> None:
        """The direct calls are over, without a backward."""
        batch, was_direct, self.is_direct = self._unsure, self.is_direct, False
        if was_direct and batch is not None and batch.part.frames:
            self._settler.close(batch)

    def _move_on(self, batch: BatchInProgress) -> None:
        if batch.position[:2] == self.position[:2]:
            self.position = batch.position

    def _settle_loose(self) -> None:
        loose = self._loose
        if loose.part.frames:
            self._settler.close(loose)
        self._loose = BatchInProgress(self.position, self._steps.number, is_streamed=False)

    def _close_backwards(self) -> None:
        self._recorder.forget()
        while self._backwards:
            batch = self._backwards[0]
            try:
                if batch.part.frames:
                    self._settler.close(batch)
            finally:
                self._backwards.remove(batch)
