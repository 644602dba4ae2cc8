"""The losses of a run's ranks, batch by batch, and whether a verdict is the end of a divergence. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rankwatch.shared.bounded import BoundedDict
from rankwatch.shared.types.frame import BatchSummary, FrameTable
from rankwatch.shared.types.trip import Cause
from rankwatch.shared.words.divergence import KEPT, REPLACED, Divergence, LossHistory, LossRows, end_of, find_divergence

from ..core.rank import Rank
from .began import Began, TripOrigin
from .verdict import Verdict

MAX_TABLES = 256
"""Frame tables of which the place of the loss is in memory."""

COMPARED = 64
"""Ranks that are compared, at most: the abort waits for it."""


@dataclass(slots=True)
class LossHistories:
    left_out: BoundedDict[int, None] = field(default_factory=lambda: BoundedDict(KEPT))
    """The last optimizer steps that were left out."""
    _of_ranks: dict[int, LossHistory] = field(default_factory=dict)
    _rows: BoundedDict[str, LossRows] = field(default_factory=lambda: BoundedDict(MAX_TABLES))

    def take(self, rank: int, summary: BatchSummary, table: FrameTable) -> None:
        rows = self._rows.get(table.id)
        if rows is None:
            rows = self._rows[table.id] = LossRows(table)
        if rows:
            history = self._of_ranks.get(rank)
            if history is None:
                history = self._of_ranks[rank] = LossHistory(self.left_out)
            history.take(summary, rows)

    def find(self, verdict: Verdict, ranks: Mapping[int, Rank]) -> Divergence | None:
        """The divergence that ended with this trip."""
        if verdict.cause not in (*REPLACED, Cause.DIVERGENCE) or verdict.trip.position.eval:
            return None
        tripped = verdict.tripped
        with_loss = [rank for rank, history in self._of_ranks.items() if history.rows is not None and history.rows.is_loss]
        if with_loss and tripped not in with_loss:  # the stage of a pipeline that has no loss
            tripped = with_loss[0]
        if tripped not in self._of_ranks:
            return None
        stage = ranks[tripped].hello.stage
        peers = [rank for rank in self._of_ranks if rank != tripped and ranks[rank].hello.stage == stage]
        peers = peers[:: -(-len(peers) // (COMPARED - 1)) or 1]
        first = [rank for rank in self._of_ranks if ranks[rank].hello.stage <= 0]
        fed = [rank for rank in (tripped, *peers) if rank in first] or first[:COMPARED]
        own, others, data = ([self._of_ranks[rank] for rank in some] for some in ([tripped], peers, fed))
        return find_divergence(own[0], others, data, verdict.trip.position.batch)


def blame_all(verdict: Verdict, found: Divergence) -> Verdict:
    """The verdict, without a single culprit. What tripped at the end stays in its evidence."""
    evidence = end_of(found, verdict.trip, verdict.cause, verdict.evidence)
    return replace(verdict, cause=Cause.DIVERGENCE, evidence=evidence, divergence=found)


def origin_of(verdict: Verdict | None) -> TripOrigin | None:
    """Where a divergence began; None where the record must be asked."""
    found = None if verdict is None else verdict.divergence
    if found is None:
        return None
    alone = False if found.ranks > 1 else None
    began = Began(None, found.batch, "", found.module_class, found.label, found.loss / found.usual, alone)
    return TripOrigin(began, found.batch, found.ranks)
