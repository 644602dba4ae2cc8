"""What may be true of a training, and how a training of each kind is added to the table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from recorded.truths import Healthy, Truth

from .case import Row
from .parts import BAD

BATCHES = 10
"""Of a hostile training in one process."""
LONG = 200
"""Of a healthy training whose numbers go up and down with time, or whose replicas are compared."""


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
    """Several ranks: what the verdict on a job that is aborted says, and what is in its evidence. Any number of a range.

    Of ``also``, the ranks; of ``began``, what is given here; ``operator``: that of the close-up.
    """

    verdict: dict[str, Any]
    says: str


@dataclass(frozen=True)
class Apart:
    """Several ranks: what is said of replicas that are silently not one model. The ranks of one group must be equal."""

    truth: Truth
    groups: tuple[tuple[int, ...], ...]


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


def spoilt(*, batches: int = 12, ranks: int = 2, options: Any = None, says: str = "", **verdict: Any) -> Row[Fate]:
    return Row(Fate(verdict, says), batches, ranks, options or {})


def agreeing(*, compared: int, ranks: int = 2, **options: Any) -> Row[Healthy]:
    return Row(Healthy(compared), LONG, ranks, options)


def desynced(
    truth: Truth, *, ranks: int = 2, groups: tuple[tuple[int, ...], ...] = (), batches: int = 160, **options: Any
) -> Row[Apart]:
    return Row(Apart(truth, groups or (tuple(range(ranks)),)), batches, ranks, options)
