"""A run's record as JSON lines: one object on each line, and its ``what`` names the kind.

    record    who wrote the record
    event     a fact behind the run's decisions, with its Unix time and rank
    table     a frame table: its number, and its rows as [frame, module, class, phase, label, kind, dtype]
    batch     a digest: a part of a batch of a rank; ``row`` and ``bad_row`` are rows of its table
    envelope  over all ranks: for each row of the table [low, its rank, high, its rank, state, its rank]
    frame     a frame of a batch as its rank sent it (with ``frames``)

Strict JSON: inf and nan are null.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from rankwatch.shared.types.frame import State

from ...record.facts import kind_of
from ...record.numbers.digest import Envelope
from ...record.numbers.layout import NO_ROW, Array
from ...record.reader import RunRecord
from ..jsonable import plain


def lines(record: RunRecord, *, frames: bool) -> Iterator[str]:
    """The lines, without newlines. Raises StoreError when the record cannot be read."""
    for line in _objects(record, frames=frames):
        yield json.dumps(plain(line), allow_nan=False)


def _objects(record: RunRecord, *, frames: bool) -> Iterator[dict[str, Any]]:
    yield {"what": "record", **record.meta()}
    for time, entry in record.events():
        kind = kind_of(entry.fact)
        yield {"what": "event", "time": time, "now": entry.now, "rank": entry.rank, "kind": kind, "fact": entry.fact}
    tables = record.tables()
    for number, table in tables.items():
        rows = [
            [index, spec.module, spec.module_class, spec.phase, row.label, row.kind, row.dtype]
            for index, spec in enumerate(table.specs)
            for row in spec.readings
        ]
        yield {"what": "table", "number": number, "id": table.id, "rows": rows}
    digests = record.digests()
    for digest in digests:
        values = dict(zip(digests.dtype.names or (), digest.tolist(), strict=True))
        bad_row = None if values["bad_row"] == NO_ROW else values["bad_row"]
        yield {"what": "batch", **values, "bad_row": bad_row}
    for over_ranks in record.envelopes():
        key = {"batch": over_ranks.batch, "first_frame": over_ranks.first_frame, "table": over_ranks.number}
        envelope = over_ranks.envelope
        yield {"what": "envelope", **key, "ranks": envelope.ranks, "rows": _rows(envelope)}
    if frames:
        for part in record.sent():
            for frame in part.frames():
                yield {"what": "frame", "rank": part.rank, "frame": frame}


def _rows(envelope: Envelope) -> list[list[Any]]:
    def with_rank(values: Array, ranks: Array) -> Iterator[tuple[float | None, int | None]]:
        for value, rank in zip(values.tolist(), ranks.tolist(), strict=True):
            yield (None, None) if rank == NO_ROW else (value, rank)

    lows, highs = with_rank(envelope.low, envelope.low_rank), with_rank(envelope.high, envelope.high_rank)
    states = zip(map(State, envelope.state.tolist()), envelope.state_rank.tolist(), strict=True)
    return [[*low, *high, *state] for low, high, state in zip(lows, highs, states, strict=True)]
