"""What waits for the disk, run by run. Pure: the clock is passed in.

What a transaction that failed was to store is held, in order, and tried again. Batches find no room over a bound, and are a gap
of the record; all other facts, which decide what a report says, have a bound of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rankwatch.shared.types import messages

from ...decide.core.effects import Show
from ...decide.core.gaps import END, Gap, Gaps
from ...decide.core.journal import NO_RANK, Entry, InTurn, Trained
from ...record import facts
from ...record.disk import OURS

FIRST_RETRY, LAST_RETRY = 0.25, 5.0
"""Seconds from a failure to the next try; each time twice as long."""


class FileWrite(NamedTuple):
    """Writes a file beside the record, once all before it is recorded.

    ``without_record``: done once while another process has locked the record, whom nobody knows how long to wait for.
    """

    do: Callable[[], None]
    without_record: Callable[[], None] = lambda: None


MANY = 1000
"""Entries of one key that wait: with so many, a disk that refuses nothing does not answer either, and facts are counted."""

MAX_ACTIONS = 1000
"""Files of one run, such as traces, that wait for its record."""


def size_of(entry: Entry) -> int:
    """About how many bytes a batch takes; 0 for any other fact: they are few."""
    fact = entry.fact
    return 2 * fact.table.column_bytes + fact.table.rows if isinstance(fact, Trained) else 0


def seqs_of(entries: Sequence[Entry]) -> dict[int, int]:
    """The last sequence number of each rank among these entries. What went ahead has none."""
    numbered = Trained, InTurn, messages.Sequenced
    return {rank: fact.seq for _, rank, fact in entries if isinstance(fact, numbered) and fact.seq}


class Weight(NamedTuple):
    """What waits: how many entries, and the bytes of ``batches`` and of other ``facts``."""

    entries: int
    batches: int
    facts: int


@dataclass(slots=True)
class Waiting:
    """Bytes that wait for the disk. Half of what is free is for any one run, three quarters for all of one key."""

    total: int = 0
    _of_key: Counter[str] = field(default_factory=Counter)

    def add(self, key: str, size: int) -> None:
        self.total += size
        self._of_key[key] += size

    def room(self, most: int, key: str, of_run: int) -> int:
        """How many more may wait of a run of which so many do, if ``most`` may in all."""
        free, of_key = most - self.total, self._of_key[key]
        return min((free - of_run) // 2, (free + of_key) * 3 // 4 - of_key)


@dataclass(slots=True)
class Held:
    """What waits of one run. ``size``: bytes of batches; ``bulk``: of other facts, counted while the disk fails or is behind."""

    run: str
    entries: list[Entry] = field(default_factory=list)
    size: int = 0
    bulk: int = 0
    taken_bulk: int = 0
    """What of it is in the transaction under way."""
    shown: Show | None = None
    actions: list[FileWrite] = field(default_factory=list)
    taken: list[Entry] = field(default_factory=list)
    """The entries of the transaction under way."""
    why: str = ""
    """Why the last try failed; empty: it did not."""
    retry_at: float = float("-inf")
    is_recordless: bool = False
    """An error of ours ended its record."""
    past: Gap | None = None
    """What was stored, where the file that had it is gone."""
    lost: Gaps = field(default_factory=Gaps)
    _delay: float = 0.0

    @property
    def is_failing(self) -> bool:
        return bool(self.why and (self.entries or self.actions))

    @property
    def is_idle(self) -> bool:
        return not (self.entries or self.taken or self.shown or self.actions or self.why)

    def is_due(self, now: float) -> bool:
        return now >= self.retry_at and bool(self.entries or self.shown or self.actions)

    @property
    def weight(self) -> Weight:
        return Weight(len(self.entries) + len(self.taken), self.size, self.bulk)

    def append(self, entries: Sequence[Entry], room: int, bulk_room: int, why: str, *, is_behind: bool = False) -> None:
        """Takes what there is room for; the rest is lost, because ``why``. ``is_behind``: the disk does not answer."""
        for entry in entries:
            size = size_of(entry)
            bulk = len(facts.encode(entry.fact)[1]) if (self.why or is_behind) and not size else 0
            if self.is_recordless or size > room or bulk > bulk_room:
                self.lose([entry], OURS if self.is_recordless else self.why or why)
                continue
            room, bulk_room = room - size, bulk_room - bulk
            self.size += size
            self.bulk += bulk
            self.entries.append(entry)

    def begin(self) -> tuple[list[Entry], Show | None]:
        self.taken, self.entries, self.taken_bulk = self.entries, [], self.bulk
        shown, self.shown = self.shown, None
        return self.taken, shown

    def succeed(self) -> Mapping[int, int]:
        """The sequence numbers that are stored by now."""
        done, self.taken = self.taken, []
        self.size -= sum(map(size_of, done))
        self.bulk -= self.taken_bulk
        self.why, self.retry_at, self._delay = "", float("-inf"), 0.0
        return seqs_of(done)

    def fail(self, why: str, now: float) -> None:
        self.entries[:0] = self.taken
        self.taken = []
        self._delay = min(2 * self._delay, LAST_RETRY) or FIRST_RETRY
        self.why, self.retry_at = why, now + self._delay

    def give_up(self, why: str) -> None:
        """All that waits is lost."""
        self.lose([*self.taken, *self.entries], why)
        self.lost.take([self.past] if self.past else [])
        self.past = None
        self.size = self.bulk = 0
        self.entries, self.taken, self.shown, self.why, self.retry_at = [], [], None, "", float("-inf")

    def lose(self, entries: Sequence[Entry], why: str) -> None:
        for entry in entries:
            add_to(self.lost, entry, why)

    def unstored(self, *, all_of_it: bool, why: str) -> tuple[Gap, ...]:
        """What is lost, and what the disk refused so far; or all that waits, with ``why``."""
        gaps = Gaps()
        gaps.take([*self.lost.all(), self.past] if self.past else self.lost.all())
        if self.why or all_of_it:
            for entry in [*self.taken, *self.entries]:
                add_to(gaps, entry, self.why or why)
        return gaps.all()


def add_to(gaps: Gaps, entry: Entry, why: str) -> None:
    if isinstance(entry.fact, Trained):
        gaps.add(entry.rank, entry.fact.summary.batch, entry.fact.summary.batch, why)
    else:
        gaps.add(NO_RANK, END, END, why)
