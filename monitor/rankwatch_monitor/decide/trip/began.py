"""Where a trip came from: the first reading that left its own range, and from which jumps lead to the trip. Pure.

An inf of bfloat16 or float32 comes batches after its origin, and the all-reduce hands a bad gradient to all ranks: the rank
that trips first may be innocent.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rankwatch.shared.figures import figure
from rankwatch.shared.types.frame import OF_MODULE, Kind
from rankwatch.shared.types.trip import Trip

LINK = 2
"""Batches: a jump leads on to a jump this much later. In between lies at most one batch that was not measured."""

ALIKE = 1 / 2
"""Another rank jumped as well if its reading rose by this share of the doublings."""


WEIGHTS = Kind.PARAMETER, Kind.BUFFER
"""What was written before the batch in which it jumped."""


class ReadingName(NamedTuple):
    """A reading of a rank; ``call`` counts the calls of its module in a part, ``phase`` is the frame's."""

    module: str
    module_class: str
    label: str
    phase: int = 0
    call: int = 0


class Jump(NamedTuple):
    """A reading that left its own range. ``rise``: doublings above its recent median; inf: it was not finite.

    ``frame`` is -1 for an input of the root, which is there before any module runs; ``row`` orders the readings of a frame.
    """

    step: int
    batch: int
    stage: int
    frame: int
    row: int
    rank: int
    name: ReadingName
    rise: float
    kind: Kind = Kind.OUTPUT

    @property
    def is_weight(self) -> bool:
        return self.kind in WEIGHTS


@dataclass(frozen=True, slots=True)
class Began:
    """The first reading that jumped. ``rank`` is None where it jumped on all ranks alike.

    ``factor``: the reading divided by its own recent median; inf: it was not finite. ``alone``: the same reading jumped on no
    other rank of the replica group; None: no other rank is known.
    """

    rank: int | None
    batch: int
    module: str
    module_class: str
    label: str
    factor: float
    alone: bool | None
    is_parameter: bool = False


@dataclass(frozen=True, slots=True)
class TripOrigin:
    """What the record says about where a trip came from; so many batches before it, of so many ranks, were looked at."""

    began: Began | None
    batches: int
    ranks: int


def find_began(
    jumps: Iterable[Jump],
    trip: tuple[int, int],
    others: Callable[[Jump], Collection[float]],
    full: Sequence[int] = (),
) -> Began | None:
    """The first jump, in the order of step, batch, stage and frame, from which jumps lead to the trip.

    Args:
        jumps: of all ranks that were looked at, in any order, all before the trip.
        trip: its optimizer step and batch.
        others: the rises of the same reading in the same batch on the other ranks of the replica group.
        full: the batches of which more than the root was measured, in order.
    """
    of_batches: dict[tuple[int, int], list[Jump]] = defaultdict(list)
    for jump in jumps:
        of_batches[jump.step, jump.batch].append(jump)
    path = _path(of_batches, trip, full)
    for place, at in enumerate(path):
        follows = of_batches[path[place + 1]] if place + 1 < len(path) else None
        leading = [jump for jump in of_batches[at] if follows is None or _leads_on(jump, of_batches[at], follows)]
        if leading:
            first = min(leading, key=lambda jump: (jump.stage, jump.frame, jump.row, -jump.rise, jump.rank))
            return _began(first, others(first))
    return None


def leads(origin: TripOrigin | None, rank: int | None, trip: Trip) -> bool:
    """Whether it began with another reading than that of the trip, on ``rank``: the trip is then a consequence."""
    began = origin.began if origin is not None else None
    if began is None:
        return False
    tripped = trip.position.batch, trip.frame.spec.module, trip.culprit.label
    is_elsewhere = (began.batch, began.module, began.label) != tripped
    return is_elsewhere or (None not in (rank, began.rank) and rank != began.rank)


