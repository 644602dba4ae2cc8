"""Which two batches a user means, and their frames."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rankwatch.errors import UsageError
from rankwatch.shared.frame import Frame

from ..decide.verdict import name_spans
from ..record import reader as record
from ..record.store import FILE, StoreError


class Side(NamedTuple):
    name: str
    frames: list[Frame]


def of(runs: Sequence[Path], ranks: Sequence[int], batches: Sequence[int]) -> tuple[Side, Side]:
    """The two sides of a comparison.

    Args:
        runs, ranks, batches: one or two of each, and of one of them two; no batch: the last one that is kept of both sides.

    Raises:
        UsageError: they are not two, a run has no record, or a batch is not kept.
    """
    if max(map(len, (runs, ranks, batches))) != 2:
        raise UsageError("a comparison has two sides: give two runs, --batch twice, or --rank twice")
    (run, rank), (other_run, other_rank) = (runs[0], ranks[0]), (runs[-1], ranks[-1])
    kept, other_kept = _kept(run, rank), _kept(other_run, other_rank)
    if not batches:
        common = set(kept) & set(other_kept)
        if not common:
            raise UsageError(f"no batch is kept whole of both rank {rank} of {run} and rank {other_rank} of {other_run}")
        batches = [max(common)]
    return _side(run, rank, batches[0], kept), _side(other_run, other_rank, batches[-1], other_kept)


def _kept(run: Path, rank: int) -> list[int]:
    try:
        return record.kept_batches(run / FILE, rank)
    except StoreError as error:
        raise UsageError(f"{error}; is {run} a run's folder?") from None


def _side(run: Path, rank: int, batch: int, kept: list[int]) -> Side:
    if batch not in kept:
        there = f"kept are {name_spans(kept).partition(' ')[2]}" if kept else "none of this rank is"
        raise UsageError(f"batch {batch} of rank {rank} is not kept whole in {run}: {there}")
    return Side(f"rank {rank}, batch {batch} of {run.resolve().name}", record.read_batch(run / FILE, rank, batch))
