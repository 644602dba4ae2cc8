"""A healthy training, and the table of all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from trainings import Training

BATCHES = 200


@dataclass(frozen=True)
class Case:
    """``options`` are those of the watch. ``forwards``: of training, in one step; -1: it varies."""

    name: str
    build: Callable[[], Training]
    options: dict[str, Any] = field(default_factory=dict)
    forwards: int = 1

    def make(self) -> Training:
        """The same training at each call."""
        torch.manual_seed(0)
        return self.build()


CASES: list[Case] = []


def healthy(*, forwards: int = 1, **options: Any) -> Callable[[Callable[[], Training]], Callable[[], Training]]:
    """Adds a training to the table."""

    def add(build: Callable[[], Training]) -> Callable[[], Training]:
        CASES.append(Case(build.__name__, build, options, forwards))
        return build

    return add