def describe_origin(origin: TripOrigin, world_size: int) -> str:
    """``batch 80, rank 1: input[0] of the root jumped x950; the other ranks' did not``."""
    began = origin.began
    if began is None and not origin.batches:
        return "not known: there are too few batches before the trip to compare with"
    is_part = origin.ranks < world_size
    if began is None:
        of = f", of the {origin.ranks} ranks that were looked at" if is_part else ""
        return f"not seen: no measured reading jumped in the {origin.batches} batches before the trip{of}"
    what = _name(began)
    how = f"jumped x{figure(began.factor)}" if math.isfinite(began.factor) else "was not finite"
    if began.rank is None:
        return f"batch {began.batch}, {'all ranks alike' if world_size > 1 else 'rank 0'}: {what} {how}"
    others = f"those of {origin.ranks - 1} other ranks that were looked at" if is_part else "the other ranks'"
    also = {None: "", True: f"; {others} did not", False: "; on other ranks, too"}[began.alone]
    return f"batch {began.batch}, rank {began.rank}: {what} {how}{also}"


def advise_began(origin: TripOrigin | None) -> str:
    """What to look at first; empty: it is not known where it began."""
    began = origin.began if origin is not None else None
    if began is None:
        return ""
    how = f"x{figure(began.factor)} what it usually is" if math.isfinite(began.factor) else "not finite"
    if not began.module and began.label.startswith("input"):
        whose = "all ranks'" if began.rank is None else f"rank {began.rank}'s"
        return f"look at {began.label} of batch {began.batch} in {whose} data: it is {how}"
    what, where = _name(began), "" if began.rank is None or began.alone is False else f" of rank {began.rank}"
    if began.is_parameter:
        step = f"the optimizer's step before batch {began.batch}{where} (its learning rate, its gradients)"
        return f"look at {step}, or at code that wrote to {what}: it is {how}"
    return f"look at what made {what} in batch {began.batch}{where}: it is {how}"


def _name(began: Began) -> str:
    where = f"the root ({began.module_class})" if not began.module else f"{began.module} ({began.module_class})"
    if began.label.startswith(f"loss{OF_MODULE}"):
        return f"the {began.label}"
    return "the loss" if began.label == "loss" else f"{began.label} of {where}"


def _path(
    of_batches: Mapping[tuple[int, int], Sequence[Jump]], trip: tuple[int, int], full: Sequence[int]
) -> list[tuple[int, int]]:
    """The batches with jumps that hang together up to the trip, the first one first.

    Two batches hang together if they are near each other and one reading jumped in both: another one's noise leads nowhere. A
    batch in which a module inside of the root jumped is near the next one of which more than the root was measured.
    Or if in the later one a weight jumped first: the optimizer wrote it from what was computed before.
    """
    path: list[tuple[int, int]] = []
    last = trip
    follows: Sequence[Jump] = ()
    for step, batch in sorted((at for at in of_batches if at <= trip), reverse=True):
        found = of_batches[step, batch]
        is_apart = {jump.name for jump in found}.isdisjoint(jump.name for jump in follows)
        is_near = last[1] - batch <= LINK or last[0] - step <= 1 or _is_last_look(found, batch, last[1], full)
        if not is_near or (is_apart and not _begin_with_weight(follows)):
            break
        path.insert(0, (step, batch))
        last, follows = (step, batch), found
    return path


def _is_last_look(found: Iterable[Jump], batch: int, last: int, full: Sequence[int]) -> bool:
    """Whether what jumped in a batch inside of the root was not measured again before ``last``."""
    after = bisect_right(full, batch)
    is_last = list(full[max(after - 1, 0) : after]) == [batch] and (after == len(full) or full[after] >= last)
    return is_last and any(jump.name.module for jump in found)


def _begin_with_weight(jumps: Iterable[Jump]) -> bool:
    first = min(jumps, key=lambda jump: (jump.stage, jump.frame, not jump.is_weight), default=None)
    return first is None or first.is_weight


def _leads_on(jump: Jump, same: Sequence[Jump], following: Sequence[Jump]) -> bool:
    """Whether what was computed from the reading jumped as well, or the reading itself stayed away."""
    return (
        _begin_with_weight(following)
        or any(other.rank == jump.rank and other.frame > jump.frame for other in same)
        or any(other.rank == jump.rank and other.name == jump.name for other in following)
    )


def _began(first: Jump, others: Collection[float]) -> Began:
    alone = all(rise < ALIKE * first.rise for rise in others) if others else None
    name, is_parameter = first.name, first.kind is Kind.PARAMETER
    factor = 2.0**first.rise if first.rise < 1024 else math.inf
    return Began(first.rank, first.batch, name.module, name.module_class, name.label, factor, alone, is_parameter)
