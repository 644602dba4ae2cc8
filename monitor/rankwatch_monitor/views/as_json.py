"""The report for programs, as strict JSON: an inf or nan value is null, and its state says which."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rankwatch.shared.types.frame import MEASURED, NO_LOSS, NO_STAGE, Frame, FrameSpec, Reading, State, state_of
from rankwatch.shared.types.gpu import Gpu
from rankwatch.shared.types.notice import describe_notice
from rankwatch.shared.types.trip import Trip

from ..decide.core.gaps import describe_gap
from ..decide.core.report import RankNotice, RankRow, Report
from ..decide.next.next_action import Advice, next_action, remedy
from ..decide.replicas.desync import Desync
from ..decide.replicas.desync_text import desync_lines
from ..decide.trip.began import describe_origin, leads
from ..decide.trip.skipped import SkippedStep
from ..decide.trip.verdict import Verdict
from . import closeup, collectives, course, judgement, skipped, stalls
from .jsonable import document, pick, plain

SCHEMA = 1


def render(report: Report, *, is_decided: bool = True) -> str:
    """The report as JSON text, newline at its end. ``is_decided``: whether it is known how the run ends; else that is null."""
    return document(_body(report) if is_decided else {**_body(report), "outcome": None})


def to_dict(report: Report) -> dict[str, Any]:
    body: dict[str, Any] = plain(_body(report))
    return body


def _body(report: Report) -> dict[str, Any]:
    verdict = report.verdict
    return {
        "schema": SCHEMA,
        "run": run_to_dict(report),
        **pick(report, "outcome reason batches"),
        "judgement": judgement.to_dict(report),
        "follows": report.follows or None,
        "advice": _advice(next_action(report)),
        "verdict": None if verdict is None else _verdict(report, verdict),
        "frames": [] if verdict is None else [frame_to_dict(frame) for frame in verdict.trip.frames],
        "acknowledged_in": report.acknowledged_in,
        "ranks": [rank_to_dict(row) for row in report.ranks],
        "notices": [notice_to_dict(noticed) for noticed in report.notices],
        "notices_unkept": report.notices_unkept,
        "skipped": [_skipped(report, one) for one in report.skipped],
        "skipped_unkept": report.skipped_unkept,
        "desync": [desync_to_dict(one) for one in report.desync],
        "desync_unkept": report.desync_unkept,
        "desync_text": list(desync_lines(report.desync, report.world_size).values()),
        "replicas": report.compared,
        "stalled": report.stalled,
        "stall": stalls.to_dict(report),
        "collectives": [collectives.to_dict(one) for one in report.collectives],
        "collectives_unkept": report.collectives_unkept,
        "gaps": [{**pick(gap, "ranks first last why"), "text": describe_gap(gap, report.world_size)} for gap in report.gaps],
        "course": course.to_dict(report),
        "measured": report.measured or None,
        "made_with": dict(course.made_with(report)) or None,
        "loss": [loss_to_dict(row) for row in report.ranks if row.loss != NO_LOSS],
    }


def _advice(advice: Advice | None) -> dict[str, Any] | None:
    return None if advice is None else pick(advice, "action hosts reason")


def _skipped(report: Report, one: SkippedStep) -> dict[str, Any]:
    return {
        **pick(one, "step batch"),
        "verdict": _verdict(skipped.report_of(report, one), one.verdict),
        **pick(one, "restored budget_left most of stops"),
        "text": one.brief,
    }


def _verdict(report: Report, verdict: Verdict) -> dict[str, Any]:
    trip = verdict.trip
    row = None if verdict.rank is None else report.ranks[verdict.rank]
    counted = trip.numel > 0  # else the tensor was freed before its reading was judged
    return {
        "rank": verdict.rank,
        "local_rank": None if row is None else row.local_rank,
        "host": None if row is None else row.host,
        "gpu": None if row is None else gpu_to_dict(row.gpu),
        "stage": None if row is None else _stage(row),
        **moment_to_dict(trip),
        "frames_in_batch": report.frames_in_batch,
        **spec_to_dict(trip.frame.spec),
        "aliases": trip.frame.spec.aliases,
        **culprit_to_dict(trip),
        "numel": trip.numel if counted else None,
        "nan_count": trip.nan_count if counted else None,
        "inf_count": trip.inf_count if counted else None,
        "loss_scale": trip.loss_scale or None,
        "time": trip.time,
        **pick(verdict, "cause evidence"),
        "began": None if report.origin is None else report.origin.began,
        "began_text": describe_origin(report.origin, report.world_size) if report.origin is not None else "",
        "began_leads": leads(report.origin, verdict.rank, trip),
        "handed": report.handed,
        "closeup": closeup.to_dict(closeup.looked(report, verdict), trip, report.closeup),
        "capsule": closeup.capsule_of(report.closeup),
        "closeup_text": closeup.text_of(report, verdict),
        "try": remedy(report, verdict),
        "certainty": verdict.certainty,
        "missing_ranks": verdict.missing,
        "alike_ranks": verdict.alike,
        "also": [
            {
                "rank": rank,
                "stage": _stage(report.ranks[rank]),
                **pick(other.position, "batch eval frame"),
                "module": other.frame.spec.module,
                "reading": other.culprit.label,
                "state": other.culprit.state,
            }
            for rank, other in (verdict.also if row is not None else verdict.all_tripped)
        ],
        "reason": verdict.reason,
    }


def run_to_dict(report: Report) -> dict[str, Any]:
    return {"id": report.run, **pick(report, "job restart world_size")}


def rank_to_dict(row: RankRow) -> dict[str, Any]:
    return {
        **pick(row, "rank local_rank host"),
        "gpu": gpu_to_dict(row.gpu),
        "torch": row.torch or None,
        "stage": _stage(row),
        **pick(row, "pid last_batch state acknowledged dropped rival farewell farewell_at memory leaked"),
        "farewell_text": row.last_words,
    }


def gpu_to_dict(gpu: Gpu) -> dict[str, str | None] | None:
    """None on the CPU; None for what is not known of it."""
    return {name: text or None for name, text in asdict(gpu).items()} if gpu.is_known else None


def loss_to_dict(row: RankRow) -> dict[str, Any]:
    """The last loss of a rank: the largest, if a batch has several."""
    size = abs(row.loss)
    return {"rank": row.rank, "batch": row.loss_batch, "abs_max": size, "state": state_of(size, size), "loss": row.loss}


def _stage(row: RankRow) -> int | None:
    return None if row.stage == NO_STAGE else row.stage


def moment_to_dict(trip: Trip) -> dict[str, Any]:
    position = trip.position
    return {**pick(position, "batch eval"), "optimizer_step": trip.optimizer_step, "frame": position.frame}


def spec_to_dict(spec: FrameSpec) -> dict[str, Any]:
    return pick(spec, "module module_class phase")


def culprit_to_dict(trip: Trip) -> dict[str, Any]:
    return {"reading": trip.culprit.label, **pick(trip.culprit, "state dtype"), "shape": trip.shape}


def frame_to_dict(frame: Frame) -> dict[str, Any]:
    position = frame.position
    readings = [_reading(reading) for reading in frame.readings]
    return {**pick(position, "batch eval"), "index": position.frame, **spec_to_dict(frame.spec), "readings": readings}


def notice_to_dict(noticed: RankNotice) -> dict[str, Any]:
    notice = noticed.notice
    return {
        "rank": noticed.rank,
        **pick(notice, "kind module module_class"),
        "reading": notice.label,
        **pick(notice, "dtype since batch value growth batches_left why"),
        "text": describe_notice(notice),
    }


def desync_to_dict(one: Desync) -> dict[str, Any]:
    return {**pick(one, "step parameter ranks replicas pattern"), "host": one.host or None, "gpu": one.gpu or None}


def _reading(reading: Reading) -> dict[str, Any]:
    is_measured = reading.state in MEASURED
    return reading._asdict() | ({} if is_measured else {"abs_min": None, "abs_max": None})


def point(batch: int, abs_min: float, abs_max: float, state: State) -> list[Any]:
    """A reading in one batch as a short list."""
    return [batch, plain(abs_min), plain(abs_max), plain(state)]
