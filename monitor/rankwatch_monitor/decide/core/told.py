"""What a run tells others: its report, and where it stands for live views."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rankwatch.shared.types.closeup import fullness

from ..trip.divergence import origin_of
from ..trip.skipped import refusal
from .effects import Show
from .journal import NO_RANK
from .notices import told
from .rank import count_frames
from .report import End, Outcome, RankRows, Report
from .standing import standing_of, standing_of_rank

if TYPE_CHECKING:
    from .run import Run


def report_of(run: Run) -> Report:
    ending, verdict, skips = run.ending.state, run.verdict, run.skips
    looked = NO_RANK if verdict is None else max(verdict.tripped_alike, key=lambda one: fullness(run.ranks[one].closeup))
    rows = {number: rank.row() for number, rank in run.ranks.items()}
    return Report(
        run=run.id,
        job=run.opened.job,
        restart=run.opened.restart,
        world_size=run.world_size,
        model=run.opened.model,
        is_own=run.is_own,
        outcome=ending.outcome or Outcome.FINISHED,
        reason=ending.reason,
        verdict=verdict,
        closeup=None if verdict is None else run.ranks[looked].closeup,
        looked=looked,
        frames_in_batch=count_frames(verdict, run.ranks),
        acknowledged_in=run.ending.abort.answered_in(run.ranks),
        ranks=RankRows(rows, run.world_size),
        notices=told(run.notices.all(), {number: row.last_batch for number, row in rows.items()}),
        notices_unkept=run.notices.unkept,
        stall=run.stalls.watch.stall,
        held_up=run.stalls.held_up.told,
        stacks=run.stalls.stacks.all(),
        origin=origin_of(verdict),
        desync=run.replicas.all(),
        desync_unkept=run.replicas.watch.findings.unkept,
        compared=run.replicas.watch.compared,
        skipped=tuple([replace(one, frames_in_batch=count_frames(one.verdict, run.ranks)) for one in skips.told.values()]),
        skipped_unkept=skips.count - len(skips.told),
        why_not_skipped=skips.stops or (refusal(verdict) if verdict is not None else ""),
        collectives=run.calls.all(),
        collectives_unkept=run.calls.unkept,
        gaps=run.batches.gaps.all(),
        doubts=run.doubts.told if run.is_open else (),
        end=End.FINISHED if ending.decided is None else ending.decided.end,
        measured="" if run.tuning.every is not None else run.pace.text,
        made_with=(*run.ranks[0].hello.made_with, *run.ranks[0].aside) if 0 in run.ranks else (),
        stops_ranks=ending.outcome in (Outcome.ABORTED, Outcome.STALLED) and ending.aborts,
    )


def show_of(run: Run, now: float) -> Show:
    return Show(run.id, tuple([standing_of_rank(run.ranks[number], now) for number in sorted(run.ranks)]), standing_of(run))
