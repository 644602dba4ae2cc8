"""The report for programs, as strict JSON: an inf or nan value is null, and its state says which."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

from rankwatch.shared.types.frame import MEASURED, NO_LOSS, NO_STAGE, Frame, Reading, State, state_of
from rankwatch.shared.types.gpu import Gpu
from rankwatch.shared.types.notice import describe_notice
from rankwatch.shared.words.brief import brief

from ..decide.core.gaps import describe_gap
from ..decide.core.report import RankNotice, RankRow, Report
from ..decide.replicas.desync import Desync
from ..decide.replicas.desync_text import desync_lines
from ..decide.trip.began import TripOrigin, describe_origin
from ..decide.trip.verdict import Verdict
from . import closeup, course, stalls

SCHEMA = 1


def render(report: Report, *, is_decided: bool = True) -> str:
    """The report as JSON text, newline at its end. ``is_decided``: whether it is known how the run ends; else that is null."""
    body = to_dict(report) if is_decided else {**to_dict(report), "outcome": None}
    return json.dumps(body, indent=2, allow_nan=False) + "\n"


def to_dict(report: Report) -> dict[str, Any]:
    verdict = report.verdict
    return {
        "schema": SCHEMA,
        "run": run_to_dict(report),
        "outcome": report.outcome.value,
        "reason": report.reason,
        "batches": report.batches,
        "verdict": None if verdict is None else _verdict(report, verdict),
        "frames": [] if verdict is None else [frame_to_dict(frame) for frame in verdict.trip.frames],
        "acknowledged_in": report.acknowledged_in,
        "ranks": [rank_to_dict(row) for row in report.ranks],
        "notices": [notice_to_dict(noticed) for noticed in report.notices],
        "notices_unkept": report.notices_unkept,
        "desync": [desync_to_dict(one) for one in report.desync],
        "desync_unkept": report.desync_unkept,
        "desync_text": list(desync_lines(report.desync, report.world_size).values()),
        "replicas": None if report.compared is None else asdict(report.compared),
        "stalled": report.stalled,
        "stall": stalls.to_dict(report),
        "gaps": [{**asdict(gap), "text": describe_gap(gap, report.world_size)} for gap in report.gaps],
        "course": course.to_dict(report),
        "loss": [loss_to_dict(row) for row in report.ranks if row.loss != NO_LOSS],
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
        "batch": trip.position.batch,
        "eval": trip.position.eval,
        "optimizer_step": trip.optimizer_step,
        "frame": trip.position.frame,
        "frames_in_batch": report.frames_in_batch,
        "module": trip.frame.spec.module,
        "module_class": trip.frame.spec.module_class,
        "phase": trip.frame.spec.phase.name.lower(),
        "aliases": list(trip.frame.spec.aliases),
        "reading": trip.culprit.label,
        "state": trip.culprit.state.name.lower(),
        "dtype": trip.culprit.dtype,
        "shape": list(trip.shape),
        "numel": trip.numel if counted else None,
        "nan_count": trip.nan_count if counted else None,
        "inf_count": trip.inf_count if counted else None,
        "loss_scale": number(trip.loss_scale) if trip.loss_scale else None,
        "time": trip.time,
        "cause": verdict.cause.value,
        "evidence": verdict.evidence,
        "began": _began(report.origin),
        "began_text": describe_origin(report.origin, report.world_size) if report.origin is not None else "",
        "closeup": closeup.to_dict(verdict.tripped, trip, report.closeup),
        "capsule": closeup.capsule_of(report.closeup),
        "closeup_text": closeup.text_of(report, verdict),
        "try": closeup.remedy(report, verdict),
        "certainty": verdict.certainty.value,
        "missing_ranks": list(verdict.missing),
        "alike_ranks": list(verdict.alike),
        "also": [
            {
                "rank": rank,
                "stage": _stage(report.ranks[rank]),
                "batch": other.position.batch,
                "eval": other.position.eval,
                "frame": other.position.frame,
                "module": other.frame.spec.module,
                "reading": other.culprit.label,
                "state": other.culprit.state.name.lower(),
            }
            for rank, other in (verdict.also if row is not None else verdict.all_tripped)
        ],
        "reason": verdict.reason,
    }


def _began(origin: TripOrigin | None) -> dict[str, Any] | None:
    if origin is None or origin.began is None:
        return None
    return {**asdict(origin.began), "factor": number(origin.began.factor)}


def run_to_dict(report: Report) -> dict[str, Any]:
    return {"id": report.run, "job": report.job, "restart": report.restart, "world_size": report.world_size}


def rank_to_dict(row: RankRow) -> dict[str, Any]:
    return {
        "rank": row.rank,
        "local_rank": row.local_rank,
        "host": row.host,
        "gpu": gpu_to_dict(row.gpu),
        "torch": row.torch or None,
        "stage": _stage(row),
        "pid": row.pid,
        "last_batch": row.last_batch,
        "state": row.state.value,
        "acknowledged": row.acknowledged,
        "dropped": row.dropped,
        "rival": row.rival,
        "farewell": row.farewell,
        "farewell_text": brief(row.farewell),
    }


def gpu_to_dict(gpu: Gpu) -> dict[str, str | None] | None:
    """None on the CPU; None for what is not known of it."""
    return {name: text or None for name, text in asdict(gpu).items()} if gpu.is_known else None


def loss_to_dict(row: RankRow) -> dict[str, Any]:
    """The last loss of a rank: the abs max of the largest, if a batch has several."""
    state = state_of(row.loss, row.loss)
    return {"rank": row.rank, "batch": row.loss_batch, "abs_max": number(row.loss), "state": state.name.lower()}


def _stage(row: RankRow) -> int | None:
    return None if row.stage == NO_STAGE else row.stage


def frame_to_dict(frame: Frame) -> dict[str, Any]:
    return {
        "batch": frame.position.batch,
        "eval": frame.position.eval,
        "index": frame.position.frame,
        "module": frame.spec.module,
        "module_class": frame.spec.module_class,
        "phase": frame.spec.phase.name.lower(),
        "readings": [_reading(reading) for reading in frame.readings],
    }


def notice_to_dict(noticed: RankNotice) -> dict[str, Any]:
    notice = noticed.notice
    return {
        "rank": noticed.rank,
        "kind": notice.kind.name.lower(),
        "module": notice.module,
        "module_class": notice.module_class,
        "reading": notice.label,
        "dtype": notice.dtype,
        "since": notice.since,
        "batch": notice.batch,
        "value": notice.value,
        "growth": notice.growth,
        "batches_left": number(notice.batches_left),
        "text": describe_notice(notice),
    }


def desync_to_dict(one: Desync) -> dict[str, Any]:
    return {
        "step": one.step,
        "parameter": one.parameter,
        "ranks": list(one.ranks),
        "replicas": one.replicas,
        "pattern": one.pattern.value,
        "host": one.host or None,
        "gpu": one.gpu or None,
    }


def _reading(reading: Reading) -> dict[str, Any]:
    measured = reading.state in MEASURED
    return {
        "label": reading.label,
        "kind": reading.kind.name.lower(),
        "dtype": reading.dtype,
        "abs_min": number(reading.abs_min) if measured else None,
        "abs_max": number(reading.abs_max) if measured else None,
        "state": reading.state.name.lower(),
    }


def point(batch: int, abs_min: float, abs_max: float, state: State) -> list[Any]:
    """A reading in one batch as a short list."""
    return [batch, number(abs_min), number(abs_max), state.name.lower()]


def number(value: float) -> float | None:
    """JSON has no inf and no nan."""
    return value if math.isfinite(value) else None
