"""A run's record -> its row in the archive."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import date, datetime, timezone
from typing import Any, NamedTuple

import numpy as np

from rankwatch.shared.types import messages
from rankwatch.shared.types.frame import NO_LOSS, NO_STAGE
from rankwatch.shared.types.gpu import Gpu
from rankwatch.shared.types.notice import describe_notice
from rankwatch_monitor.decide.core.journal import Left
from rankwatch_monitor.decide.core.report import RankRow, Report
from rankwatch_monitor.decide.next.suspects import Suspect, suspects_of
from rankwatch_monitor.record import replay
from rankwatch_monitor.record.reader import RunRecord
from rankwatch_monitor.record.schema import StoreError
from rankwatch_monitor.views import as_json, closeup
from rankwatch_monitor.views.jsonable import pick, plain

from .layout import MAX_DIGESTS, day_of, id_of

UNFINISHED = "unfinished"
"""The outcome of a run whose collector was killed, and that no other collector took over."""


class ArchiveRow(NamedTuple):
    """A run's row, and the columns that its path has."""

    day: date
    job: str
    id: str
    columns: dict[str, Any]


class Spans(NamedTuple):
    """Unix times: of the run's first and last fact, and for each rank when it was first and last there."""

    began: float
    ended: float
    ranks: dict[int, tuple[float, float]]


def row_of(record: RunRecord) -> ArchiveRow:
    """Raises StoreError when the record cannot be read."""
    report, is_over = replay.take(record)
    digests = _digests(record)
    meta, spans = record.meta(), _spans(record, digests)
    run_id = _id_of(record, meta)
    versions = sorted({row.torch for row in report.ranks if row.torch})
    drivers = sorted({row.gpu.driver for row in report.ranks if row.gpu.driver})
    columns = {
        "id": run_id,
        "run": report.run,
        "archived": _time(time.time()),
        "began": _time(spans.began),
        "ended": _time(spans.ended),
        **pick(report, "restart model world_size batches"),
        "outcome": report.outcome.value if is_over else UNFINISHED,
        "reason": report.reason,
        "rankwatch": meta.get("rankwatch", ""),
        "torch": ", ".join(versions),
        "driver": ", ".join(drivers),
        "verdict": plain(_verdict(report)),
        "suspects": [_suspect(one, report.ranks[one.rank]) for one in suspects_of(report)] if is_over else [],
        "ranks": plain([_rank(row, spans) for row in report.ranks if row.host]),
        "notices": plain(_notices(report)),
        "desync": plain([{**as_json.desync_to_dict(one), "equal_at": one.equal_at} for one in report.desync]),
        "digests": digests,
    }
    return ArchiveRow(day_of(spans.began), report.job, run_id, columns)


def gpu_key(host: str, gpu: Gpu) -> str | None:
    """What names a GPU among those of all hosts; None: there is none, or it has neither a UUID nor a bus."""
    return gpu.uuid or (f"{host} {gpu.id}" if gpu.id else None)


def _id_of(record: RunRecord, meta: dict[str, str]) -> str:
    for _, entry in record.events("hello"):
        assert isinstance(entry.fact, messages.Hello)
        return id_of(meta.get("run", record.run), entry.fact.incarnation, entry.fact.start, entry.fact.host, entry.fact.pid)
    raise StoreError(f"the record {record.path}: no rank has connected", record.path)


def _spans(record: RunRecord, digests: Sequence[Mapping[str, Any]]) -> Spans:
    """The last batch is the end of a run whose collector was killed: its facts are older."""
    began = ended = record.began()
    if digests and (trained := digests[-1]["ended"]) is not None:
        ended = max(ended, trained.timestamp())
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    for at, entry in record.events():
        ended = max(ended, at)
        if isinstance(entry.fact, messages.Hello):
            first.setdefault(entry.rank, at)
            last.pop(entry.rank, None)
        elif isinstance(entry.fact, messages.Bye | Left):
            last[entry.rank] = at
    return Spans(began, ended, {rank: (at, last.get(rank, ended)) for rank, at in first.items()})


