"""Records of large runs, written in seconds: digests, envelopes and summaries as the store has them after a real large run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

import makers
from rankwatch.shared.link import wire
from rankwatch.shared.types import messages
from rankwatch.shared.types.frame import FrameSpec, FrameTable, Kind, ReadingSpec, State, pack
from rankwatch_monitor.decide.core.journal import NO_RANK, Closed, Decided, Entry, Fact, Opened
from rankwatch_monitor.decide.core.report import Outcome
from rankwatch_monitor.record.numbers.digest import Columns, Envelope
from rankwatch_monitor.record.numbers.layout import DIGEST, Array
from rankwatch_monitor.record.schema import FILE
from rankwatch_monitor.record.store import Limits, Store

PER_HOST = 8
CHUNK = 1 << 18


def table_of(modules: int) -> FrameTable:
    """Modules in blocks of ten, each with a weight, an input and an output, in float16."""
    rows = [(Kind.PARAMETER, "weight"), (Kind.INPUT, "input[0]"), (Kind.OUTPUT, "output")]
    specs = [ReadingSpec(kind, label, "float16") for kind, label in rows]
    return FrameTable(tuple(FrameSpec(f"blocks.{i // 10}.part{i % 10}", "Linear", tuple(specs)) for i in range(modules)))


def generate(
    folder: Path, world_size: int, batches: int, *, modules: int = 100, kept: Sequence[int] = (), trips: bool = True
) -> Path:
    """Writes a run in which the output of one module grows on one rank, until it trips there (with ``trips``).

    Args:
        kept: the batches whose summaries are stored, for each rank.
    """
    folder.mkdir(parents=True)
    store, table = Store(folder / FILE, Limits(digests=1 << 40, envelopes=1 << 40, summaries=1 << 40)), table_of(modules)
    columns, guilty, culprit = Columns(1, table), world_size // 3, 3 * (modules // 2) + 2
    body = wire.encode(messages.Table(table))
    facts: list[tuple[int, Fact]] = [(NO_RANK, Opened("large", 0, world_size))]
    facts += [
        (rank, makers.hello(rank, world_size, job="large", host=f"node{rank // PER_HOST:04d}", local_rank=rank % PER_HOST))
        for rank in range(world_size)
    ]
    store.write([Entry(0.0, rank, fact) for rank, fact in facts], 1.8e9, run=folder.name)
    with store._database:
        store._database.execute("BEGIN")
        store._database.execute("INSERT INTO tables VALUES (1, ?, ?)", (table.id, body))
        for first in range(0, world_size * batches, CHUNK):
            store._write_digests(_digests(first, min(CHUNK, world_size * batches - first), world_size, guilty, culprit))
        rows = [(batch, 0, 1, world_size, _envelope(columns, batch, guilty, culprit)) for batch in range(batches)]
        store._insert("INSERT INTO envelopes VALUES", rows)
        for batch in kept:
            sent = [
                (batch, rank, 0, 1, 0, _summary(columns, batch, culprit if rank == guilty else None))
                for rank in range(world_size)
            ]
            store._insert("INSERT INTO summaries VALUES", sent)
    if trips:
        trip = makers.trip(at=(batches, 0, 3), module="blocks.5.part0")
        end: list[tuple[int, Fact]] = [(guilty, messages.Tripped(batches + 1, trip))]
        end += [(rank, messages.Bye(batches + 2, "aborted", "")) for rank in range(world_size)]
        end += [(NO_RANK, Decided(Outcome.ABORTED, "because", True)), (NO_RANK, Closed())]
        store.write([Entry(float(batches), rank, fact) for rank, fact in end], 1.8e9 + batches)
    store.close()
    return folder


def _growth(batches: Array) -> Array:
    """The abs max of the culprit's output: 1 at first, near float16's largest number in batch 10,000."""
    grown: Array = np.exp2(np.minimum(batches / 640, 15.9))
    return grown


def _digests(first: int, count: int, world_size: int, guilty: int, culprit: int) -> Array:
    index = np.arange(first, first + count)
    made = np.zeros(count, DIGEST)
    made["rank"], made["batch"] = index % world_size, index // world_size
    made["headroom"] = 12 + np.sin(made["batch"] / 300 + made["rank"] / 40)
    made["row"] = 2
    grown = made["rank"] == guilty
    made["headroom"][grown] = np.minimum(made["headroom"][grown], 16 - np.log2(_growth(made["batch"][grown])))
    made["row"][grown] = culprit
    made["loss"] = 4 * np.exp2(-made["batch"] / 2000) + 0.1 * np.sin(made["batch"] / 7 + made["rank"])
    made["norm"] = 0.5 + 0.2 * np.sin(made["batch"] / 50)
    made["memory"] = 30_000 + made["rank"]
    made["bad_row"], made["table"], made["frames"] = 0xFFFFFFFF, 1, 100
    made["seq"], made["step"] = made["batch"] + 1, made["batch"]
    made["started"], made["ended"] = 1.8e9 + made["batch"], 1.8e9 + made["batch"] + 0.9
    return made


def _highs(columns: Columns, batch: int) -> Array:
    highs: Array = (4 + np.sin(batch / 300 + np.arange(columns.rows))).astype(columns.dtype)
    return highs


def _envelope(columns: Columns, batch: int, guilty: int, culprit: int) -> bytes:
    envelope = Envelope(columns)
    envelope.low[:], envelope.high[:] = 1e-3, _highs(columns, batch)
    envelope.high[culprit] = max(float(_growth(np.array([batch]))[0]), envelope.high[culprit])
    envelope.low_rank[:], envelope.high_rank[:], envelope.state_rank[:] = 0, 1, 0
    envelope.high_rank[culprit] = guilty
    envelope.state[:] = State.FINITE
    return envelope.pack()


def _summary(columns: Columns, batch: int, culprit: int | None) -> bytes:
    highs = _highs(columns, batch)
    if culprit is not None:
        highs[culprit] = max(float(_growth(np.array([batch]))[0]), highs[culprit])
    return pack(columns.dtype.char, [1e-3] * columns.rows) + highs.tobytes() + bytes(columns.rows)
