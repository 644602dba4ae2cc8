"""What is known of one rank, for people and for programs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rankwatch.shared.types.frame import Position
from rankwatch.shared.types.trip import Trip
from rankwatch.shared.words.closeup_text import fields_of, replay_fields
from rankwatch.shared.words.text import (
    describe_position,
    describe_rank,
    describe_trip,
    format_dump,
    format_head,
    format_spans,
)

from ...decide.core.report import RankNotice, RankState
from ...decide.replicas.desync import Desync
from ...decide.stalls.held_up import describe_spent
from ...decide.trip.skipped import is_left_out
from .. import closeup, stalls
from ..as_json import (
    SCHEMA,
    culprit_to_dict,
    desync_to_dict,
    frame_to_dict,
    moment_to_dict,
    notice_to_dict,
    rank_to_dict,
    run_to_dict,
    spec_to_dict,
)
from ..jsonable import document
from ..text import dropped_field, notice_fields, replica_fields
from . import digests
from .details import RankDetails


def render(details: RankDetails, frames: int) -> str:
    """As text, newline at its end: the last ``frames`` frames of its trip, its last batches, and what is known of it."""
    row, report = details.row, details.report
    if row.state is RankState.MISSING:
        title = f"rank {row.rank} of {report.world_size} of run {report.run}"
        return format_head(title, [("state", "missing: it never connected")])
    name = describe_rank(row.rank, report.world_size, row.host, row.local_rank, row.stage)
    acknowledged = ", abort acknowledged" if row.acknowledged else ""
    fields = [("process", f"{row.pid} on {row.host}"), ("state", f"{row.state.value}{acknowledged}")]
    fields.append(("machine", ", ".join(filter(None, (row.gpu.describe(), f"torch {row.torch}")))))
    stored = f"batches {format_spans(details.stored)}" if details.stored else "no batch"
    fields += [*_where(details), ("stored", f"{stored} as the rank sent them"), *_lapses(details)]
    fields += notice_fields(replace(report, notices=_notices(details), notices_unkept=0))
    fields += [*_tripped(details), *_stalled(details)]
    fields += replica_fields(replace(report, compared=None, desync=_desync(details), desync_unkept=0))
    parts = [format_dump(details.trip.frames[-frames:]).strip("\n")] if details.trip else []
    if details.parts:
        parts.append("\n".join(digests.lines(details.parts)))
    return "\n\n".join([*parts, format_head(f"{name} of run {report.run}", fields)])


def to_json(details: RankDetails, frames: int) -> str:
    """As strict JSON; ``standing`` and ``trip`` are null if there is none."""
    body = {
        "schema": SCHEMA,
        "run": run_to_dict(details.report),
        **rank_to_dict(details.row),
        "standing": details.standing,
        "spent": details.spent if details.spent.batches else None,
        "trip": None if details.trip is None else _trip(details.trip, frames),
        "closeup": None if details.trip is None else closeup.to_dict(details.row.rank, details.trip, details.closeup),
        "capsule": closeup.capsule_of(details.closeup),
        "notices": [notice_to_dict(noticed) for noticed in _notices(details)],
        "desync": [desync_to_dict(one) for one in _desync(details)],
        "batches": [digests.to_dict(part) for part in details.parts],
        "batches_as_sent": details.stored,
    }
    return document(body)


def _where(details: RankDetails) -> list[tuple[str, str]]:
    last = details.row.last_batch
    fields = [("batches", f"the last is batch {last}" if last >= 0 else "none yet")]
    if (at := details.standing) is not None:
        position = describe_position(Position(at.batch, at.eval, at.frame))
        quiet = f"; {at.quiet}" if at.quiet else ""
        ago = f"moved {at.still:g} s ago; heard {at.silent:g} s ago"
        fields.append(("position", f"{position}, frame {at.frame}, phase {at.phase}; {ago}{quiet}"))
    return [*fields, ("time", describe_spent(details.spent))] if details.spent.batches else fields


def _lapses(details: RankDetails) -> list[tuple[str, str]]:
    row = details.row
    fields = [("farewell", row.last_words)] if row.farewell else []
    fields += [dropped_field(row.dropped)] if row.dropped else []
    return [*fields, ("refused", f"{row.rival}: this rank was there already")] if row.rival else fields


def _stalled(details: RankDetails) -> list[tuple[str, str]]:
    """The stall that it is in, with its own stack."""
    report, rank = details.report, details.row.rank
    stall, own = report.stall, tuple(stack for stack in report.stacks if stack.rank == rank)
    if stall is None or rank not in (*stall.ranks, *stall.waiting, *(stack.rank for stack in own)):
        return []
    return stalls.fields(replace(report, stacks=own, stall=replace(stall, count=0, count_waiting=0)))


def _tripped(details: RankDetails) -> list[tuple[str, str]]:
    report, trip = details.report, details.trip
    if trip is None:
        return []
    skipped = next((one for one in report.skipped if one.step == trip.optimizer_step), None) if is_left_out(trip) else None
    verdict, cause, frames = report.verdict if skipped is None else skipped.verdict, "", None
    if verdict is None:
        who = "undecided who was first"
    elif verdict.rank is None or details.row.rank in verdict.alike:
        who = "as others did, without a single culprit"
    elif verdict.rank != details.row.rank:
        who = f"beside the culprit, rank {verdict.rank}"
    else:
        who, cause, frames = "the culprit", f"{verdict.cause.value}: {verdict.evidence}", report.frames_in_batch
    found = fields_of(cause, trip, details.closeup)
    who += ", in a step that was left out" if skipped is not None else ""
    return [("tripped", describe_trip(who, trip, frames)), *found, *replay_fields(details.closeup, report.folder)]


def _notices(details: RankDetails) -> tuple[RankNotice, ...]:
    return tuple(noticed for noticed in details.report.notices if noticed.rank == details.row.rank)


def _desync(details: RankDetails) -> tuple[Desync, ...]:
    return tuple(one for one in details.report.desync if details.row.rank in one.ranks)


def _trip(trip: Trip, frames: int) -> dict[str, Any]:
    return {
        **moment_to_dict(trip),
        **spec_to_dict(trip.frame.spec),
        **culprit_to_dict(trip),
        "time": trip.time,
        "frames": [frame_to_dict(frame) for frame in trip.frames[-frames:]],
    }
