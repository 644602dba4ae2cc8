"""Ranks that tripped at one moment: which of them is the culprit, and whether any single one is. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rankwatch.shared.types.frame import DTYPE_MAX, OWN
from rankwatch.shared.types.trip import Cause, Trip
from rankwatch.shared.words.facts import is_given_bad, is_made_here
from rankwatch.shared.words.text import name_spans
from rankwatch.shared.words.weight_changes import tell

_SHARED = frozenset({Cause.WEIGHT, Cause.GRADIENT, Cause.REDUCTION})
"""The causes that come to all ranks alike: what was reduced over them, and the weights that were stepped by it."""


_PLAIN_SUM = "all_reduce"
"""The collective that sums gradients, unless a hook of the training's own does: what such a hook makes of them is not known."""


def rank_order(rank: int, trip: Trip) -> tuple[int, int]:
    """The order of ranks that tripped at one moment: those with bad values of their own first, of other ranks last."""
    if trip.is_from_others or trip.unfound:
        return 2, rank
    return (0 if _has_bad_shard(trip) else 2 if is_given_bad(trip) else 1), rank


def who_has_it(first: int, at_once: Sequence[int], trips: Mapping[int, Trip], cause: Cause, world_size: int) -> list[int]:
    """The ranks that tripped at once with the same bad reading, as it came to all of them, or as no rank is without it.

    ``cause``: of the first one.
    """
    same = _reading(trips[first])
    if cause not in _SHARED:
        all_alike = len(at_once) == world_size and all(_reading(trips[rank]) == same for rank in at_once)
        if not all_alike:
            return [first]
        # What one rank has made of finite numbers, a collective within the loss hands to the others: they were given it.
        return [rank for rank in at_once if is_made_here(trips[first]) <= (not is_given_bad(trips[rank]))]
    if trips[first].unfound:  # of shards, each rank sees others
        return [rank for rank in at_once if trips[rank].unfound]
    return [rank for rank in at_once if _reading(trips[rank]) == same and not trips[rank].unfound]


def put_together(ranks: Sequence[int], trips: Mapping[int, Trip], world_size: int, *, have_all_answered: bool) -> Trip:
    """The trip of the first of these ranks, which have one bad gradient, in the light of what the others said.

    A rank that ran its batches again, and was finite, supposes that it came from another rank. It did not if all ranks say so,
    or if all others had finite gradients. Nor did the sum over the ranks make it, if their own gradients are too small for that.
    """
    first = trips[ranks[0]]
    if not (first.unfound and first.received):
        return first
    if len(ranks) == world_size and all(trips[rank].recurs is False for rank in ranks):
        is_small = all(0.0 < world_size * _largest_own(trips[rank]) <= DTYPE_MAX["float16"] for rank in ranks)
        is_beside = is_small and first.received == _PLAIN_SUM
        return replace(first, received="", collective="" if is_beside else first.received)
    return replace(first, received="") if len(ranks) == 1 and have_all_answered else first


def tell_apart(
    ranks: Sequence[int], trips: Mapping[int, Trip], cause: Cause, world_size: int, *, have_all_answered: bool
) -> tuple[bool, str]:
    """Whether one of these ranks, which all have it, can be told to be the culprit; and what is to be said of them."""
    if len(ranks) < 2:
        if world_size == 1 or not trips[ranks[0]].unfound:
            return True, ""
        if have_all_answered:
            return True, f"no other rank's gradients were bad: rank {ranks[0]} made it"
        return False, "which rank made it is not known"
    if len(ranks) == world_size:
        have = "both ranks have it" if world_size == 2 else f"all {world_size} ranks have it"
    else:
        every = ", all that tripped," if len(ranks) == len(trips) else ""
        have = f"{name_spans(ranks)}{every} have it"
    if cause is Cause.REDUCTION:
        return False, have
    if cause not in _SHARED:
        return False, f"{have} at once"
    here = [rank for rank in ranks if _has_bad_shard(trips[rank])]
    elsewhere = [rank for rank in ranks if trips[rank].weights and rank not in here]
    if here and elsewhere:
        shards = "shard" if len(here) == 1 else "shards"
        return True, f"{have}, and the bad values are in the {shards} of {name_spans(here)}"
    first = trips[ranks[0]]
    if elsewhere:
        return False, f"{have}, but no bad value is in the shards of {name_spans(elsewhere)}"
    if cause is Cause.WEIGHT and (first.optimizer_step == 0 or (first.weights[:1] and tell(first.weights[0])[0])):
        return False, have
    if first.unfound and len(ranks) == world_size and all(trips[rank].recurs is False for rank in ranks):
        return False, have
    if first.unfound:
        return False, f"{have}; which one made it is not known"
    if not first.gradients and not first.guarded:
        return False, f"{have}; which one made it is not known: gradients=True tells"
    if cause is Cause.GRADIENT and first.guarded:
        return False, f"{have} at once: each of them made it, as it ran its own batch again"
    if cause is Cause.GRADIENT:
        return False, f"{have} at once: each of them made it, or it was reduced over them before it was measured"
    return False, f"{have}; which one made it is not known, though gradients were watched"


def _largest_own(trip: Trip) -> float:
    """The abs max of what a rank alone made of the gradients of the culprit's module; 0: it is not known."""
    return max((one.abs_max for one in trip.frame.readings if one.label.endswith(OWN)), default=0.0)


def _has_bad_shard(trip: Trip) -> bool:
    """Whether the bad values of a weight are in this rank's own shard, or in its copy of the whole weight."""
    return bool(trip.weights) and trip.weights[0].is_here  # the one nearest to the culprit's module


def _reading(trip: Trip) -> tuple[object, ...]:
    spec, culprit = trip.frame.spec, trip.culprit
    return spec.module, spec.phase, culprit.label, culprit.state
