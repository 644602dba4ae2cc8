"""What compiled graphs hand over -> frames, as from the hooks of modules that are not compiled."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from torch import nn

from ...measure.recorder import CompiledCall, Recorder
from ..batches import Batches
from ..gradients import Gradients
from ..running import RunningRoots
from .joined import BEGINNINGS, GIVEN, TRAIN
from .traced import Calls, Numbers


class Roots(Protocol):
    """What a forward of the root, or of one of its modules, means for the batches."""

    def enter_compiled(self, is_training: bool, has_gradients: bool) -> None:
        """A forward of the root begins."""

    def leaving_root(self) -> AbstractContextManager[bool]:
        """A forward of the root ends; yields whether the batch ends with it: then ``end_batch`` is called within."""

    def end_batch(self) -> None: ...

    def open_direct(self, has_gradients: bool) -> object:
        """A module was called by itself."""


class HandedCalls:
    """Takes the calls of hooks that a compiled graph hands over; see ``traced``.

    Args:
        root: the watched module.
        roots: what the calls of roots and of modules mean; see ``Roots``.
    """

    def __init__(
        self,
        root: nn.Module,
        running: RunningRoots,
        batches: Batches,
        recorder: Recorder,
        gradients: Gradients,
        roots: Roots,
    ) -> None:
        self._root = root
        self._running = running
        self._batches = batches
        self._recorder = recorder
        self._gradients = gradients
        self._roots = roots

    def take(self, calls: Calls, numbers: Numbers) -> None:
        if self._running.is_elsewhere():
            return
        event = calls[0][1].event
        if event in BEGINNINGS:
            self._roots.enter_compiled(event == TRAIN, calls[0][1].has_gradients)
            return
        below: list[CompiledCall] = []
        has_gradients = False
        made = self._recorder.handed([what.states for _, what in calls], numbers)
        for (named, what), cells in zip(calls, made, strict=True):
            call = CompiledCall(named, what.rows, cells)
            if what.event == GIVEN:
                if self._running.depth == 1:
                    self._batches.compiled_given(call)
            elif named.module is not self._root:
                if not self._running.depth and (not below or what.has_gradients is not has_gradients):
                    self._add_below(below)
                    below, has_gradients = [], what.has_gradients
                    self._roots.open_direct(has_gradients)
                below.append(call)
            else:
                self._add_below(below)
                below = []
                with self._roots.leaving_root() as ends_batch:
                    self._add([call])
                    if ends_batch:
                        self._roots.end_batch()
        self._add_below(below)

    def _add_below(self, calls: list[CompiledCall]) -> None:
        if calls and self._batches.life.of_forward.is_full:
            self._add(calls)

    def _add(self, calls: list[CompiledCall]) -> None:
        self._batches.add_compiled(self._recorder.compiled(self._batches.life.next, calls))
        self._gradients.watch_compiled([call.named for call in calls], self._batches.life.of_forward)
