"""The batches of a run: their frame tables, the batches themselves, and which of them are not on record."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rankwatch.shared.types import messages
from rankwatch.shared.types.frame import NO_LOSS

from ..keys.tables import FrameTables
from ..trip.trip_desk import TripDesk
from .books import Books, Desk
from .effects import Effect, RecordTrace, Send
from .gaps import CAME_LATE, CUT_SHORT, SPOOL_FULL, Gap, Gaps
from .journal import Closed, Entry, Trained
from .rank import Rank
from .report import RankState


@dataclass(slots=True)
class BatchDesk(Desk):
    """``trips``: is told how each rank counts, and its losses."""

    books: Books = field(repr=False)
    trips: TripDesk = field(repr=False)
    tables: FrameTables
    gaps: Gaps = field(default_factory=Gaps)
    _gaps_noted: set[Gap] = field(default_factory=set)

    def take(self, rank: Rank, message: messages.Batch, now: float) -> list[Effect]:
        """By far the most frequent message. It mostly has no effect, so no generator is made for it."""
        summary = message.summary
        table = self.tables.get(summary.table_id)
        if table is None:
            # The batch is not taken: after the new HELLO the rank sends it again, and its table before it.
            text = f"the frame table of batch {summary.batch} is not known here"
            return [Send(rank.peer, messages.Error(text, "hello"))]
        effects: list[Effect] = []
        if rank.is_news(message.seq, is_recorded=True):
            self.tables.use(table.id)
            if summary.fits(table):
                self.books.journal.append(Entry(now, rank.hello.rank, Trained(message.seq, summary, table)))
                self._note_missed(rank, summary.batch)
                loss = summary.loss(table) if table.losses else NO_LOSS
                is_next = summary.batch > rank.last_batch
                rank.take(summary.batch, summary.optimizer_step, summary.first_frame, len(table.specs), loss)
                if summary.memory:
                    rank.device_memory.take(summary.batch, summary.memory)
                self.trips.losses.take(rank.number, summary, table)
                if is_next:
                    self.trips.count(rank, summary.batch, summary.optimizer_step, now)
                if summary.traced:
                    effects.append(RecordTrace(self.books.id, rank.number, summary, table))
            else:
                text = f"batch {summary.batch} does not fit its frame table"
                effects.append(Send(rank.peer, messages.Error(text, "none")))
        return effects

    def end(self, ranks: Iterable[Rank]) -> None:
        """The run ends. Of a rank that was ended, whole batches may never have come: by its last beat it was further."""
        for rank in ranks:
            first, last = rank.last_batch + 1, rank.furthest_batch
            if rank.queued > last - first > 0 and rank.state in (RankState.ABORTED, RankState.LOST):
                self.gaps.add(rank.number, first, last, CUT_SHORT)
        self.note_gaps()

    def note_gaps(self) -> None:
        """Not while the disk takes nothing: a gap that grows would be noted again and again."""
        for gap in self.gaps.all():
            if gap not in self._gaps_noted:
                self.books.find(0.0, gap)

    def apply(self, entry: Entry) -> None:
        match entry.fact:
            case Gap() as gap:
                self.gaps.take([gap])
                self._gaps_noted.add(gap)
            case Closed():
                self.tables.clear()

    def _note_missed(self, rank: Rank, batch: int) -> None:
        """A part of this batch came: are there batches before it that never did?"""
        missed, rank.missed = rank.missed, 0
        if missed and batch > rank.last_batch + 1:
            is_known = rank.last_batch >= 0
            first = rank.last_batch + 1 if is_known else max(0, batch - missed)
            self.gaps.add(rank.number, first, batch - 1, SPOOL_FULL if is_known else CAME_LATE)
