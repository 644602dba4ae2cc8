"""Row by row: on which ranks a checksum is another one than on the majority of the replicas. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from rankwatch.shared.types.fingerprint import UNKNOWN

from .table_layout import Section

Lanes: TypeAlias = npt.NDArray[np.uint64]
"""One row for each parameter: its two lanes."""

UNKNOWN_LANES = np.frombuffer(UNKNOWN, "<u8")
_MIXED = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F], np.uint64)
"""Makes one number of two lanes, to group equal ones. Whether two are equal is asked of the lanes themselves."""


class Variant(NamedTuple):
    """The same checksums of the same section, from these ranks."""

    section: Section
    lanes: bytes
    ranks: Sequence[int]


class Split(NamedTuple):
    """``ranks`` of the ``replicas`` that were compared differ from the majority; without one: from each other."""

    ranks: tuple[int, ...]
    replicas: int
    has_majority: bool


class RowVotes(NamedTuple):
    """Of each row: whether it is ``equal`` on all ranks that know it, the lanes of those, and how the others are ``split``."""

    equal: npt.NDArray[np.bool_]
    lanes: Lanes
    splits: dict[Split, list[int]]


def lanes_of(data: bytes) -> Lanes:
    return np.frombuffer(data, "<u8").reshape(-1, 2)


def are_known(data: bytes) -> bool:
    """Whether no checksum of these is UNKNOWN."""
    return data.find(UNKNOWN) < 0 or bool((lanes_of(data) != UNKNOWN_LANES).any(1).all())


def project(variant: Variant, onto: Section) -> Lanes:
    """The variant's lanes in the rows of another section: by name, dtype and size. UNKNOWN where it has no such row."""
    lanes = lanes_of(variant.lanes)
    if variant.section.key == onto.key:
        return lanes
    places = {variant.section.kin.rows[at][:3]: place for place, at in enumerate(variant.section.chosen.tolist())}
    found = np.full((len(onto.chosen), 2), UNKNOWN_LANES, np.uint64)
    for place, at in enumerate(onto.chosen.tolist()):
        other = places.get(onto.kin.rows[at][:3])
        if other is not None:
            found[place] = lanes[other]
    return found


def count(stack: npt.NDArray[np.uint64], ranks: Sequence[Sequence[int]]) -> RowVotes:
    """The votes on each row. ``stack``: of each variant and row, the two lanes; ``ranks``: of each variant."""
    sizes = np.array([len(some) for some in ranks])
    known = (stack != UNKNOWN_LANES).any(2)
    rows = np.arange(stack.shape[1])
    lanes = stack[known.argmax(0), rows]
    differs = ((stack != lanes).any(2) & known).any(0)
    equal = ~differs & ((known * sizes[:, None]).sum(0) >= 2)
    splits: dict[Split, list[int]] = {}
    mixed = (stack * _MIXED).sum(2, dtype=np.uint64)
    seen: dict[bytes, Split] = {}
    for row in np.flatnonzero(differs).tolist():
        voters = np.flatnonzero(known[:, row])
        _, groups = np.unique(mixed[voters, row], return_inverse=True)
        key = voters.tobytes() + groups.tobytes()
        split = seen.get(key)
        if split is None:
            split = seen[key] = _split(groups, voters, sizes, ranks)
        splits.setdefault(split, []).append(row)
    return RowVotes(equal, lanes, splits)


def _split(
    groups: npt.NDArray[np.int64],
    voters: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64],
    ranks: Sequence[Sequence[int]],
) -> Split:
    votes = np.bincount(groups, weights=sizes[voters])
    total, top = int(votes.sum()), int(votes.argmax())
    has_majority = 2 * int(votes[top]) > total
    apart = voters[groups != top] if has_majority else voters
    return Split(tuple(sorted(rank for voter in apart.tolist() for rank in ranks[voter])), total, has_majority)
