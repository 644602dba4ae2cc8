"""The record as Parquet: one row for each reading as sent, for each reading over the ranks, or for each digest."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import IO, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rankwatch import __version__
from rankwatch.shared.types.frame import MEASURED, NO_LOSS, NO_NORM, FrameTable, State

from ...record.numbers.layout import NO_MEMORY, NO_ROW, Array
from ...record.numbers.rows import DigestBlock, EnvelopePart, SentPart
from ...record.reader import RunRecord
from ...record.schema import StoreError
from .origin import Origin
from .rows import TEXTS, FrameRows, of_words
from .written import Written

_T = TypeVar("_T")

ROW_GROUP = 1 << 18
"""Rows that are written together and held in memory."""

PARTS = 1 << 14
"""Parts that are written together if they have few rows."""

_WORD = pa.dictionary(pa.int32(), pa.string())
_RUN = [("run", _WORD), ("job", _WORD), ("restart", pa.int32())]
_RANK = [("rank", pa.int32()), ("host", _WORD), ("local_rank", pa.int32())]
_READING = [("frame", pa.int32()), *((name, _WORD) for name in TEXTS)]
_TIME = pa.timestamp("us", tz="UTC")

SCHEMAS: Mapping[str, pa.Schema] = {
    "summaries": pa.schema(
        [
            *_RUN, *_RANK, ("batch", pa.int64()), ("optimizer_step", pa.int64()), *_READING,
            ("abs_min", pa.float64()), ("abs_max", pa.float64()), ("state", _WORD),
        ]
    ),
    "envelope": pa.schema(
        [
            *_RUN, ("batch", pa.int64()), *_READING, ("ranks", pa.int32()),
            ("abs_min", pa.float64()), ("abs_min_rank", pa.int32()), ("abs_max", pa.float64()), ("abs_max_rank", pa.int32()),
            ("state", _WORD), ("state_rank", pa.int32()),
        ]
    ),
    "digests": pa.schema(
        [
            *_RUN, *_RANK, ("batch", pa.int64()), ("optimizer_step", pa.int64()), ("started", _TIME), ("ended", _TIME),
            ("first_frame", pa.int32()), ("frames", pa.int32()), ("headroom", pa.float64()), *_READING,
            ("bad", pa.int32()), *((f"bad_{name}", type_) for name, type_ in _READING),
            ("loss", pa.float64()), ("gradient_norm", pa.float64()), ("memory_mib", pa.int64()),
        ]
    ),
}  # fmt: skip
"""What the columns of each are called and made of; docs/pages/internals/record.md explains them."""

_PACKED = "run", "job", "restart", *(name for name, _ in (*_RANK, *_READING)), "batch", "optimizer_step", "state"
"""Columns with few different values, which Parquet packs best with a dictionary."""

_YEAR_10000 = 253402300800.0

_STATES = of_words([state.name.lower() for state in State])
_MEASURED = np.array([state in MEASURED for state in State])


def write(record: RunRecord, origin: Origin, what: str, into: IO[bytes], rank: int | None = None) -> Written:
    """Writes what is stored of a run, in the order of the batches; digests in the order in which they came.

    Args:
        what: one of SCHEMAS.
        rank: the summaries or digests of this rank only (None: of all ranks).

    Raises:
        StoreError: the record cannot be read.
        OSError: ``into`` cannot be written.
    """
    about = {"rankwatch.version": __version__, "rankwatch.run": origin.run, "rankwatch.what": what}
    schema = SCHEMAS[what].with_metadata(about)
    packed = [name for name in schema.names if name in _PACKED]
    written = Written()
    with pq.ParquetWriter(into, schema, compression="zstd", use_dictionary=packed) as writer:
        for group in _groups(record, what, _Batches(origin, schema), rank):
            writer.write_batch(group, ROW_GROUP)
            written.add(group.num_rows, group.column("batch").to_numpy())
    return written


def _groups(record: RunRecord, what: str, table: _Batches, rank: int | None) -> Iterator[pa.RecordBatch]:
    if what == "summaries":
        sent = heapq.merge(record.sent(rank), record.tripped(rank), key=lambda part: part[:3])
        for parts in _grouped(sent, lambda part: part.table.rows):
            yield table.of_summaries(parts)
    elif what == "envelope":
        for spans in _grouped(record.envelopes(), lambda span: span.table.rows):
            yield table.of_envelopes(spans)
    else:
        for block in record.digest_blocks():
            digests = block.digests if rank is None else block.digests[block.digests["rank"] == rank]
            yield table.of_digests(DigestBlock(digests, block.tables))


def _grouped(parts: Iterable[_T], rows_of: Callable[[_T], int]) -> Iterator[list[_T]]:
    """``parts`` in groups of about ROW_GROUP rows."""
    group: list[_T] = []
    rows = 0
    for part in parts:
        group.append(part)
        rows += rows_of(part)
        if rows >= ROW_GROUP or len(group) >= PARTS:
            yield group
            group, rows = [], 0
    if group:
        yield group


class _Batches:
    """Makes the rows of a schema of what the record holds."""

    def __init__(self, origin: Origin, schema: pa.Schema) -> None:
        self._origin = origin
        self._schema = schema
        self._rows = FrameRows({})
        hosts = [origin.hosts.get(rank, (None, None)) for rank in range(origin.world_size)]
        self._hosts = of_words([host for host, _ in hosts])
        self._local_ranks = pa.array([local_rank for _, local_rank in hosts], pa.int32())

    def of_summaries(self, parts: Sequence[SentPart]) -> pa.RecordBatch:
        lows, highs, states = (np.concatenate(columns) for columns in zip(*[part.columns() for part in parts], strict=True))
        counts = [part.table.rows for part in parts]
        measured = _MEASURED[states]
        steps = np.array([-1 if part.step is None else part.step for part in parts], np.int64)
        return self._batch(
            len(states),
            **self._ranks(np.repeat([part.rank for part in parts], counts)),
            batch=np.repeat([part.batch for part in parts], counts),
            optimizer_step=_known(np.repeat(steps, counts), -1),
            **self._readings(parts, counts),
            abs_min=pa.array(lows.astype(np.float64), mask=~measured),
            abs_max=pa.array(highs.astype(np.float64), mask=~measured),
            state=_STATES.take(pa.array(states)),
        )

    def of_envelopes(self, spans: Sequence[EnvelopePart]) -> pa.RecordBatch:
        counts = [span.table.rows for span in spans]
        low, high, low_rank, high_rank, state, state_rank = (
            np.concatenate([getattr(span.envelope, name) for span in spans])
            for name in ("low", "high", "low_rank", "high_rank", "state", "state_rank")
        )
        return self._batch(
            len(state),
            batch=np.repeat([span.batch for span in spans], counts),
            **self._readings(spans, counts),
            ranks=np.repeat([span.envelope.ranks for span in spans], counts),
            abs_min=pa.array(low.astype(np.float64), mask=low_rank == NO_ROW),
            abs_min_rank=_known(low_rank, NO_ROW),
            abs_max=pa.array(high.astype(np.float64), mask=high_rank == NO_ROW),
            abs_max_rank=_known(high_rank, NO_ROW),
            state=_STATES.take(pa.array(state)),
            state_rank=_known(state_rank, NO_ROW),
        )

    def of_digests(self, block: DigestBlock) -> pa.RecordBatch:
        digests = block.digests
        table_rows, first_frames = self._rows_of(block.tables), pa.array(digests["first_frame"].astype(np.int64))
        readings: dict[str, pa.Array] = {}
        for prefix, row in (("", "row"), ("bad_", "bad_row")):
            found = table_rows.take(table_rows.places(digests["table"], digests[row]))
            found["frame"] = pc.add(found["frame"], first_frames)
            readings |= {f"{prefix}{name}": column for name, column in found.items()}
        return self._batch(
            len(digests),
            **self._ranks(digests["rank"].astype(np.int64)),
            batch=digests["batch"],
            optimizer_step=digests["step"],
            first_frame=digests["first_frame"],
            frames=digests["frames"],
            headroom=digests["headroom"],
            bad=digests["bad"],
            started=_times(digests["started"]),
            ended=_times(digests["ended"]),
            loss=_known(digests["loss"], NO_LOSS),
            gradient_norm=_known(digests["norm"], NO_NORM),
            memory_mib=_known(digests["memory"], NO_MEMORY),
            **readings,
        )

    def _ranks(self, ranks: Array) -> dict[str, object]:
        if len(ranks) and not 0 <= ranks.min() <= ranks.max() < len(self._hosts):
            raise StoreError(f"the record of run {self._origin.run}: ranks that the run does not have")
        places = pa.array(ranks)
        return {"rank": ranks, "host": self._hosts.take(places), "local_rank": self._local_ranks.take(places)}

    def _readings(self, parts: Sequence[SentPart | EnvelopePart], counts: Sequence[int]) -> dict[str, object]:
        rows = self._rows_of({part.number: part.table for part in parts})
        found: dict[str, object] = {**rows.take(pa.array(np.concatenate([rows.of(part.number) for part in parts])))}
        found["frame"] = pc.add(found["frame"], pa.array(np.repeat([part.first_frame for part in parts], counts)))
        return found

    def _rows_of(self, tables: Mapping[int, FrameTable]) -> FrameRows:
        if not self._rows.has(tables):
            self._rows = FrameRows(tables)
        return self._rows

    def _batch(self, rows: int, **columns: object) -> pa.RecordBatch:
        origin, same = self._origin, pa.array(np.zeros(rows, np.int32))
        columns |= {"run": of_words([origin.run]).take(same), "job": of_words([origin.job]).take(same)}
        columns["restart"] = np.full(rows, origin.restart, np.int32)
        arrays = [
            (column if isinstance(column, pa.Array) else pa.array(np.ascontiguousarray(column))).cast(field.type)
            for field, column in ((field, columns[field.name]) for field in self._schema)
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)


def _known(numbers: Array, unknown: float) -> pa.Array:
    """Null where they are ``unknown``."""
    return pa.array(numbers.astype(np.int64 if numbers.dtype.kind in "iu" else np.float64), mask=numbers == unknown)


def _times(seconds: Array) -> pa.Array:
    """Null for times that a calendar cannot express."""
    known = (seconds >= 0) & (seconds < _YEAR_10000)
    return pa.array(np.rint(np.where(known, seconds, 0.0) * 1e6).astype(np.int64), mask=~known)
