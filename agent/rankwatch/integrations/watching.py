"""The base of the callbacks: the watch of the current training."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

from torch import nn

from ..api.registry import open_watches
from ..api.watch import watch
from ..api.watch_object import Watch
from ..measure.modules import unwrap

_made: WeakSet[Watch] = WeakSet()


class WatchingCallback:
    """Opens a watch when a training begins, and closes it when the training ends.

    Args:
        options: as of ``rankwatch.watch``.
    """

    def __init__(self, **options: Any) -> None:
        self.watch: Watch | None = None
        """The watch of the current training. A training that an exception ended leaves its watch here, open."""
        self._options = options

    def _open_watch(self, model: nn.Module, **more: Any) -> None:
        """Watches the model, and ends the watch that an earlier training left open: in a notebook one trains again."""
        for earlier in open_watches():
            if earlier in _made and earlier.root is unwrap(model):
                earlier.end()
        self.watch = watch(model, **more, **self._options)
        _made.add(self.watch)

    def _begin_step(self, number: int) -> None:
        if self.watch is not None:
            self.watch.optimizer_step = number

    def _close_watch(self) -> None:
        if self.watch is not None:
            self.watch.close()
