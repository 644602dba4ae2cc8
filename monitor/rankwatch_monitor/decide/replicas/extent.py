"""How much came apart together, over all groups of ranks: that tells patterns apart which begin alike. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from .groups.replica_group import ReplicaGroup
from .groups.replicated_rows import ReplicatedRows
from .patterns import CameApart, Extent, Since
from .table_layout import Kin

MOST = 8
"""Nothing is synchronised where so many times more parameters came apart than stayed equal: those may only have decayed."""

Mask = npt.NDArray[np.bool_]


def extent_of(groups: Iterable[ReplicaGroup], alone: Mapping[int, int]) -> Extent:
    """``alone``: of each rank, how many parameters it trains that have no replicas."""
    declared = [(group, family) for group in groups for family in group.families.values() if group.keeps_equal(family)]
    families = [family for _, family in declared]
    known = parameters((family, family.looked) for family in families)
    drawn = parameters((family, family.looked & ~family.is_blank) for family in families)
    seen = parameters((family, family.equal_step >= max(group.first_change, 0)) for group, family in declared)
    changed = parameters((family, family.changed & ~_mask(family, family.apart)) for family in families)
    never_equal = parameters((family, _mask(family, family.found_since(Since.BEGINNING))) for family in families)
    first = [(family, _of_all_ranks(family, Since.FIRST_CHANGE)) for family in families]
    early = parameters((family, _mask(family, found)) for family, found in first)
    later = parameters((family, _mask(family, _of_all_ranks(family, Since.LATER))) for family in families)
    ranks = {rank for _, found in first for one in found.values() for rank in one.split.ranks}
    others = len(changed.keys() - early.keys()) + max((alone.get(rank, 0) for rank in ranks), default=0)
    return Extent(
        most_never_equal=len(never_equal) > 1 and 2 * sum(never_equal.values()) > sum(drawn.values()),
        most_unseen=2 * len(early.keys() | seen.keys()) < len(known),
        others_change=len(early) <= MOST * others,
        most_later=2 * len(later) > len(known),
    )


def _of_all_ranks(family: ReplicatedRows, since: Since) -> dict[int, CameApart]:
    """Without a majority, nothing says that it is about some ranks alone."""
    return {row: found for row, found in family.found_since(since).items() if not found.split.has_majority}


def _mask(family: ReplicatedRows, rows: Iterable[int]) -> Mask:
    mask = np.zeros(len(family.kin.rows), np.bool_)
    mask[list(rows)] = True
    return mask


def parameters(masks: Iterable[tuple[ReplicatedRows, Mask]]) -> dict[str, int]:
    """The parameters of some rows, and their sizes. Groups that share the same ones are looked at together: there may be
    thousands.
    """
    united: dict[str, tuple[Kin, Mask]] = {}
    for family, mask in masks:
        known = united.get(family.kin.key)
        united[family.kin.key] = family.kin, mask if known is None else known[1] | mask
    chosen = (kin.rows[row] for kin, mask in united.values() for row in np.flatnonzero(mask).tolist())
    return {row.parameter: row.numel for row in chosen}
