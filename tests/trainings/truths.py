"""What may be true of a training, and how a training of each kind is added to the table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .case import Row
from .parts import BAD

BATCHES = 10
"""Of a hostile training in one process."""
LONG = 200
"""Of a healthy training whose numbers go up and down with time."""


@dataclass(frozen=True)
class Peace:
    """One process: nothing trips, and nothing is noticed. ``forwards``: of training, in one step; -1: it varies."""

    forwards: int = 1


@dataclass(frozen=True)
class Trip:
    """What the verdict on one process should say. Several values: any of them is true. Of ``label``, the beginning.

    ``says``: what one of the sentences must hold; ``never``: what none may claim. ``notice``: nothing trips, and a notice has
    this in its label.
    """

    module: tuple[str, ...]
    cause: tuple[str, ...]
    state: tuple[str, ...]
    batch: tuple[int, ...]
    label: str
    says: tuple[str, ...]
    never: tuple[str, ...]
    notice: str


@dataclass(frozen=True)
class Fate:
    """Several ranks: what the verdict on a job that is aborted says, and what it says of how it ``began``. Any of a range."""

    verdict: dict[str, Any]
    began: dict[str, Any]


@dataclass(frozen=True)
class Alike:
    """Several ranks: nothing is said, and ``compared`` parameters of replicas are equal.

    ANY: some parameters; 0: there is nothing to compare, or what there is differs by right.
    """

    compared: int


ANY = -1


def healthy(*, forwards: int = 1, batches: int = 50, **options: Any) -> Row[Peace]:
    return Row(Peace(forwards), batches, options=options)


BORN_HERE = ("inputs and weights were finite",)
"""What is false where a weight or the data was bad."""


def hostile(
    module: str | tuple[str, ...] = "",
    cause: str | tuple[str, ...] = "",
    state: str | tuple[str, ...] = "nan",
    *,
    batch: int | Iterable[int] = BAD,
    label: str = "",
    says: str | tuple[str, ...] = (),
    never: str | tuple[str, ...] = (),
    notice: str = "",
    batches: int = BATCHES,
    **options: Any,
) -> Row[Trip]:
    numbers = (batch,) if isinstance(batch, int) else tuple(batch)
    false = _several(never) + (BORN_HERE if cause in ("weight", "data") else ())
    truth = Trip(_several(module), _several(cause), _several(state), numbers, label, _several(says), false, notice)
    return Row(truth, batches, options=options)


def _several(value: str | tuple[str, ...]) -> tuple[str, ...]:
    """An empty text is a name (the root's), but no sentence."""
    return (value,) if isinstance(value, str) else value


def agreeing(*, compared: int, ranks: int = 2, **options: Any) -> Row[Alike]:
    return Row(Alike(compared), LONG, ranks, options)
