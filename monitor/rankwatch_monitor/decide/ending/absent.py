"""The ranks that another one waited for in vain: they had ended, or never connected, and its collective failed. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from rankwatch.shared.words.brief import is_of_a_collective
from rankwatch.shared.words.text import name_spans

from ..core.report import RankRow, RankState

_OVER = (RankState.ENDED, RankState.FINISHED)


def absent_for(failed: RankRow, ranks: Iterable[RankRow]) -> list[RankRow]:
    """The ranks without which ``failed`` could not go on, if it failed in a collective and not in an upload, say."""
    if not is_of_a_collective(failed.farewell):
        return []
    return [
        row
        for row in ranks
        if row.state is RankState.MISSING or (row.state in _OVER and row.last_batch <= failed.last_batch)
    ]


def describe_absent(ranks: Iterable[RankRow]) -> str:
    """``rank 1 had ended after batch 9``; empty without ranks."""
    rows = list(ranks)
    missing = [row.rank for row in rows if row.state is RankState.MISSING]
    over = [row for row in rows if row.state in _OVER]
    said = []
    if over:
        first = min(row.last_batch for row in over)
        after = f"after batch {first}" if first >= 0 else "before its first batch"
        said.append(f"{name_spans([row.rank for row in over])} had ended{', the first' * (len(over) > 1)} {after}")
    if missing:
        said.append(f"{name_spans(missing)} never connected")
    return "; ".join(said)


def first_failed(ranks: Iterable[RankRow]) -> RankRow | None:
    """The rank that failed before all others; None: none did."""
    return min((row for row in ranks if row.state is RankState.FAILED), key=lambda row: row.left, default=None)
