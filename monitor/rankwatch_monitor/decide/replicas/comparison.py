"""The replicas of a run: takes the fingerprints of its ranks, and says what is not equal that must be. Pure.

A fingerprint costs about what a batch costs: its bytes are compared as a whole with those of the other replicas, and rows are
looked at only where these differ, or once for all ranks when a round is complete.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rankwatch.shared.types.fingerprint import LANE_BYTES, Fingerprint, FingerprintTable
from rankwatch.shared.types.frame import NO_STAGE

from .desync import Compared, Desync
from .extent import extent_of, parameters
from .findings import DesyncFindings, DesyncOrigin
from .groups.gathers import GatherGroup
from .groups.inputs import InputGroup
from .groups.replica_group import ReplicaGroup
from .patterns import NEVER
from .rounds import At, Lockstep, Memory
from .table_layout import TableLayout, layout_of

Group = TypeVar("Group", bound=Lockstep[Any])
Given = TypeVar("Given")

TABLES_OF_RANK = 4
"""Tables of one rank that are retained: the last ones."""

MAX_TABLE_ROWS = 65_536
MAX_ROWS = 2_000_000
"""Rows of one table, and of all tables of a run. What has more is not compared."""

GROUPS_OF_RANK = 64
"""Groups of ranks in which one rank takes part."""

HELD_AT_LEAST, HELD_FOR_EACH_RANK = 128 << 20, 16 << 10
"""Bytes that wait for the reports of other ranks."""

TELL_AFTER = 0.25
"""Seconds from a finding to its line: what comes apart in other groups at the same step is in the same line."""

NOTE_EVERY = 60.0
"""Seconds after which the journal has again what was compared."""


@dataclass(slots=True)
class Seat:
    """Where a rank sits with one table: the groups in which it takes part, by the number of the mesh."""

    layout: TableLayout
    replicas: dict[int, ReplicaGroup] = field(default_factory=dict)
    gathers: dict[int, GatherGroup] = field(default_factory=dict)
    inputs: InputGroup | None = None

    @property
    def alone(self) -> int:
        """How many parameters are trained that no other rank has."""
        return sum(number for mesh, number in self.layout.trained.items() if mesh not in self.replicas)


class ReplicaWatch:
    """
    Args:
        locate: returns the host and the GPU of a rank.
        rounds, rows: what the rounds and the tables of all runs of one key hold.
    """

    def __init__(
        self,
        world_size: int,
        locate: Callable[[int], tuple[str, str]],
        rounds: Memory | None = None,
        rows: Memory | None = None,
    ) -> None:
        self.findings = DesyncFindings(locate)
        self.compared: Compared | None = None
        """What was compared, as the journal has it."""
        self._world_size = world_size
        self._gone: set[int] = set()
        self._memory = Memory(HELD_AT_LEAST + HELD_FOR_EACH_RANK * world_size, rounds)
        self._rows = Memory(MAX_ROWS, rows)
        self._layouts: dict[str, TableLayout] = {}
        self._tables_of: dict[int, list[str]] = {}
        self._seats: dict[tuple[int, str], Seat] = {}
        self._replicas: dict[tuple[int, ...], ReplicaGroup] = {}
        self._gathers: dict[tuple[int, ...], GatherGroup] = {}
        self._inputs: dict[tuple[int, ...], InputGroup] = {}
        self._groups_of: dict[int, list[Lockstep[Any]]] = {}
        self._before: Compared | None = None
        """What an earlier collector compared."""
        self._news_since: float | None = None
        self._noted_at = float("-inf")

    # --- what ranks send ----------------------------------------------------------------------------------------------

    def take_table(self, rank: int, table: FingerprintTable) -> str:
        """Returns why its fingerprints will not be compared; empty: they will."""
        of_rank = self._tables_of.setdefault(rank, [])
        if table.id in of_rank:
            of_rank.remove(table.id)
        of_rank.append(table.id)
        if len(of_rank) > TABLES_OF_RANK:
            self._forget_table(rank, of_rank.pop(0))
        if table.id in self._layouts:
            return ""
        if len(table.rows) > MAX_TABLE_ROWS:
            return f"a fingerprint table of {len(table.rows)} rows is over the limit of {MAX_TABLE_ROWS}"
        if not self._rows.has(len(table.rows)):
            held = f"the fingerprint tables of this run have {self._rows.held} rows"
            return f"{held}, and there is no room for {len(table.rows)} more"
        self._rows.add(len(table.rows))
        self._layouts[table.id] = layout_of(table)
        return ""

    def knows(self, rank: int, table_id: str) -> bool:
        return table_id in self._tables_of.get(rank, ())

    def take(self, rank: int, stage: int, fingerprint: Fingerprint) -> str:
        """Takes the fingerprint of a table that is known; returns why it is refused, empty: it is not."""
        seat = self._seats.get((rank, fingerprint.table_id))
        if seat is None:
            layout = self._layouts.get(fingerprint.table_id)
            if layout is None:
                return ""  # the table was refused
            seat = self._seats[rank, fingerprint.table_id] = self._seat(rank, stage, layout)
        slot = seat.layout.of(fingerprint.slot)
        gathers, inputs = fingerprint.gathers, fingerprint.inputs
        if (
            len(fingerprint.lanes) != slot.size
            or len(gathers) not in (0, slot.gathers_size)
            or len(inputs) not in (0, LANE_BYTES)
        ):
            return f"the fingerprint of step {fingerprint.step} does not fit its table"
        self._gone.discard(rank)
        at = At(fingerprint.era, fingerprint.ordinal)
        for section in slot.sections:
            group = seat.replicas.get(section.mesh)
            if group is not None and (checksums := group.enter(rank, at)) is not None:
                checksums.add(rank, fingerprint, section, seat.layout)
        for section in slot.gathers if gathers else ():
            gather = seat.gathers.get(section.mesh)
            if gather is not None and (sums := gather.enter(rank, at)) is not None:
                sums.add(rank, fingerprint, section)
        if seat.inputs is not None and inputs and (data := seat.inputs.enter(rank, at)) is not None:
            data.add(rank, fingerprint)
        for joined in self._groups_of.get(rank, ()):
            joined.arrive(rank, at)
        return ""

    def leave(self, rank: int) -> None:
        """The rank reports nothing more, until it does."""
        self._gone.add(rank)
        for group in self._groups_of.get(rank, ()):
            group.leave(rank)

    def end(self) -> None:
        """No rank reports anything more."""
        groups: list[Lockstep[Any]] = [*self._replicas.values(), *self._gathers.values(), *self._inputs.values()]
        for group in groups:
            group.end()

    def forget(self) -> None:
        """After the end: only what was found and what was compared is retained. A rank that comes back sends its tables again."""
        self._rows.add(-self._rows.held)
        self._before = self.compared
        self._layouts, self._tables_of, self._seats, self._groups_of = {}, {}, {}, {}
        self._replicas, self._gathers, self._inputs = {}, {}, {}

    # --- what is told -------------------------------------------------------------------------------------------------

    def is_due(self, now: float) -> bool:
        """Whether there are findings to tell and to note down."""
        if not self.findings.is_news:
            return False
        if self._news_since is None:
            self._news_since = now
        return now - self._news_since >= TELL_AFTER

    def take_news(self) -> tuple[tuple[Desync, ...], list[DesyncOrigin]]:
        """The entries to note down in the journal, and the origins to tell of."""
        self._news_since = None
        if not self.findings.origins and not self.findings.is_news:
            return (), []
        alone: dict[int, int] = {}
        for (rank, _), seat in self._seats.items():
            alone[rank] = max(alone.get(rank, 0), seat.alone)
        return self.findings.news(extent_of(self._replicas.values(), alone))

    def restore(self, entries: tuple[Desync, ...], unkept: int) -> None:
        self.findings.restore(entries)
        self.findings.unkept = unkept

    def restore_compared(self, compared: Compared) -> None:
        self.compared = compared

    def resume(self) -> None:
        """What was compared so far, an earlier collector compared."""
        self._before = self.compared

    def note_compared(self, now: float, *, at_once: bool) -> Compared | None:
        """What was compared, if the journal is to have it now."""
        if not at_once and now - self._noted_at < NOTE_EVERY:
            return None
        current = self._count_compared() or self.compared or self._count_equal()
        if current is None or current == self.compared:
            return None
        self.compared, self._noted_at = current, now
        return current

    def _count_compared(self) -> Compared | None:
        groups: list[ReplicaGroup | GatherGroup] = [group for group in self._replicas.values() if group.times]
        groups += [gather for gather in self._gathers.values() if gather.times]
        counted = parameters(
            (family, family.counted) for group in self._replicas.values() for family in group.families.values()
        )
        names = counted.keys() | {name for gather in self._gathers.values() for name in gather.parameters}
        if not names:
            return None
        compared = Compared(
            step=max(group.last_step for group in groups),
            parameters=len(names),
            ranks=len({rank for group in groups for rank in group.ranks} - self._never_seen()),
            times=max(group.times for group in groups),
            equal=all(group.is_equal for group in self._replicas.values()),
        )
        if (before := self._before) is None:
            return compared
        return Compared(
            max(compared.step, before.step), max(compared.parameters, before.parameters),
            max(compared.ranks, before.ranks), compared.times + before.times, compared.equal,
        )  # fmt: skip

    def _count_equal(self) -> Compared | None:
        """What was equal once. What may differ is not counted: after a burst of fingerprints, that may be all there is."""
        groups = [group for group in self._replicas.values() if group.times_equal]
        if not groups:
            return None
        families = [family for group in groups for family in group.of_parameters]
        equal = parameters((family, family.equal_step != NEVER) for family in families)
        step = max(int(family.equal_step.max()) for family in families)
        ranks = {rank for group in groups for rank in group.ranks} - self._never_seen()
        return Compared(step, len(equal), len(ranks), max(group.times_equal for group in groups), True)

    def _never_seen(self) -> set[int]:
        return {rank for rank in self._groups_of if rank not in self._tables_of}

    # --- ranks and their groups ---------------------------------------------------------------------------------------

    def _seat(self, rank: int, stage: int, layout: TableLayout) -> Seat:
        seat = Seat(layout)
        for number, mesh in enumerate(layout.meshes):
            # The stages of a pipeline have models of their own, and what nothing keeps equal may be any of them.
            if not mesh.mesh.is_declared and stage != NO_STAGE:
                continue
            replicas, shards = mesh.replicas_of(rank), mesh.shards_of(rank)
            if (group := self._group(self._replicas, ReplicaGroup, replicas, self._before is not None)) is not None:
                seat.replicas[number] = group
            if (gather := self._group(self._gathers, GatherGroup, shards, mesh.mesh)) is not None:
                seat.gathers[number] = gather
        if layout.inputs is not None and layout.inputs.mesh.is_declared and rank in layout.inputs.mesh.ranks:
            seat.inputs = self._group(self._inputs, InputGroup, tuple(sorted(layout.inputs.mesh.ranks)), layout.inputs)
        return seat

    def _group(
        self,
        known: dict[tuple[int, ...], Group],
        make: Callable[[tuple[int, ...], set[int], Memory, DesyncFindings, Given], Group],
        ranks: tuple[int, ...],
        given: Given,
    ) -> Group | None:
        """The group of these ranks, which is made if it is not known. None: there can be none."""
        found = known.get(ranks)
        if found is None and self._may_have(ranks):
            found = known[ranks] = make(ranks, self._gone, self._memory, self.findings, given)
            for rank in ranks:
                self._groups_of.setdefault(rank, []).append(found)
        return found

    def _may_have(self, ranks: tuple[int, ...]) -> bool:
        """Whether there can be a group of these ranks, and room for it."""
        return (
            len(ranks) > 1
            and ranks[-1] < self._world_size
            and all(len(self._groups_of.get(rank, ())) < GROUPS_OF_RANK for rank in ranks)
        )

    def _forget_table(self, rank: int, table_id: str) -> None:
        self._seats.pop((rank, table_id), None)
        if not any(table_id in some for some in self._tables_of.values()):
            layout = self._layouts.pop(table_id, None)
            self._rows.add(0 if layout is None else -layout.rows)
