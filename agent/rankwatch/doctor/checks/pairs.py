"""Which units are tested against each other, and which unit or pair is to blame for a failure. Pure.

Units are numbered from 0: the nodes, or on a single node its ranks. The first round tests every unit once, the second mixes
failed units with healthy ones, the third tests the other pairs. A round is a list of waves. A unit is in at most one
pair of a wave, so all pairs of a wave run at the same time, and a pair that hangs delays no other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import TypeAlias

Pair: TypeAlias = tuple[int, int]
Wave: TypeAlias = list[Pair]

SLOW = 0.25
"""A pair with less than this share of the median bandwidth is slow."""
ENOUGH_TO_COMPARE = 3


@dataclass(frozen=True, slots=True)
class Blame:
    """Why pairs failed.

    ``units``: every pair with this unit failed. ``pairs``: this pair failed, and both units passed with others. ``unclear``:
    this pair failed, and no test shows which unit is to blame.
    """

    units: tuple[int, ...] = ()
    pairs: tuple[Pair, ...] = ()
    unclear: tuple[Pair, ...] = ()


def first_round(units: int) -> list[Wave]:
    """Each unit with its neighbour. Of an odd number the last is paired with the first, in a second wave."""
    pairs = [(unit, unit + 1) for unit in range(0, units - 1, 2)]
    return into_waves([*pairs, *([(0, units - 1)] if units % 2 and units > 1 else [])])


def second_round(units: int, outcomes: Mapping[Pair, bool]) -> list[Wave]:
    """Each suspect with a healthy unit; where none is healthy, suspects with each other; without suspects, all in new pairs."""
    suspects = _suspects(outcomes)
    healthy = [unit for unit in range(units) if unit not in suspects]
    if suspects and healthy:
        pairs = []
        for number, suspect in enumerate(suspects):
            new = [pair for other in healthy if (pair := _pair(suspect, other)) not in outcomes]
            pairs += new[number % len(new) :][:1] if new else []
    else:
        ring = suspects or healthy
        pairs = [_pair(unit, ring[(index + 2) % len(ring)]) for index, unit in enumerate(ring[1:])]
    return into_waves(pair for pair in dict.fromkeys(pairs) if pair not in outcomes)


def remaining(units: int, outcomes: Mapping[Pair, bool]) -> list[Wave]:
    """All pairs that were not tested, without the units already to blame: they would only cost time."""
    broken = set(blame(outcomes).units)
    every = [(left, right) for left in range(units) for right in range(left + 1, units)]
    return into_waves(pair for pair in every if pair not in outcomes and not broken & set(pair))


def blame(outcomes: Mapping[Pair, bool]) -> Blame:
    """Names the units or pairs to blame. ``outcomes``: whether each tested pair passed."""
    healthy = {unit for pair, passed in outcomes.items() if passed for unit in pair}
    partners: dict[int, set[int]] = defaultdict(set)
    for left, right in (pair for pair, passed in outcomes.items() if not passed):
        partners[left].add(right)
        partners[right].add(left)
    units = {unit for unit, failed in partners.items() if unit not in healthy and len(failed) > 1 and failed & healthy}
    left_over = [pair for pair, passed in sorted(outcomes.items()) if not passed and not units & set(pair)]
    pairs = tuple(pair for pair in left_over if set(pair) <= healthy)
    return Blame(tuple(sorted(units)), pairs, tuple(pair for pair in left_over if pair not in pairs))


def without_blamed(units: int, blamed: Blame) -> list[int]:
    """The units that can train together: all but those to blame, and but one unit of each other pair that failed."""
    left_out = set(blamed.units)
    for pair in (*blamed.pairs, *blamed.unclear):
        if not left_out & set(pair):
            left_out.add(pair[1])
    return [unit for unit in range(units) if unit not in left_out]


def slow_pairs(bandwidth: Mapping[Pair, float]) -> list[Pair]:
    """The pairs far below the median bandwidth; none where too few pairs were measured."""
    if len(bandwidth) < ENOUGH_TO_COMPARE:
        return []
    limit = SLOW * median(bandwidth.values())
    return [pair for pair, measured in bandwidth.items() if measured < limit]


def into_waves(pairs: Iterable[Pair]) -> list[Wave]:
    """Puts each pair into the first wave that has neither of its units."""
    waves: list[Wave] = []
    taken: list[set[int]] = []
    for pair in pairs:
        number = next((number for number, units in enumerate(taken) if not units & set(pair)), len(waves))
        if number == len(waves):
            waves.append([])
            taken.append(set())
        waves[number].append(pair)
        taken[number] |= set(pair)
    return waves


def _suspects(outcomes: Mapping[Pair, bool]) -> list[int]:
    healthy = {unit for pair, passed in outcomes.items() if passed for unit in pair}
    return sorted({unit for pair, passed in outcomes.items() if not passed for unit in pair} - healthy)


def _pair(one: int, other: int) -> Pair:
    return (one, other) if one < other else (other, one)
