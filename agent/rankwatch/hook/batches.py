"""Which batch is open, and which batch a frame belongs to: between the hooks and the settler."""

from __future__ import annotations

from ..judge.batch import BatchInProgress
from ..judge.settler import Settler
from ..measure.recorder import Call, PendingFrame, Recorder
from ..shared.config import Config
from ..shared.frame import NOWHERE, Position
from .scaler import LossScale
from .stage import is_rehearsal
from .steps import OptimizerSteps

LOOSE_FRAMES = 256
"""Frames outside of any batch are judged together when this many have come, unless each is judged as it comes."""


class Batches:
    """The batches of one model. ``position`` is the position of the next frame.

    ``current`` is the batch whose forward runs, or ran last; frames belong to it while ``is_open``, else they are loose.
    ``of_backward`` is the batch whose backward runs, or ran last.
    """

    def __init__(
        self, config: Config, settler: Settler, recorder: Recorder, loss_scale: LossScale, steps: OptimizerSteps
    ) -> None:
        self.position = NOWHERE._replace(batch=config.first_batch - 1)
        self.phase = "idle"
        self.every = config.every
        self.trace_batch_nums = config.trace_batch_nums
        self.current = self._loose = BatchInProgress(self.position, 0, is_streamed=False)
        self.is_open = False
        self.of_backward = self.current
        self._backwards: list[BatchInProgress] = []  # batches whose backward has frames, and is not closed
        self._settler = settler
        self._recorder = recorder
        self._loss_scale = loss_scale
        self._steps = steps

    @property
    def progress(self) -> Position:
        """The position before which this rank is known to have no trip. For any thread."""
        position = self.position  # read first: the training thread moves it on
        waiting = self._settler.waiting
        if waiting is not None:
            return waiting.trip.position
        return self._settler.unsettled((self.current, self._loose, *self._backwards)) or position

    def open(self, is_training: bool) -> None:
        """A forward of the root begins: its frames belong to the next batch, or to the next eval."""
        self.current = self._next(is_training)
        if is_training or self.current.is_rehearsal:
            self.of_backward = self.current
        self.is_open = True
        self.phase = "forward"
        self._recorder.begin(self._steps.done)

    def end(self) -> None:
        """The forward has returned; frames belong to the batch until ``is_open`` is set to False."""
        batch = self.current
        self.phase = "backward" if batch.is_streamed else "idle"
        self._settler.close(batch)

    def abandon(self, *, is_judged: bool) -> None:
        """The forward has raised. ``is_judged``: the frames that ran are judged."""
        self.is_open = False
        self._recorder.forget()
        self.phase = "idle"
        if is_judged:
            self._settler.abandon(self.current)

    def add(self, frame: PendingFrame, call: Call | None) -> None:
        """Adds a frame of a forward."""
        into = self.current if self.is_open else self._loose
        if into.is_rehearsal:
            return
        into.add(frame)
        self._settler.add(frame, into.part, call)
        self.position = into.position
        if into is self._loose and len(into.part.frames) >= LOOSE_FRAMES:
            self._settle_loose()

    def add_backward(self, frame: PendingFrame) -> None:
        """Adds a frame to the batch whose backward runs."""
        batch = self.of_backward
        if batch not in self._backwards:
            batch.is_absorbed, batch.loss_scale = self._loss_scale.absorbs(), self._loss_scale.scale
            self._backwards.append(batch)
        batch.add(frame)
        self._settler.add(frame, batch.part, None)
        if batch.position[:2] == self.position[:2]:
            self.position = batch.position

    def begin_backward(self, batch: BatchInProgress) -> None:
        self.of_backward = batch

    def settle(self, *, wait: bool = False) -> None:
        """The next forward or an optimizer step begins: the backward of the last batch, or batches, is over."""
        self._close_backwards()
        self._settle_loose()
        self._settler.poll(wait=wait)

    def _next(self, is_training: bool) -> BatchInProgress:
        if is_rehearsal():
            return BatchInProgress(self.position, self._steps.number, is_rehearsal=True)
        batch, evaluation, _ = self.position
        self.position = Position(batch + 1, 0, 0) if is_training else Position(batch, evaluation + 1, 0)
        traced = is_training and self.position.batch in self.trace_batch_nums
        is_full = traced or not is_training or self.position.batch % self.every == 0
        return BatchInProgress(self.position, self._steps.number, traced=traced, is_full=is_full)

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
