"""The ranks that share parameters: compares what they report, round by round, and says what came apart. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from rankwatch.shared.bounded import BoundedDict
from rankwatch.shared.types.fingerprint import Fingerprint

from . import inferred as learned_from
from .desync import DesyncPattern
from .findings import INHERITED, NEVER, CameApart, DesyncFindings, Onset
from .replicated_rows import ReplicatedRows
from .rounds import At, Lockstep, Memory
from .table_layout import Section, TableLayout
from .votes import RowVotes, Split, Variant

BEGINNING = At(0, 0)
"""Before the first step."""

FIRST_LOOKS = 2
"""Up to this ordinal a round has all rows."""

MAX_MOVED = 1024


@dataclass(slots=True)
class Checksums:
    """A round: what the ranks report of the parameters that they share, each value once, with its ranks."""

    step: int = 0
    is_loaded: bool = False
    is_local: bool = False
    communicates: bool = False
    has_shards: bool = False
    elements: int = 0
    """Of all parameters of a rank."""
    held: int = 0
    variants: dict[tuple[str, bool], dict[tuple[str, bytes], tuple[Section, str, list[int]]]] = field(default_factory=dict)
    """By what the parameters are, and whether their mesh is declared."""

    def add(self, section: Section, source: str, is_declared: bool, lanes: bytes, rank: int) -> int:
        """Returns how many bytes more it holds now."""
        # What is declared is one model, even if a rank has other parameters; what is not may be several.
        of_family = self.variants.setdefault(("" if is_declared else section.kin.key, is_declared), {})
        known = of_family.get((section.key, lanes))
        if known is not None:
            known[2].append(rank)
            return 0
        of_family[section.key, lanes] = section, source, [rank]
        self.held += len(lanes)
        return len(lanes)

    def take_flags(self, fingerprint: Fingerprint, layout: TableLayout) -> None:
        self.step = max(self.step, fingerprint.step)
        self.is_loaded |= fingerprint.is_loaded
        self.is_local |= fingerprint.is_local
        self.communicates |= fingerprint.communicates
        self.elements = max(self.elements, layout.elements)
        self.has_shards |= layout.has_shards


class ReplicaGroup:
    """The parameters that ``ranks`` share.

    Args:
        is_resumed: whether an earlier collector has compared them, and found them equal but for what it noted down.
        comes_apart: called before it is noted that parameters differ which nothing keeps equal.
    """

    def __init__(
        self,
        ranks: tuple[int, ...],
        gone: set[int],
        memory: Memory,
        findings: DesyncFindings,
        comes_apart: Callable[[], None],
        *,
        is_resumed: bool,
    ) -> None:
        self.ranks = ranks
        self.lockstep = Lockstep(ranks, gone, memory, Checksums, self._judge)
        self.families: dict[tuple[str, bool], ReplicatedRows] = {}
        self.times = 0
        self.last_step = NEVER
        self.most_ranks = 0
        self._findings = findings
        self._comes_apart = comes_apart
        self._is_resumed = is_resumed
        self._first_step = NEVER
        self.first_change = INHERITED if is_resumed else NEVER
        """The step of the first look that saw a parameter changed, or apart; NEVER: none did."""
        self._loaded_at = NEVER
        self._is_local = False
        self._communicates = self._communicates_early = False
        self._moved: BoundedDict[int, None] = BoundedDict(MAX_MOVED)
        """The steps at which a parameter was equal on all ranks and had changed."""

    def _judge(self, at: At, round_: Checksums) -> None:
        """Takes a round that is complete."""
        compared: list[tuple[ReplicatedRows, Section, RowVotes]] = []
        has_moved = False
        for key, reports in round_.variants.items():
            variants = [Variant(section, lanes, ranks) for (_, lanes), (section, _, ranks) in reports.items()]
            replicas = sum(len(variant.ranks) for variant in variants)
            if replicas < 2:
                continue
            family = self._family(key, reports.values())
            section, votes = family.compare(variants)
            has_moved |= family.note_equal(section, votes, round_.step)
            self.most_ranks = max(self.most_ranks, replicas)
            compared.append((family, section, votes))
        if not compared:
            return
        if self.times and any(votes.splits and not self.keeps_equal(family) for family, _, votes in compared):
            self._comes_apart()
        self._take_flags(at, round_)
        if has_moved:
            self._moved[round_.step] = None
            self._changes(round_.step)
        new = [
            (family, family.note_apart(section, votes, round_.step)) for family, section, votes in compared if votes.splits
        ]
        for family, splits in new:
            if self.keeps_equal(family):
                self._take_apart(at, round_, family, splits)
            else:
                self._learn(round_, family)
        if new and at.ordinal:
            self._changes(round_.step)

    @property
    def is_equal(self) -> bool:
        """Whether all parameters that must be equal were so when they were last compared."""
        return not any(apart.origin for family in self.families.values() for apart in family.apart.values())

    def _family(self, key: tuple[str, bool], reports: Iterable[tuple[Section, str, list[int]]]) -> ReplicatedRows:
        section, source, _ = max(reports, key=lambda one: (len(one[2]), one[0].kin.key))
        known = self.families.get((section.kin.key, key[1]))
        if known is None:
            known = self.families[section.kin.key, key[1]] = ReplicatedRows(section.kin, source, key[1])
            if known.is_declared and self._is_resumed:
                known.equal_step[:] = INHERITED
                known.looked[:] = True
        return known

    def _take_flags(self, at: At, round_: Checksums) -> None:
        self.times += 1
        self.last_step = max(self.last_step, round_.step)
        if self._first_step == NEVER:
            self._first_step = round_.step
        self._is_local |= round_.is_local
        self._communicates |= round_.communicates
        if 0 < at.ordinal <= FIRST_LOOKS:
            self._communicates_early |= round_.communicates
        if round_.is_loaded:
            self._loaded_at = max(self._loaded_at, round_.step)

    def _changes(self, step: int) -> None:
        if self.first_change == NEVER:
            self.first_change = step

    def keeps_equal(self, family: ReplicatedRows) -> bool:
        """Whether something keeps these equal at every step. Not where the training steps upon its own gradients at times."""
        return family.is_declared and not self._is_local

    # --- what something keeps equal -----------------------------------------------------------------------------------

    def _take_apart(self, at: At, round_: Checksums, family: ReplicatedRows, new: dict[Split, list[int]]) -> None:
        for split, rows in new.items():
            by_pattern: dict[tuple[DesyncPattern, Onset | None], list[int]] = {}
            for row in rows:
                by_pattern.setdefault(self._pattern_of(at, round_, family, row, split), []).append(row)
            for (pattern, onset), some in by_pattern.items():
                self._tell(round_, family, some, split, pattern, onset)

    def _pattern_of(
        self, at: At, round_: Checksums, family: ReplicatedRows, row: int, split: Split
    ) -> tuple[DesyncPattern, Onset | None]:
        """The pattern of a row that came apart; UNKNOWN with an onset where it depends on how many others did."""
        equal_step = int(family.equal_step[row])
        if self._began_apart:
            return DesyncPattern.INITIALISATION, Onset.BEGINNING
        if equal_step == NEVER:
            if round_.is_loaded:
                return DesyncPattern.LOAD, None
            return DesyncPattern.UNKNOWN, Onset.BEGINNING if at == BEGINNING else None
        if self._loaded_at > equal_step:
            return DesyncPattern.LOAD, None
        if split.has_majority:
            return DesyncPattern.ONE_RANK, None
        is_first = at.era == 0 and at.ordinal <= FIRST_LOOKS
        if is_first or self.first_change == NEVER or equal_step < self.first_change:
            return DesyncPattern.UNKNOWN, Onset.EARLY
        if split.replicas == 2:
            return DesyncPattern.ONE_RANK, None
        return DesyncPattern.UNKNOWN, Onset.LATE

    @property
    def _began_apart(self) -> bool:
        """Whether most of what is compared was never equal: what follows from that is no other origin."""
        apart = elements = 0
        for family in self.families.values():
            elements += int(family.numel[~family.is_blank].sum())
            apart += sum(
                int(family.numel[row])
                for row, one in family.apart.items()
                if one.origin is not None and one.origin.onset is Onset.BEGINNING
            )
        return 2 * apart > elements

    # --- what nothing keeps equal, as far as is known -------------------------------------------------------------------

    def _learn(self, round_: Checksums, family: ReplicatedRows) -> None:
        learned = [other for other in self.families.values() if not self.keeps_equal(other)]
        around = learned_from.Surroundings(
            step=round_.step,
            first_step=self._first_step,
            elements=round_.elements,
            communicates=self._communicates,
            communicates_early=self._communicates_early,
            moved=self._moved,
            changed=sum(int(other.changed.sum()) for other in self.families.values()),
            has_own=round_.has_shards or any(bool(other.unequal_first.any()) for other in learned),
        )
        for pattern, rows in learned_from.find(family, around):
            by_split: dict[Split, list[int]] = {}
            for row in rows:
                by_split.setdefault(family.apart[row].split, []).append(row)
            for split, some in by_split.items():
                self._tell(round_, family, some, split, pattern, None)

    def _tell(
        self,
        round_: Checksums,
        family: ReplicatedRows,
        rows: Sequence[int],
        split: Split,
        pattern: DesyncPattern,
        onset: Onset | None,
    ) -> None:
        equal_at = {family.kin.rows[row].parameter: int(family.equal_step[row]) for row in rows}
        since = min(family.apart[row].since for row in rows)
        is_declared = self.keeps_equal(family)
        found = CameApart(since, pattern, split.ranks, split.replicas, onset, is_declared, family.source, equal_at)
        origin = self._findings.add(found)
        for row in rows:
            family.apart[row].origin = origin
