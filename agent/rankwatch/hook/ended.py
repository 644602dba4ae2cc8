"""What is kept of a detector after its watch: no module, and no tensor."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch import Tensor, nn

from ..shared.types.frame import BatchSummary, FrameTable
from ..shared.types.tuning import Tuning

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..errors import TrainingAborted
    from .detector import Detector


class EndedDetector:
    """In place of a detector that was removed: the watch may be kept for long, and must not keep the model."""

    def __init__(self, detector: Detector) -> None:
        self._root = weakref.ref(detector.root)
        self.position = detector.position
        self.whereabouts = detector.whereabouts
        self.fault = detector.fault
        self.use = detector.use
        self.optimizer_step = detector.optimizer_step
        self._unsent = detector.unsent()

    @property
    def root(self) -> nn.Module:
        """The model, as long as the user has it; then a module without anything."""
        root = self._root()
        return nn.Module() if root is None else root

    def unsent(self) -> tuple[FrameTable, BatchSummary] | None:
        return self._unsent

    def is_inside(self) -> bool:
        return False

    def mark(self, tensor: Tensor, label: str) -> None:
        """Nothing is recorded any more."""

    def obey(self, abort: Callable[[], TrainingAborted | None]) -> None:
        """There is no hook any more."""

    def tune(self, tuning: Tuning) -> None:
        """There is nothing to tune."""

    def look_back(self, error: BaseException) -> TrainingAborted | None:
        return None
