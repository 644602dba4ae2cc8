"""What one key may cause here, and one rank. Over it that key or rank has to wait; the others have budgets of their own. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from rankwatch.shared.link.allowance import Allowance
from rankwatch.shared.types.fields import MAX_RANKS

from ..replicas.rounds import Memory
from .tables import TableRoom

MAX_RUNS = 1024
"""Runs under way that one key began. One without a connected rank makes room for the next; a training starts in any case."""

RUNS_PER_SECOND = 4.0
"""New runs of one key, beyond the first ``MAX_RUNS``: each one is a folder."""

PLACES_PER_SECOND, PLACES_AT_ONCE = 1024.0, 4.0 * MAX_RANKS
"""Ranks in the worlds of these runs: a report has a row for each of them, also of those that never connect."""

CHANGES_PER_SECOND, CHANGES_AT_ONCE = 1.0, 60.0
"""TUNEs of one key. Each one is logged, noted down, and sent to all ranks."""

LINES_AT_ONCE = 1000
"""Refusals of one key that are logged one by one; after these the 1024th, the 2048th, and so on."""

WORDS_PER_SECOND, WORDS_AT_ONCE = 64 << 10, 4 << 20
"""Bytes of a rank's messages that are noted down, beside its batches: a trip, close-up, notice or farewell has up to 100 KiB."""

ALL_WORDS_PER_SECOND, ALL_WORDS_AT_ONCE = 2 << 20, 256 << 20
"""The same for all ranks of one key, and for their HELLOs: 16,384 ranks may connect and trip at once."""

WORDS_OVERHEAD = 512
"""Bytes that a message takes beside its own, in memory and in the journal."""

ROUND_BYTES = 1 << 30
"""Bytes of fingerprints that wait for those of other ranks, in all runs of one key; each run has a bound of its own, too."""

FINGERPRINT_ROWS = 8_000_000
"""Rows of the fingerprint tables of all runs of one key."""

DISK_PER_SECOND, DISK_AT_ONCE = 1 << 20, 256 << 30
"""Bytes by which the records and traces of one key may grow. Over it, a record drops its oldest batches as it takes new ones."""

WORK_PER_SECOND, WORK_AT_ONCE = 0.25, 0.25
"""Seconds for which the messages of one key keep the collector's loop busy, while another key has messages, too."""


@dataclass(slots=True)
class Budget:
    """Of one key."""

    runs: Allowance = field(default_factory=lambda: Allowance(RUNS_PER_SECOND, MAX_RUNS))
    places: Allowance = field(default_factory=lambda: Allowance(PLACES_PER_SECOND, PLACES_AT_ONCE))
    words: Allowance = field(default_factory=lambda: Allowance(ALL_WORDS_PER_SECOND, ALL_WORDS_AT_ONCE))
    changes: Allowance = field(default_factory=lambda: Allowance(CHANGES_PER_SECOND, CHANGES_AT_ONCE))
    tables: TableRoom = field(default_factory=TableRoom)
    rounds: Memory = field(default_factory=lambda: Memory(ROUND_BYTES))
    rows: Memory = field(default_factory=lambda: Memory(FINGERPRINT_ROWS))
    refusals: int = 0

    def begins_run(self, world_size: int, now: float) -> bool:
        """Counts a new run; whether it may begin."""
        return self.places.has(now, world_size) and self.runs.take(now) and self.places.take(now, world_size)

    def logs_refusal(self) -> bool:
        """Counts a refusal; whether it is logged. A peer that never stops must not fill the disk."""
        self.refusals += 1
        return self.refusals <= LINES_AT_ONCE or self.refusals.bit_count() == 1


def words() -> Allowance:
    """The budget of a rank."""
    return Allowance(WORDS_PER_SECOND, WORDS_AT_ONCE)
