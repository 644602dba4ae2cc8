"""How much came apart together, over all groups of ranks: that tells patterns apart which begin alike. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from .desync import DesyncPattern
from .findings import DesyncOrigin, Onset
from .replica_group import ReplicaGroup
from .table_layout import Kin

MOST = 8
"""Nothing is synchronised where so many times more parameters came apart than stayed equal: those may only have decayed."""

_APART, _CHANGED, _SEEN, _KNOWN, _DRAWN = range(5)


def weigh(origin: DesyncOrigin, groups: Iterable[ReplicaGroup], alone: int) -> DesyncPattern:
    """The pattern of an origin with an onset. ``alone``: the trained parameters that have no replicas on its ranks."""
    masks: dict[str, tuple[Kin, npt.NDArray[np.bool_]]] = {}
    for group in groups:
        for family in group.families.values():
            if group.keeps_equal(family):
                _, mask = masks.setdefault(family.kin.key, (family.kin, np.zeros((5, len(family.kin.rows)), np.bool_)))
                mask[_APART, [row for row, one in family.apart.items() if one.origin is origin]] = True
                is_equal = np.ones(len(family.kin.rows), np.bool_)
                is_equal[list(family.apart)] = False
                mask[_CHANGED] |= family.changed & is_equal
                mask[_SEEN] |= family.equal_step >= max(group.first_change, 0)
                mask[_KNOWN] |= family.looked
                mask[_DRAWN] |= family.looked & ~family.is_blank
    apart = dict(_rows(masks, _APART))
    if origin.onset is Onset.BEGINNING:
        drawn = dict(_rows(masks, _DRAWN))
        are_most = len(apart) > 1 and 2 * sum(apart.values()) > sum(drawn.values())
        return DesyncPattern.INITIALISATION if are_most else DesyncPattern.LOAD
    if origin.onset is Onset.LATE:
        are_most = 2 * len(apart) > len(dict(_rows(masks, _KNOWN)))
        return DesyncPattern.UNSYNCHRONISED if are_most else DesyncPattern.UNKNOWN
    if 2 * len(apart.keys() | dict(_rows(masks, _SEEN)).keys()) < len(dict(_rows(masks, _KNOWN))):
        return DesyncPattern.UNKNOWN
    others_changed = len(dict(_rows(masks, _CHANGED)).keys() - apart.keys()) + alone
    return DesyncPattern.UNSYNCHRONISED if len(apart) > MOST * others_changed else DesyncPattern.SUBSET


def _rows(masks: dict[str, tuple[Kin, npt.NDArray[np.bool_]]], which: int) -> Iterable[tuple[str, int]]:
    """The parameters of a mask, and their sizes."""
    for kin, mask in masks.values():
        for row in np.flatnonzero(mask[which]).tolist():
            yield kin.rows[row].parameter, kin.rows[row].numel
