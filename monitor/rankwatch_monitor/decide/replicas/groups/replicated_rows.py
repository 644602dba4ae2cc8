"""What is known of the parameters that the same ranks share: since when each is equal, or apart. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rankwatch.shared.types.fingerprint import OF_BUFFERS

from ..patterns import NEVER, CameApart, Since
from ..table_layout import Kin, Section
from ..votes import Lanes, RowVotes, Split, Variant, are_known, count, lanes_of, project


@dataclass(slots=True)
class Apart:
    """A parameter that is not equal on all ranks, since the look of step ``since``; ``looks`` are all since then.

    ``found``: what is told of it. None: nothing, as the ranks may differ in it.
    """

    since: int
    split: Split
    looks: list[int]
    found: CameApart | None = None


class ReplicatedRows:
    """The parameters of ``kin`` on the ranks of a group. ``source`` and ``is_declared`` are those of their mesh."""

    def __init__(self, kin: Kin, source: str, is_declared: bool) -> None:
        rows = len(kin.rows)
        self.kin = kin
        self.source = source
        self.is_declared = is_declared
        self.is_of_buffers = source == OF_BUFFERS
        self.numel = np.array([row.numel for row in kin.rows], np.int64)
        self.trainable = np.array([row.is_trainable for row in kin.rows], np.bool_)
        self.looked = np.zeros(rows, np.bool_)
        self.unequal_first = np.zeros(rows, np.bool_)
        """Whether the parameter differed when it was first looked at."""
        self.began_zero = np.zeros(rows, np.bool_)
        """Whether it was zero on all ranks then: so are shards, and whatever each rank has of its own."""
        self.changed = np.zeros(rows, np.bool_)
        """Whether its value was another one than before, and equal on all ranks."""
        self.rejoined = np.zeros(rows, np.bool_)
        """Whether it was apart, and equal again."""
        self.modules = np.array([row.parameter.rpartition(".")[0] for row in kin.rows], np.object_)
        self.equal_step = np.full(rows, NEVER, np.int64)
        self.apart: dict[int, Apart] = {}
        self._lanes: Lanes = np.zeros((rows, 2), np.uint64)
        """The last values that were equal."""

    def compare(self, variants: Sequence[Variant]) -> tuple[Section, RowVotes]:
        """The votes on the rows of the section that most ranks have sent; the others' rows are found by name."""
        if len(variants) == 1 and are_known(variants[0].lanes):
            section = variants[0].section
            rows = len(section.chosen)
            return section, RowVotes(np.ones(rows, np.bool_), lanes_of(variants[0].lanes), {})
        sizes: dict[str, int] = {}
        for variant in variants:
            sizes[variant.section.key] = sizes.get(variant.section.key, 0) + len(variant.ranks)
        section = max((v.section for v in variants), key=lambda one: (sizes[one.key], -len(one.chosen), one.key))
        return section, count(np.stack([project(v, section) for v in variants]), [v.ranks for v in variants])

    def note_equal(self, section: Section, votes: RowVotes, step: int) -> bool:
        """Takes the rows that are equal on all ranks; returns whether any of them has changed since it was last equal."""
        chosen, lanes = section.chosen, votes.lanes
        if votes.splits or not votes.equal.all():
            chosen, lanes = chosen[votes.equal], lanes[votes.equal]
        moved = (self._lanes[chosen] != lanes).any(1) & (self.equal_step[chosen] >= 0)
        self.began_zero[chosen] |= ~self.looked[chosen] & ~lanes.any(1)
        self._lanes[chosen] = lanes
        self.equal_step[chosen] = step
        self.looked[chosen] = True
        if self.apart:
            for row in chosen.tolist():
                if self.apart.pop(row, None) is not None:
                    self.rejoined[row] = True
        if not moved.any():
            return False
        self.changed[chosen[moved]] = True
        return True

    def note_apart(self, section: Section, votes: RowVotes, step: int) -> list[int]:
        """Takes the rows that differ; returns those that were not apart yet."""
        new: list[int] = []
        for split, places in votes.splits.items():
            for row in section.chosen[places].tolist():
                known = self.apart.get(row)
                if known is None:
                    self.apart[row] = Apart(step, split, [step])
                    new.append(row)
                else:
                    known.split = split
                    if len(known.looks) < _LOOKS:
                        known.looks.append(step)
                if not self.looked[row]:
                    self.looked[row] = self.unequal_first[row] = True
        return new

    @property
    def is_blank(self) -> npt.NDArray[np.bool_]:
        """Which parameters are zero on all ranks, or have nothing in their shard: with any seed they are equal."""
        blank: npt.NDArray[np.bool_] = (self.equal_step >= 0) & ~self._lanes.any(1)
        return blank

    @property
    def counted(self) -> npt.NDArray[np.bool_]:
        """Which parameters were compared, of those that must be equal or have been, or of which it was told that they differ."""
        if self.is_declared:
            return self.looked
        if self.is_of_buffers:
            return np.zeros_like(self.looked)
        counted = self.looked & (self.rejoined | ~self.unequal_first)
        for row, apart in self.apart.items():
            counted[row] = apart.found is not None
        return counted

    def found_since(self, since: Since) -> dict[int, CameApart]:
        """What was found of the rows that are apart since then."""
        return {row: one.found for row, one in self.apart.items() if one.found is not None and one.found.since is since}


_LOOKS = 64
"""Looks at which a parameter was apart that are remembered."""
