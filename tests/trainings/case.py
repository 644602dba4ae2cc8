"""A training, what is true of it, and the table of all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch


def nothing(number: int) -> None:
    """A hook of a training that needs none."""


@dataclass(frozen=True)
class Training:
    """What is watched, and what trains batch ``number`` of it and may return its loss.

    ``before`` is called ahead of each batch. ``is_watched``: the training itself calls ``watch``.
    """

    root: Any
    step: Callable[[int], Any]
    before: Callable[[int], object] = nothing
    is_watched: bool = False

    def batch(self, number: int) -> Any:
        self.before(number)
        return self.step(number)


Build = Callable[[], Training]
T = TypeVar("T")


@dataclass(frozen=True)
class Case(Generic[T]):
    """A training of ``batches`` by ``ranks``. ``options``: those of the watch."""

    name: str
    build: Build
    truth: T
    ranks: int
    batches: int
    options: dict[str, Any]

    def make(self, seed: int = 0) -> Training:
        """The same training at each call."""
        torch.manual_seed(seed)
        return self.build()


_TABLE: dict[type[Any], dict[str, Case[Any]]] = defaultdict(dict)


def cases(truth: type[T]) -> dict[str, Case[T]]:
    """By name: the trainings of which such a thing is true."""
    return _TABLE[truth]


@dataclass(frozen=True)
class Row(Generic[T]):
    """What trainings share beside their code: as a decorator it adds one to the table, and ``each`` adds several."""

    truth: T
    batches: int
    ranks: int = 1
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, build: Build) -> Build:
        self.each(**{build.__name__: build})
        return build

    def each(self, **builds: Build) -> None:
        table = cases(type(self.truth))
        for name, build in builds.items():
            assert name not in table, name
            table[name] = Case(name, build, self.truth, self.ranks, self.batches, self.options)
