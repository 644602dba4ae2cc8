"""The ranks that share parameters: compares what they report, round by round, and says what came apart. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rankwatch.shared.bounded import BoundedDict
from rankwatch.shared.types.fingerprint import Fingerprint

from ..findings import DesyncFindings
from ..patterns import INHERITED, NEVER, CameApart, Since
from ..rounds import At, Lockstep, Memory, Round
from ..table_layout import Section, TableLayout
from ..votes import RowVotes, Split, Variant
from . import inferred
from .replicated_rows import ReplicatedRows

BEGINNING = At(0, 0)
"""Before the first step."""

FIRST_LOOKS = 2
"""Up to this ordinal a round has all rows."""

MAX_MOVED = 1024


@dataclass(slots=True)
class Checksums(Round):
    """What the ranks report of the parameters that they share, each value once, with its ranks."""

    is_loaded: bool = False
    is_local: bool = False
    communicates: bool = False
    has_shards: bool = False
    elements: int = 0
    """Of all parameters of a rank."""
    variants: dict[tuple[str, bool], dict[tuple[str, bytes], tuple[Section, str, list[int]]]] = field(default_factory=dict)
    """By what the parameters are, and whether their mesh is declared."""

    def add(self, rank: int, fingerprint: Fingerprint, section: Section, layout: TableLayout) -> None:
        self.step = max(self.step, fingerprint.step)
        self.is_loaded |= fingerprint.is_loaded
        self.is_local |= fingerprint.is_local
        self.communicates |= fingerprint.communicates
        self.elements = max(self.elements, layout.elements)
        self.has_shards |= layout.has_shards
        mesh, lanes = layout.meshes[section.mesh].mesh, fingerprint.lanes[section.start : section.end]
        # What is declared is one model, even if a rank has other parameters; what is not may be several.
        of_family = self.variants.setdefault(("" if mesh.is_declared else section.kin.key, mesh.is_declared), {})
        known = of_family.get((section.key, lanes))
        if known is not None:
            known[2].append(rank)
        else:
            of_family[section.key, lanes] = section, mesh.source, [rank]
            self.held += len(lanes)


class ReplicaGroup(Lockstep[Checksums]):
    """The parameters that ``ranks`` share.

    Args:
        is_resumed: whether an earlier collector has compared them, and found them equal but for what it noted down.
    """

    def __init__(
        self, ranks: tuple[int, ...], gone: set[int], memory: Memory, findings: DesyncFindings, is_resumed: bool
    ) -> None:
        super().__init__(ranks, gone, memory, Checksums)
        self.families: dict[tuple[str, bool], ReplicatedRows] = {}
        self.times_equal = 0
        """Rounds in which a parameter was equal."""
        self._findings = findings
        self._is_resumed = is_resumed
        self._first_step = NEVER
        self.first_change = INHERITED if is_resumed else NEVER
        """The step of the first look that saw a parameter changed, or apart; NEVER: none did."""
        self._loaded_at = NEVER
        self._is_local = False
        self._communicates = self._communicates_early = False
        self._moved: BoundedDict[int, None] = BoundedDict(MAX_MOVED)
        """The steps at which a parameter was equal on all ranks and had changed."""

    def judge(self, at: At, round_: Checksums) -> None:
        compared: list[tuple[ReplicatedRows, Section, RowVotes]] = []
        has_moved = False
        for key, reports in round_.variants.items():
            variants = [Variant(section, lanes, ranks) for (_, lanes), (section, _, ranks) in reports.items()]
            if sum(len(variant.ranks) for variant in variants) < 2:
                continue
            family = self._family(key, reports.values())
            section, votes = family.compare(variants)
            has_moved |= family.note_equal(section, votes, round_.step)
            compared.append((family, section, votes))
        if not compared:
            return
        self._take_flags(at, round_)
        self.times_equal += any(bool(votes.equal.any()) for family, _, votes in compared if not family.is_of_buffers)
        if has_moved:
            self._moved[round_.step] = None
            self._changes(round_.step)
        new = [
            (family, family.note_apart(section, votes, round_.step)) for family, section, votes in compared if votes.splits
        ]
        for family, rows in new:
            if self.keeps_equal(family):
                self._tell(family, {row: self._since(at, round_, int(family.equal_step[row])) for row in rows})
            else:
                self._infer(round_, family)
        if new and at.ordinal:
            self._changes(round_.step)

    @property
    def is_equal(self) -> bool:
        """Whether all parameters that must be equal were so when they were last compared."""
        return not any(apart.found for family in self.of_parameters for apart in family.apart.values())

    @property
    def of_parameters(self) -> list[ReplicatedRows]:
        """The families but those of buffers, which are told when they differ and are no replicas."""
        return [family for family in self.families.values() if not family.is_of_buffers]

    def keeps_equal(self, family: ReplicatedRows) -> bool:
        """Whether something keeps these equal at every step. Not where the training steps upon its own gradients at times."""
        return family.is_declared and not self._is_local

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
        self.count(round_.step)
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

    def _since(self, at: At, round_: Checksums, equal_at: int) -> Since:
        """``equal_at``: the last step at which a row was equal that is apart now."""
        if equal_at == NEVER:
            if round_.is_loaded:
                return Since.LOAD
            return Since.BEGINNING if at == BEGINNING else Since.UNSEEN
        if self._loaded_at > equal_at:
            return Since.LOAD
        is_first = at.era == 0 and at.ordinal <= FIRST_LOOKS
        is_before_changes = self.first_change == NEVER or equal_at < self.first_change
        return Since.FIRST_CHANGE if is_first or is_before_changes else Since.LATER

    def _infer(self, round_: Checksums, family: ReplicatedRows) -> None:
        """Of what nothing keeps equal, as far as is known, only what is surely not meant is told."""
        others = [other for other in self.families.values() if not self.keeps_equal(other)]
        around = inferred.Surroundings(
            step=round_.step,
            first_step=self._first_step,
            elements=round_.elements,
            communicates=self._communicates,
            communicates_early=self._communicates_early,
            moved=self._moved,
            changed=sum(int(other.changed.sum()) for other in self.families.values()),
            has_own=round_.has_shards or any(bool(other.unequal_first.any()) for other in others),
        )
        rows, trains_alone = inferred.find(family, around)
        self._tell(family, {row: inferred.since(family, row) for row in rows}, trains_alone=trains_alone)

    def _tell(self, family: ReplicatedRows, found: Mapping[int, Since], *, trains_alone: bool = False) -> None:
        """``found``: since when each of these rows is apart."""
        together: dict[tuple[Split, Since], list[int]] = {}
        for row, since in found.items():
            together.setdefault((family.apart[row].split, since), []).append(row)
        for (split, since), rows in together.items():
            step = min(family.apart[row].since for row in rows)
            equal_at = {family.kin.rows[row].parameter: int(family.equal_step[row]) for row in rows}
            is_declared = self.keeps_equal(family)
            apart = CameApart(step, split, since, is_declared, family.source, equal_at, trains_alone=trains_alone)
            self._findings.add(apart)
            for row in rows:
                family.apart[row].found = apart
