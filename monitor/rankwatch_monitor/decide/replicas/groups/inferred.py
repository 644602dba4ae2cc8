"""Parameters that nothing keeps equal, as far as is known: what is found of them after many comparisons. Pure.

Each rank may train parts of its own, and ranks may average their weights now and then. So what never was equal is silent, and
what becomes equal again is; a few parameters that come apart, and stay so while others are equal and change, are found.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

import numpy as np

from ..patterns import Since
from .replicated_rows import ReplicatedRows

SUBSET_STEPS = 32
ALONE_STEPS = 8
"""Without communication, after which ranks whose models differ from the first look on train a model each."""

UNSYNCHRONISED_STEPS = 128
LOOKS = 3
"""Looks at which a parameter must be apart."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the ranks of the group are seen to do. ``elements``: of all parameters that a rank has, compared or not.

    ``moved``: the steps at which a parameter was equal on all ranks and another one than before. ``communicates_early``: the
    ranks communicate in their first steps already.
    """

    step: int
    first_step: int
    elements: int
    communicates: bool
    communicates_early: bool
    moved: Container[int]
    changed: int
    """How many parameters have changed and are equal on all ranks."""
    has_own: bool
    """Whether some parameters are each rank's own: they were never equal, or are shards."""


def find(family: ReplicatedRows, around: Surroundings) -> tuple[list[int], bool]:
    """The rows that came apart and surely should not, and were not found before; whether the ranks train alone."""
    unfound = [row for row, apart in family.apart.items() if apart.found is None]
    if family.is_of_buffers:
        return unfound, False
    fresh = [row for row in unfound if family.trainable[row]]
    if fresh and not around.communicates and not around.changed:
        age = around.step - around.first_step
        own = [row for row in fresh if family.unequal_first[row]]
        if age >= ALONE_STEPS and _are_most(family, own, around):
            return own, True
        if age >= UNSYNCHRONISED_STEPS and not around.has_own and _are_most(family, fresh, around):
            return fresh, True
    stray = [row for row in fresh if _is_stray(family, row, around)]
    return ([], False) if _are_most(family, stray, around) else (stray, False)


def since(family: ReplicatedRows, row: int) -> Since:
    """Since when a row is apart that was found."""
    if family.unequal_first[row]:
        return Since.BEGINNING
    return Since.LATER if family.changed[row] else Since.FIRST_CHANGE


def _are_most(family: ReplicatedRows, rows: list[int], around: Surroundings) -> bool:
    return 2 * int(family.numel[rows].sum()) > around.elements


def _is_stray(family: ReplicatedRows, row: int, around: Surroundings) -> bool:
    apart = family.apart[row]
    if family.unequal_first[row] or family.rejoined[row]:
        return False
    if around.step - apart.since < SUBSET_STEPS or len(apart.looks) < LOOKS or not _module_is_shared(family, row):
        return False
    seen_beside = sum(step in around.moved for step in apart.looks) >= 2
    if not family.changed[row]:
        return seen_beside or (around.has_own and around.communicates_early)
    names_rank = apart.split.has_majority or apart.split.replicas == 2
    return names_rank and (seen_beside or 4 * len(family.apart) <= around.changed)


def _module_is_shared(family: ReplicatedRows, row: int) -> bool:
    """Whether all parameters of its module were equal at the first look, and not all zero. Else the module may be each rank's
    own."""
    of_module = family.modules == family.modules[row]
    return not bool(np.any(family.unequal_first & of_module)) and not bool(np.all(family.began_zero[of_module]))