def _suspect(one: Suspect, row: RankRow) -> dict[str, Any]:
    gpu = gpu_key(row.host, row.gpu) if one.is_gpu else None
    return {"kind": one.kind.value, "rank": one.rank, "host": row.host, "gpu": gpu}


def _rank(row: RankRow, spans: Spans) -> dict[str, Any]:
    began, ended = spans.ranks.get(row.rank, (spans.ended, spans.ended))
    return {
        **pick(row, "rank local_rank"),
        "stage": None if row.stage == NO_STAGE else row.stage,
        "host": row.host,
        "gpu": gpu_key(row.host, row.gpu),
        "gpu_name": row.gpu.name or None,
        "gpu_uuid": row.gpu.uuid or None,
        "pci_bus": row.gpu.bus or None,
        "driver": row.gpu.driver or None,
        "torch": row.torch or None,
        **pick(row, "state last_batch"),
        "hours": max(0.0, ended - began) / 3600,
        "farewell": row.farewell or None,
    }


def _verdict(report: Report) -> dict[str, Any] | None:
    verdict = report.verdict
    if verdict is None:
        return None
    trip, row = verdict.trip, None if verdict.rank is None or verdict.alike else report.ranks[verdict.rank]
    found = closeup.to_dict(verdict.tripped, trip, report.closeup) or {}
    return {
        "rank": None if row is None else row.rank,
        "host": None if row is None else row.host,
        "gpu": None if row is None else gpu_key(row.host, row.gpu),
        "batch": trip.position.batch,
        "optimizer_step": trip.optimizer_step,
        **as_json.spec_to_dict(trip.frame.spec),
        "reading": trip.culprit.label,
        **pick(trip.culprit, "state dtype"),
        **pick(verdict, "cause evidence"),
        "operator": found.get("operator"),
        "recurred": found.get("recurred"),
        "of": found.get("of"),
        "certainty": verdict.certainty,
    }


def _notices(report: Report) -> list[dict[str, Any]]:
    return [
        {
            "rank": rank,
            **pick(notice, "kind module"),
            "reading": notice.label,
            **pick(notice, "dtype since batch value growth"),
            "text": describe_notice(notice),
        }
        for rank, notice in report.notices
    ]


_COLUMNS = "batch", "headroom", "bad", "loss", "started", "ended"


def _digests(record: RunRecord) -> list[dict[str, Any]]:
    """The digests over all ranks, batch by batch; of a long run, of a few batches at a time. Memory does not grow with it."""
    first, last = record.first_batch(), record.last_batch()
    width = 1
    while (last - first) // width >= MAX_DIGESTS:
        width *= 2
    rows = max(0, last - first + width) // width
    parts, bad, has_loss = np.zeros(rows, np.int64), np.zeros(rows, np.int64), np.zeros(rows, bool)
    headroom, loss = np.full(rows, np.inf), np.full(rows, -np.inf)
    started, ended = np.full(rows, np.inf), np.full(rows, -np.inf)
    for _, digests in record.segments(_COLUMNS):
        at = (digests["batch"] - first) // width
        np.add.at(parts, at, 1)
        np.add.at(bad, at, digests["bad"])
        np.minimum.at(headroom, at, digests["headroom"])
        has = digests["loss"] != NO_LOSS
        np.maximum.at(loss, at[has], digests["loss"][has])
        has_loss[at[has]] = True
        np.minimum.at(started, at, digests["started"])
        np.maximum.at(ended, at, digests["ended"])
    return [
        {
            "batch": first + int(row) * width,
            "batches": width,
            "parts": int(parts[row]),
            "started": _time(float(started[row])),
            "ended": _time(float(ended[row])),
            "headroom": float(headroom[row]),
            "bad": int(bad[row]),
            "loss": float(loss[row]) if has_loss[row] else None,
        }
        for row in np.flatnonzero(parts)
    ]


def _time(seconds: float) -> datetime | None:
    """None for a time that a calendar cannot express."""
    try:
        return datetime.fromtimestamp(seconds, timezone.utc)
    except (ValueError, OverflowError, OSError):
        return None
