"""The ranks that another one waited for in vain: they had ended, or never connected, and its collective failed. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from rankwatch.shared.words.brief import is_of_a_collective
from rankwatch.shared.words.text import name_spans

from ..calls.differs import ordinal
from ..core.report import RankRow, RankState

_OVER = (RankState.ENDED, RankState.FINISHED)

BY_A_LIBRARY = "killed by SIGABRT"

EQUALISE = "give each rank as many (DistributedSampler, drop_last=True), or train within Join"


def absent_for(failed: RankRow, ranks: Iterable[RankRow]) -> list[RankRow]:
    """The ranks without which ``failed`` could not go on, if it failed in a collective and not in an upload, say: by its words,
    or as gloo ends a process in a thread where nobody can catch its error."""
    if not (is_of_a_collective(failed.farewell) or failed.farewell.startswith(BY_A_LIBRARY)):
        return []
    return [
        row
        for row in ranks
        if row.state is RankState.MISSING or (row.state in _OVER and row.last_batch <= failed.last_batch)
    ]


def is_unequal(row: RankRow, failed: RankRow) -> bool:
    """Whether this rank had ended because it had fewer batches."""
    return row.state in _OVER and 0 <= row.last_batch < failed.last_batch


def describe_absent(ranks: Iterable[RankRow], failed: RankRow) -> str:
    """``rank 1 had ended after batch 9``; empty without ranks. ``failed``: the rank that had waited for them."""
    rows = list(ranks)
    missing = [row.rank for row in rows if row.state is RankState.MISSING]
    over = [row for row in rows if row.state in _OVER]
    said = []
    if short := [row for row in over if is_unequal(row, failed)]:
        first = min(row.last_batch for row in short) + 1
        ended = f"{name_spans([row.rank for row in short])} ended{', the first' * (len(short) > 1)} after {first}"
        was = f"rank {failed.rank} was in its {ordinal(failed.last_batch + 1)}"
        said.append(f"ranks ran unequal numbers of batches: {ended}, {was}; {EQUALISE}")
    if rest := [row for row in over if row not in short]:
        last = min(row.last_batch for row in rest)
        after = f"after batch {last}" if last >= 0 else "before its first batch"
        said.append(f"{name_spans([row.rank for row in rest])} had ended{', the first' * (len(rest) > 1)} {after}")
    if missing:
        said.append(f"{name_spans(missing)} never connected")
    return "; ".join(said)


def first_failed(ranks: Iterable[RankRow]) -> RankRow | None:
    """The rank that failed before all others; None: none did."""
    return min((row for row in ranks if row.state is RankState.FAILED), key=lambda row: row.left, default=None)


def first_aborted(ranks: Iterable[RankRow]) -> RankRow | None:
    """The rank that was lost before all others, if a library ended it."""
    first = min((row for row in ranks if row.state is RankState.LOST), key=lambda row: row.left, default=None)
    return first if first is not None and first.farewell.startswith(BY_A_LIBRARY) else None
