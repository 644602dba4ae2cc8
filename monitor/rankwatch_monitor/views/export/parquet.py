"""The record as Parquet: one row for each reading as sent, for each reading over the ranks, or for each digest."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import IO, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rankwatch import __version__
from rankwatch.shared.types.frame import MEASURED, NO_LOSS, NO_NORM, State

from ...record.layout import NO_MEMORY, NO_ROW, Array
from ...record.reader import RunRecord
from ...record.rows import DigestBlock, EnvelopePart, SentPart
from ...record.schema import StoreError
from .origin import Origin
from .rows import NO_WORD, TEXTS, TableWords, Words
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
"""What the columns of each are called and made of; docs/pages/views.md explains them."""

_PACKED = "run", "job", "restart", *(name for name, _ in (*_RANK, *_READING)), "batch", "optimizer_step", "state"
"""Columns with few different values, which Parquet packs best with a dictionary."""

_YEAR_10000 = 253402300800.0

_STATES = Words(state.name.lower() for state in State)
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
        self._rows = TableWords()
        self._hosts = Words()
        self._host, self._local_rank = (np.full(origin.world_size, NO_WORD, np.int32) for _ in range(2))
        for rank, (host, local_rank) in origin.hosts.items():
            self._host[rank], self._local_rank[rank] = self._hosts.numbers([host])[0], local_rank

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
            state=_words(states.astype(np.int32), _STATES),
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
            state=_words(state.astype(np.int32), _STATES),
            state_rank=_known(state_rank, NO_ROW),
        )

    def of_digests(self, block: DigestBlock) -> pa.RecordBatch:
        digests = block.digests
        readings = {}
        for prefix, row in (("", "row"), ("bad_", "bad_row")):
            found = self._rows.at(block.tables, digests["table"], digests[row])
            frame = np.where(found["frame"] < 0, -1, found["frame"] + digests["first_frame"])
            readings[f"{prefix}frame"] = _known(frame, -1)
            readings |= {f"{prefix}{name}": _words(found[name], self._rows.words[name]) for name in TEXTS}
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
        if len(ranks) and not 0 <= ranks.min() <= ranks.max() < len(self._host):
            raise StoreError(f"the record of run {self._origin.run}: ranks that the run does not have")
        return {
            "rank": ranks,
            "host": _words(self._host[ranks], self._hosts),
            "local_rank": _known(self._local_rank[ranks], NO_WORD),
        }

    def _readings(self, parts: Sequence[SentPart | EnvelopePart], counts: Sequence[int]) -> dict[str, object]:
        columns = [self._rows.of(part.number, part.table) for part in parts]
        joined = {name: np.concatenate([column[name] for column in columns]) for name in ("frame", *TEXTS)}
        frames = joined["frame"] + np.repeat([part.first_frame for part in parts], counts)
        return {"frame": frames, **{name: _words(joined[name], self._rows.words[name]) for name in TEXTS}}

    def _batch(self, rows: int, **columns: object) -> pa.RecordBatch:
        origin, same = self._origin, np.zeros(rows, np.int32)
        columns |= {"run": _words(same, Words([origin.run])), "job": _words(same, Words([origin.job]))}
        columns["restart"] = np.full(rows, origin.restart, np.int32)
        arrays = [
            (column if isinstance(column, pa.Array) else pa.array(np.ascontiguousarray(column))).cast(field.type)
            for field, column in ((field, columns[field.name]) for field in self._schema)
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)


def _words(numbers: Array, words: Words) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array(numbers, mask=numbers == NO_WORD), pa.array(words.all(), pa.string()))


def _known(numbers: Array, unknown: float) -> pa.Array:
    """Null where they are ``unknown``."""
    return pa.array(numbers.astype(np.int64 if numbers.dtype.kind in "iu" else np.float64), mask=numbers == unknown)


def _times(seconds: Array) -> pa.Array:
    """Null for times that a calendar cannot express."""
    known = (seconds >= 0) & (seconds < _YEAR_10000)
    return pa.array(np.rint(np.where(known, seconds, 0.0) * 1e6).astype(np.int64), mask=~known)
