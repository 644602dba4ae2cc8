"""A hostile training: what it trains, and what is true of its first inf or nan."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from trainings import Training, trained

BAD = 5
"""The batch in which most of them go wrong."""
BATCHES = 10

NAN, INF = float("nan"), float("inf")

BORN_HERE = ("inputs and weights were finite",)
"""What is false where a weight or the data was bad."""


@dataclass(frozen=True)
class Truth:
    """What the verdict should say. Several values: any of them is true. Of ``label``, the beginning.

    ``says``: what one of the sentences must hold; ``never``: what none may claim. ``notice``: nothing trips, and a notice has
    this in its label.
    """

    batch: tuple[int, ...]
    module: tuple[str, ...]
    cause: tuple[str, ...]
    state: tuple[str, ...]
    label: str = ""
    says: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    notice: str = ""


@dataclass(frozen=True)
class Case:
    name: str
    truth: Truth
    build: Callable[[], Training]
    options: dict[str, Any] = field(default_factory=dict)
    batches: int = BATCHES

    def make(self) -> Training:
        torch.manual_seed(0)
        return self.build()


CASES: list[Case] = []


def hostile(
    *,
    module: str | tuple[str, ...] = "",
    cause: str | tuple[str, ...] = "",
    state: str | tuple[str, ...] = "nan",
    batch: int | Iterable[int] = BAD,
    label: str = "",
    says: str | tuple[str, ...] = (),
    never: str | tuple[str, ...] = (),
    notice: str = "",
    batches: int = BATCHES,
    **options: Any,
) -> Callable[[Callable[[], Training]], Callable[[], Training]]:
    """Adds a training to the table. ``options``: those of the watch."""

    def add(build: Callable[[], Training]) -> Callable[[], Training]:
        numbers = (batch,) if isinstance(batch, int) else tuple(batch)
        false = _several(never) + (BORN_HERE if cause in ("weight", "data") else ())
        truth = Truth(numbers, _several(module), _several(cause), _several(state), label, _several(says), false, notice)
        CASES.append(Case(build.__name__, truth, build, options, batches))
        return build

    return add


def _several(value: str | tuple[str, ...]) -> tuple[str, ...]:
    """An empty text is a name (the root's), but no sentence."""
    return (value,) if isinstance(value, str) else value


# --- the commonest ways to go wrong ------------------------------------------------------------------------------------


def fed(model: nn.Module, spoil: Callable[[Tensor], object], at: int = BAD) -> Training:
    """A training whose input is spoiled in one batch."""

    def loss_of(number: int) -> Tensor:
        x = torch.randn(4, 4)
        if number == at:
            spoil(x)
        loss: Tensor = model(x).square().mean()
        return loss

    return trained(model, loss_of)


def spoiled(model: nn.Module, spoil: Callable[[], object], *, at: int = BAD, sizes: tuple[int, ...] = (4, 4)) -> Training:
    """A training in which something happens before one batch."""
    return trained(
        model,
        lambda number: model(torch.randn(sizes)).square().mean(),
        before=lambda number: spoil() if number == at else None,
    )


def put(tensor: Tensor, value: float, *where: int) -> None:
    """Writes one element, outside of autograd."""
    with torch.no_grad():
        tensor[where or (0,) * tensor.dim()] = value
