"""What a closer look at a trip found: whether the bad number recurs, and in which precision it is finite."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, NamedTuple

from .fields import MAX_DIMS, AnyFloat, Dtype, Items
from .frame import State
from .trip import Operator


class Precision(NamedTuple):
    """The outputs of the module, computed once more in this dtype. ``abs_max`` is 0 unless they are finite."""

    dtype: Dtype
    state: State
    abs_max: AnyFloat


@dataclass(frozen=True, slots=True)
class CloseUp:
    """The forward or backward that tripped, run again ``of`` times, of which it was bad ``recurred`` times.

    ``operator`` is the one that the trip names, or one that only this closer look found. ``machine`` names the host and, on
    CUDA, the GPU with UUID, PCI bus and driver. ``note`` says why something was not run again; empty: all was. ``capsule`` is
    the path of what can be replayed, below the run's folder where that is shared; empty: there is none. ``is_eager``: the
    training runs it compiled, and it was run again eagerly.
    """

    operator: Operator | None = None
    recurred: int = 0
    of: int = 0
    precision: Annotated[tuple[Precision, ...], Items(MAX_DIMS)] = ()
    machine: str = ""
    note: str = ""
    capsule: str = ""
    is_eager: bool = False


def fullness(closeup: CloseUp | None) -> tuple[int, ...]:
    """How much a close-up tells: of two, the greater one tells more."""
    if closeup is None:
        return ()
    return closeup.operator is not None, closeup.of, len(closeup.precision), bool(closeup.capsule)
