"""The record of a run as it is read, while the collector writes it and afterwards."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from rankwatch.shared.printable import cleaned, printable
from rankwatch.shared.types import messages
from rankwatch.shared.types.frame import Frame, FrameTable

from ..decide.core.journal import NO_RANK, Entry, Progress
from ..decide.core.standing import RankStanding, RunStanding
from . import facts
from .checked import reader_of
from .numbers.digest import Columns, Envelope
from .numbers.layout import DIGEST, Array, BlobLayout, pack_frames, unpack_digests, unpack_part, unpack_table
from .numbers.rows import (
    ANY,
    BatchRange,
    DigestBlock,
    EnvelopeKey,
    EnvelopePart,
    PartExtremes,
    PartHistory,
    SentPart,
    Series,
    Standings,
)
from .schema import explained, open_to_read

LAST_PARTS = 4
"""Last parts of batches of each rank: they say how far it came, and how many frames its batches have."""

AT_ONCE = 4096
"""Parts whose digests are looked up together."""

AT_ONCE_BYTES = 16 * 2**20
"""Bytes of parts that are looked at together."""

CACHED_TABLES, CACHED_SEGMENTS = 64, 64
"""Frame tables and unpacked segments of digests that are held in memory."""


_RUN_STANDING, _RANK_STANDINGS = reader_of(RunStanding), reader_of(tuple[RankStanding, ...])


class RunRecord:
    """The record in a file, opened once and in one read transaction: all that is read from it is of the same moment.

    While a record is open, SQLite cannot shrink the write-ahead log, so live views open one for each look.

    Raises (as every method does):
        StoreError: there is no record that can be read.
    """

    def __init__(self, path: Path, *, by_writer: bool = False) -> None:
        """``by_writer``: see ``open_to_read``."""
        self.path = path
        self._database = open_to_read(path, by_writer=by_writer)
        self._table = lru_cache(CACHED_TABLES)(self._read_table)
        self._columns = lru_cache(CACHED_TABLES)(self._make_columns)

    def __enter__(self) -> RunRecord:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        self._database.close()

    @property
    def run(self) -> str:
        """The run's name, which is its folder's."""
        return printable(self.path.parent.resolve().name)

    def mark(self) -> tuple[int, ...]:
        """Changes with every fact and every batch that is added."""
        with self._explained():
            event = self._database.execute("SELECT MAX(id) FROM events").fetchone()
            segment = self._database.execute("SELECT id, count FROM digests ORDER BY id DESC LIMIT 1").fetchone()
            return (*event, *(segment or ()))

    def began(self) -> float:
        """Unix time of the first entry."""
        return float(self._one("SELECT time FROM events ORDER BY id LIMIT 1") or 0.0)

    def ended(self) -> float:
        """Unix time of the last entry."""
        return float(self._one("SELECT time FROM events ORDER BY id DESC LIMIT 1") or 0.0)

    def last_heard(self) -> float:
        """Unix time of the last entry or, if they are newer, of the last standings: of a run that is running, about now."""
        return max(self.ended(), float(self._one("SELECT MAX(time) FROM standing") or 0.0))

    # --- facts --------------------------------------------------------------------------------------------------------

    def meta(self) -> dict[str, str]:
        """Who wrote the record."""
        with self._explained():
            return cleaned(dict(self._database.execute("SELECT name, value FROM meta")))

    def entries(self) -> list[Entry]:
        """Every fact except batches, in the order of arrival."""
        return [entry for _, entry in self.events()]

    def events(self, *kinds: str) -> Iterator[tuple[float, Entry]]:
        """The entries, or only entries of these kinds, each with the Unix time at which it was stored."""
        where = f"WHERE kind IN ({', '.join('?' * len(kinds))})" if kinds else ""
        query = f"SELECT time, now, rank, kind, body FROM events {where} ORDER BY id"
        with self._explained():
            for time, now, rank, kind, body in self._database.execute(query, kinds):
                yield time, Entry(now, rank, facts.decode(kind, body))

    def events_after(self, last: int) -> list[tuple[int, float, Entry]]:
        """The entries after number ``last``, each with its number and Unix time."""
        query = "SELECT id, time, now, rank, kind, body FROM events WHERE id > ? ORDER BY id"
        with self._explained():
            rows = self._database.execute(query, (last,))
            return [
                (number, time, Entry(now, rank, facts.decode(kind, body))) for number, time, now, rank, kind, body in rows
            ]

    def standings(self) -> Standings:
        """Where the run and its ranks were when that was last stored."""
        with self._explained():
            row = self._database.execute("SELECT time, body FROM standing").fetchone()
            if row is None:
                return Standings(0.0, None, [])
            time, body = row[0], cleaned(json.loads(row[1]))
            return Standings(time, _RUN_STANDING(body["run"]), list(_RANK_STANDINGS(body["ranks"])))

    # --- digests ------------------------------------------------------------------------------------------------------

    def digests(self) -> Array:
        """All digests, in the order in which the parts came."""
        return np.concatenate([np.zeros(0, DIGEST), *(digests for _, digests in self.segments(DIGEST.names or ()))])

    def segments(self, columns: Sequence[str], *, since: int = 0, batches: BatchRange = ANY) -> Iterator[tuple[int, Array]]:
        """These columns of the digests, segment by segment with its number, from number ``since`` on.

        Only segments with any of these batches. The last segment still grows.
        """
        query = "SELECT id, body FROM digests WHERE id >= ? AND last_batch >= ? AND first_batch <= ? ORDER BY id"
        with self._explained():
            for number, body in self._database.execute(query, (since, *batches)):
                yield number, unpack_digests(body, columns)

    def some_segments(self, columns: Sequence[str], most: int) -> Iterator[tuple[int, Array]]:
        """As ``segments``, of at most so many: of more, an eighth at each end, and others that are evenly apart."""
        with self._explained():
            numbers = [number for (number,) in self._database.execute("SELECT id FROM digests ORDER BY id")]
            if len(numbers) > most:
                end = most // 8
                apart = np.linspace(end, len(numbers) - end - 1, most - 2 * end).astype(int).tolist()
                numbers = [*numbers[:end], *(numbers[at] for at in apart), *numbers[-end:]]
            for number in numbers:
                for (body,) in self._database.execute("SELECT body FROM digests WHERE id = ?", (number,)):
                    yield number, unpack_digests(body, columns)

    def newest_digests(self, segments: int) -> Array:
        """The digests of the last ``segments`` segments, in the order in which the parts came."""
        return np.concatenate([np.zeros(0, DIGEST), *reversed(list(self.last_segments(DIGEST.names or (), segments)))])

    def last_segments(self, columns: Sequence[str], most: int) -> Iterator[Array]:
        """These columns of the last segments of digests, the newest first."""
        with self._explained():
            for (body,) in self._database.execute("SELECT body FROM digests ORDER BY id DESC LIMIT ?", (most,)):
                yield unpack_digests(body, columns)

    def digest_blocks(self) -> Iterator[DigestBlock]:
        """The digests segment by segment, in the order in which the parts came."""
        with self._explained():
            for _, digests in self.segments(DIGEST.names or ()):
                yield self._with_tables(digests)

    def last_digests(self, rank: int, batches: int) -> DigestBlock:
        """The digests of the last ``batches`` batches of a rank."""
        found: list[Array] = [np.zeros(0, DIGEST)]
        with self._explained():
            for (body,) in self._database.execute("SELECT body FROM digests ORDER BY id DESC"):
                digests = unpack_digests(body)
                found.insert(0, digests[digests["rank"] == rank])
                # One batch more, so that the first one asked for has all its parts.
                if len({batch for some in found for batch in some["batch"].tolist()}) > batches:
                    break
            digests = np.concatenate(found)
            last = np.unique(digests["batch"])[-batches:]
            return self._with_tables(digests[np.isin(digests["batch"], last)])

    def digests_of(self, rank: int, batch: int) -> DigestBlock:
        """The digests of the parts of one batch of one rank."""
        with self._explained():
            digests = _DigestsByBatch(self._database, DIGEST.names or ()).between(batch, batch)
            return self._with_tables(digests[digests["rank"] == rank])

    def progress(self) -> list[Progress]:
        """The last LAST_PARTS parts of each rank, oldest first."""
        with self._explained():
            ranks = {rank for (rank,) in self._database.execute("SELECT DISTINCT rank FROM events")} - {NO_RANK}
            found: dict[int, list[Progress]] = {rank: [] for rank in ranks}
            missing = ranks
            for (body,) in self._database.execute("SELECT body FROM digests ORDER BY id DESC"):
                digests = unpack_digests(body)
                for digest in digests[np.isin(digests["rank"], list(missing))][::-1][list(Progress._fields)].tolist():
                    if len(of_rank := found[digest[0]]) < LAST_PARTS:
                        of_rank.append(Progress(*digest))
                missing = {rank for rank in missing if len(found[rank]) < LAST_PARTS}
                if not missing:
                    break
            return [part for parts in found.values() for part in reversed(parts)]

    def first_batch(self) -> int:
        """The first batch that a digest is stored of, 0 where there is none."""
        return int(self._one("SELECT MIN(first_batch) FROM digests") or 0)

    def last_batch(self) -> int:
        """The last batch of any rank, -1 before the first."""
        last = self._one("SELECT MAX(last_batch) FROM digests")
        return -1 if last is None else int(last)

    # --- parts as the ranks sent them ---------------------------------------------------------------------------------

    def sent_batches(self, rank: int) -> list[int]:
        """The batches of a rank that are retained as it sent them, in order."""
        return self._batches(f"summaries WHERE rank = {rank:d}")

    def frames(self, rank: int, batch: int) -> list[Frame]:
        """The frames of a batch in execution order, as the rank sent them; empty when it is not retained."""
        query = "SELECT first_frame, tbl, body FROM summaries WHERE rank = ? AND batch = ? ORDER BY first_frame"
        with self._explained():
            frames: list[Frame] = []
            for first_frame, number, body in self._database.execute(query, (rank, batch)):
                table = self._table(number)
                frames += unpack_part(batch, first_frame, table, body).frames(table)
            return frames

    def sent(self, rank: int | None = None) -> Iterator[SentPart]:
        """The retained parts as the ranks sent them, of all ranks or of one, in the order of the batches."""
        where, values = ("", ()) if rank is None else ("WHERE rank = ?", (rank,))
        source, order = f"FROM summaries {where}", "ORDER BY batch, rank, first_frame"
        with self._explained():
            by_batch = _DigestsByBatch(self._database, ("batch", "rank", "first_frame", "step", "ended"))
            bodies = self._database.execute(f"SELECT tbl, body {source} {order}", values)
            keys = self._database.execute(f"SELECT batch, rank, first_frame {source} {order}", values)
            while some := keys.fetchmany(AT_ONCE):
                digests = {digest[:3]: digest[3:] for digest in by_batch.between(some[0][0], some[-1][0]).tolist()}
                for key, (number, body) in zip(some, bodies, strict=False):
                    (batch, by, first_frame), (step, ended) = key, digests.get(key, (None, None))
                    table = self._table(number)
                    self._columns(number).part.check(body)
                    yield SentPart(batch, by, first_frame, number, table, step, ended, body)

    def tripped(self, rank: int | None = None) -> list[SentPart]:
        """The last frames of ranks that tripped, which came with the trips and in no part, in the order of the batches.

        Their tables are not in the record and are numbered from -1 downwards.
        """
        found: list[SentPart] = []
        for _, (_, by, fact) in self.events("tripped"):
            if not isinstance(fact, messages.Tripped) or rank not in (None, by) or fact.trip.position.eval:
                continue
            batch = fact.trip.position.batch
            known = {frame.position for frame in self.frames(by, batch)}
            frames = [f for f in fact.trip.frames if f.position[:2] == fact.trip.position[:2] and f.position not in known]
            if frames and batch >= 0:
                table = FrameTable(tuple(frame.spec for frame in frames))
                first, step, time = frames[0].position.frame, fact.trip.optimizer_step, fact.trip.time
                found.append(SentPart(batch, by, first, -1 - len(found), table, step, time, pack_frames(frames, table)))
        return sorted(found, key=lambda part: part[:3])

    # --- envelopes ----------------------------------------------------------------------------------------------------

    def envelope_batches(self) -> list[int]:
        """The batches that have an envelope, in order."""
        return self._batches("envelopes")

    def full_batches(self, batches: BatchRange, most: int) -> list[int]:
        """The last of these batches of which more than the root was measured, in order."""
        query = "SELECT DISTINCT batch, tbl FROM envelopes WHERE batch BETWEEN ? AND ? ORDER BY batch DESC"
        found: list[int] = []
        with self._explained():
            for batch, number in self._database.execute(query, batches):
                if found[-1:] != [batch] and any(spec.module for spec in self._table(number).specs):
                    found.append(batch)
                    if len(found) == most:
                        break
        return found[::-1]

    def newest_envelopes(self, most: int) -> list[EnvelopeKey]:
        """The keys of the last ``most`` envelopes, the newest first."""
        query = (
            "SELECT batch, first_frame, tbl, ranks FROM envelopes ORDER BY batch DESC, first_frame DESC, tbl DESC LIMIT ?"
        )
        with self._explained():
            return [EnvelopeKey(*row) for row in self._database.execute(query, (most,))]

    def oldest_envelope(self, key: EnvelopeKey) -> EnvelopeKey:
        """The key of the first envelope of the same kind of part."""
        return self.first_envelopes(key, 1)[0]

    def first_envelopes(self, key: EnvelopeKey, most: int) -> list[EnvelopeKey]:
        """The keys of the first envelopes of the same kind of part, the oldest first."""
        query = (
            "SELECT batch, first_frame, tbl, ranks FROM envelopes WHERE first_frame = ? AND tbl = ? ORDER BY batch LIMIT ?"
        )
        with self._explained():
            return [EnvelopeKey(*row) for row in self._database.execute(query, (*key[1:3], most))]

    def nearest_envelopes(self, key: EnvelopeKey, batches: Sequence[int]) -> list[EnvelopeKey]:
        """The keys of the last envelopes of the same kind of part up to each of these batches."""
        query = (
            "SELECT batch, first_frame, tbl, ranks FROM envelopes WHERE first_frame = ? AND tbl = ? AND batch <= ? "
            "ORDER BY batch DESC LIMIT 1"
        )
        with self._explained():
            found = [self._database.execute(query, (*key[1:3], batch)).fetchone() for batch in batches]
            return [EnvelopeKey(*row) for row in found if row is not None]

    def next_envelope(self, key: EnvelopeKey, batch: int) -> EnvelopeKey | None:
        """The key of the first envelope of the same kind of part from this batch on."""
        query = (
            "SELECT batch, first_frame, tbl, ranks FROM envelopes WHERE first_frame = ? AND tbl = ? AND batch >= ? "
            "ORDER BY batch LIMIT 1"
        )
        with self._explained():
            row = self._database.execute(query, (*key[1:3], batch)).fetchone()
            return None if row is None else EnvelopeKey(*row)

    def envelope(self, key: EnvelopeKey) -> Envelope:
        query = "SELECT ranks, body FROM envelopes WHERE batch = ? AND first_frame = ? AND tbl = ?"
        with self._explained():
            ranks, body = self._database.execute(query, key[:3]).fetchone()
            return Envelope.unpack(ranks, body, self._columns(key.table))

    def envelopes(self, batch: int | None = None) -> Iterator[EnvelopePart]:
        """The envelopes in the order of the batches, or only the envelopes of one batch."""
        where, values = ("", ()) if batch is None else ("WHERE batch = ?", (batch,))
        query = f"SELECT batch, first_frame, tbl, ranks, body FROM envelopes {where} ORDER BY batch, first_frame, tbl"
        with self._explained():
            by_batch = _DigestsByBatch(self._database, ("batch", "first_frame", "ended"))
            for at, first_frame, number, ranks, body in self._database.execute(query, values):
                digests = by_batch.between(at, at)
                times = digests["ended"][digests["first_frame"] == first_frame]
                ended = float(times.max()) if len(times) else None
                envelope = Envelope.unpack(ranks, body, self._columns(number))
                yield EnvelopePart(at, first_frame, number, self._table(number), ended, envelope)

    # --- readings over the batches, as a rank sent them (rank None: over all ranks, from the envelopes) -----------------

    def extremes(
        self, rank: int | None, tables: Mapping[int, Columns], batches: BatchRange = ANY, most: int | None = None
    ) -> Iterator[PartExtremes]:
        """The abs max and state of every row of each part of these batches, in the order of the batches.

        Args:
            tables: by number; only the parts of these tables.
            most: of many more parts than these, those of every second batch, every third, and so on.
        """
        source = f"{_source(rank)} AND tbl IN ({', '.join(map(str, tables))}) AND batch BETWEEN ? AND ?"
        with self._explained():
            step = 1
            if most is not None:
                (count,) = self._database.execute(f"SELECT COUNT(*) FROM {source}", batches).fetchone()
                step = max(1, count // most)
            query = f"SELECT batch, tbl, body FROM {source} AND batch % ? = 0 ORDER BY batch"
            rows = self._database.execute(query, (*batches, step))
            # A body has up to megabytes.
            largest = max((_layout(rank, columns).size for columns in tables.values()), default=0)
            while some := rows.fetchmany(max(1, min(AT_ONCE, AT_ONCE_BYTES // (largest + 1)))):
                by_table: dict[int, list[tuple[int, bytes]]] = {}
                for batch, number, body in some:
                    by_table.setdefault(number, []).append((batch, body))
                for number, found in by_table.items():
                    numbers, bodies = zip(*found, strict=True)
                    layout, high = _layout(rank, tables[number]), "high" if rank is None else "abs_max"
                    highs, states = (layout.columns_of(bodies, name) for name in (high, "state"))
                    yield PartExtremes(np.array(numbers), number, highs, states)

    def history(self, rank: int, batches: BatchRange) -> Iterator[PartHistory]:
        """The retained parts of these batches as the rank sent them, in the order of the batches."""
        query = "SELECT batch, first_frame, tbl, body FROM summaries WHERE rank = ? AND batch BETWEEN ? AND ?"
        with self._explained():
            rows = self._database.execute(f"{query} ORDER BY batch, first_frame", (rank, *batches))
            for batch, first_frame, number, body in rows:
                layout = self._columns(number).part
                high, state = layout.column(body, "abs_max"), layout.column(body, "state")
                yield PartHistory(batch, first_frame, number, self._table(number), high, state)

    def steps(self, ranks: Sequence[int], batches: BatchRange) -> dict[tuple[int, int], int]:
        """The optimizer steps done before each of these batches, by rank and batch."""
        with self._explained():
            digests = _DigestsByBatch(self._database, ("rank", "batch", "step")).between(*batches)
            return {(by, batch): step for by, batch, step in digests[np.isin(digests["rank"], ranks)].tolist()}

    def series(self, rank: int | None, columns: Columns, row: int, batches: BatchRange = ANY) -> Series:
        """One row of a frame table over these batches."""
        layout = _layout(rank, columns)
        names = ("low", "high", "state") if rank is None else ("abs_min", "abs_max", "state")
        cells = ", ".join("substr(body, {}, {})".format(*layout.cell(name, row)) for name in names)
        query = f"SELECT batch, {cells} FROM {_source(rank)} AND tbl = ? AND batch BETWEEN ? AND ? ORDER BY batch"
        with self._explained():
            found = self._database.execute(query, (columns.number, *batches)).fetchall()
            numbers, lows, highs, states = zip(*found, strict=True) if found else ((),) * 4
            cells_of = ((lows, columns.dtype), (highs, columns.dtype), (states, np.dtype(np.uint8)))
            return Series(
                np.array(numbers, np.int64), *(np.frombuffer(b"".join(column), dtype) for column, dtype in cells_of)
            )

    # --- frame tables -------------------------------------------------------------------------------------------------

    def tables(self) -> dict[int, FrameTable]:
        """The frame tables by number."""
        with self._explained():
            return {number: unpack_table(body) for number, body in self._database.execute("SELECT number, body FROM tables")}

    def table(self, number: int) -> FrameTable:
        with self._explained():
            return self._table(number)

    def _read_table(self, number: int) -> FrameTable:
        row = self._database.execute("SELECT body FROM tables WHERE number = ?", (number,)).fetchone()
        if row is None:
            raise LookupError(f"no frame table {number}")
        return unpack_table(row[0])

    def _make_columns(self, number: int) -> Columns:
        return Columns(number, self._table(number))

    def _with_tables(self, digests: Array) -> DigestBlock:
        return DigestBlock(
            digests, {number: self._table(number) for number in np.unique(digests["table"]).tolist() if number}
        )

    def _batches(self, source: str) -> list[int]:
        with self._explained():
            return [batch for (batch,) in self._database.execute(f"SELECT DISTINCT batch FROM {source} ORDER BY batch")]

    def _one(self, query: str) -> Any:
        """The first column of the first row; None without a row."""
        with self._explained():
            row = self._database.execute(query).fetchone()
            return row[0] if row else None

    def _explained(self) -> AbstractContextManager[None]:
        return explained(self.path)


def _layout(rank: int | None, columns: Columns) -> BlobLayout:
    return columns.envelope if rank is None else columns.part


def _source(rank: int | None) -> str:
    return "envelopes WHERE 1" if rank is None else f"summaries WHERE rank = {rank:d}"


class _DigestsByBatch:
    """Some columns of the digests by batch; the segments used last stay unpacked."""

    def __init__(self, database: sqlite3.Connection, names: Sequence[str]) -> None:
        self._database = database
        self._names = names
        spans = database.execute("SELECT id, first_batch, last_batch FROM digests ORDER BY id").fetchall()
        self._ids, self._firsts, self._lasts = np.array(spans, np.int64).reshape(-1, 3).T
        self._segment = lru_cache(CACHED_SEGMENTS)(self._unpack)

    def between(self, first: int, last: int) -> Array:
        """The digests of the batches from ``first`` to ``last``, in the order in which they came."""
        ids = self._ids[(self._firsts <= last) & (self._lasts >= first)]
        found = [np.zeros(0, [(name, DIGEST[name]) for name in self._names]), *map(self._segment, ids.tolist())]
        return np.concatenate([digests[(digests["batch"] >= first) & (digests["batch"] <= last)] for digests in found])

    def _unpack(self, segment: int) -> Array:
        (body,) = self._database.execute("SELECT body FROM digests WHERE id = ?", (segment,)).fetchone()
        return unpack_digests(body, self._names)
