"""Who meets whom, and who is to blame: two rounds of pairs, then those that are left. Pure.

Units (nodes, or the ranks of a single node) are numbers from 0. A round is a list of heats, in each of which nobody is asked
for twice, so that all pairs of a heat meet at the same time and one that hangs keeps up no other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import TypeAlias

Pair: TypeAlias = tuple[int, int]
Heat: TypeAlias = list[Pair]

SLOW = 0.25
"""A pair with less than this share of the median bandwidth is slow."""
ENOUGH_TO_COMPARE = 3


@dataclass(frozen=True, slots=True)
class Blame:
    """``units`` fail with whomever they met; each of ``pairs`` fails, and both speak with others; of the ``unclear`` pairs
    nobody knows which side it is."""

    units: tuple[int, ...] = ()
    pairs: tuple[Pair, ...] = ()
    unclear: tuple[Pair, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.units or self.pairs or self.unclear)


def first_round(units: int) -> list[Heat]:
    """Each with its neighbour; of an odd number the last meets the first, which then is asked a second time."""
    pairs = [(unit, unit + 1) for unit in range(0, units - 1, 2)]
    return into_heats([*pairs, *([(0, units - 1)] if units % 2 and units > 1 else [])])


def second_round(units: int, results: Mapping[Pair, bool]) -> list[Heat]:
    """Each suspect meets somebody good, or where nobody is known to be, another suspect; without suspects all meet anew."""
    suspects = _suspects(results)
    good = [unit for unit in range(units) if unit not in suspects]
    if suspects and good:
        pairs = []
        for number, suspect in enumerate(suspects):
            new = [pair for other in good if (pair := _pair(suspect, other)) not in results]
            pairs += new[number % len(new) :][:1] if new else []
    else:
        ring = suspects or good
        pairs = [_pair(unit, ring[(place + 2) % len(ring)]) for place, unit in enumerate(ring[1:])]
    return into_heats(pair for pair in dict.fromkeys(pairs) if pair not in results)


def remaining(units: int, results: Mapping[Pair, bool]) -> list[Heat]:
    """All pairs that have not met, but for units that are to blame already: they would only cost time."""
    ill = set(blame(results).units)
    every = [(left, right) for left in range(units) for right in range(left + 1, units)]
    return into_heats(pair for pair in every if pair not in results and not ill & set(pair))


def blame(results: Mapping[Pair, bool]) -> Blame:
    """Who is to blame for the pairs that failed."""
    healthy = {unit for pair, well in results.items() if well for unit in pair}
    partners: dict[int, set[int]] = defaultdict(set)
    for left, right in (pair for pair, well in results.items() if not well):
        partners[left].add(right)
        partners[right].add(left)
    units = {unit for unit, failed in partners.items() if unit not in healthy and len(failed) > 1 and failed & healthy}
    left_over = [pair for pair, well in sorted(results.items()) if not well and not units & set(pair)]
    pairs = tuple(pair for pair in left_over if set(pair) <= healthy)
    return Blame(tuple(sorted(units)), pairs, tuple(pair for pair in left_over if pair not in pairs))


def without_blamed(units: int, blamed: Blame) -> list[int]:
    """The units that can train together: without those to blame, and without one side of each other pair that failed."""
    left_out = set(blamed.units)
    for pair in (*blamed.pairs, *blamed.unclear):
        if not left_out & set(pair):
            left_out.add(pair[1])
    return [unit for unit in range(units) if unit not in left_out]


def slow_pairs(bandwidth: Mapping[Pair, float]) -> list[Pair]:
    """The pairs far below the median; none where there are too few to compare."""
    if len(bandwidth) < ENOUGH_TO_COMPARE:
        return []
    limit = SLOW * median(bandwidth.values())
    return [pair for pair, measured in bandwidth.items() if measured < limit]


def into_heats(pairs: Iterable[Pair]) -> list[Heat]:
    """Each pair in the first heat in which neither of the two has another."""
    heats: list[Heat] = []
    taken: list[set[int]] = []
    for pair in pairs:
        number = next((number for number, units in enumerate(taken) if not units & set(pair)), len(heats))
        if number == len(heats):
            heats.append([])
            taken.append(set())
        heats[number].append(pair)
        taken[number] |= set(pair)
    return heats


def _suspects(results: Mapping[Pair, bool]) -> list[int]:
    healthy = {unit for pair, well in results.items() if well for unit in pair}
    return sorted({unit for pair, well in results.items() if not well for unit in pair} - healthy)


def _pair(one: int, other: int) -> Pair:
    return (one, other) if one < other else (other, one)
