"""A record of a run of many ranks on many nodes, some of them in trouble, without a job: ``python tests/crowds.py FOLDER``."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import makers
from rankwatch.shared.types import messages
from rankwatch.shared.types.frame import BatchSummary, Frame, FrameTable, pack
from rankwatch_monitor.decide.core.effects import Show
from rankwatch_monitor.decide.core.journal import NO_RANK, Decided, Entry, Left, Opened, Reached, Trained
from rankwatch_monitor.decide.core.report import Outcome, RankState
from rankwatch_monitor.decide.core.standing import RankStanding, RunStanding
from rankwatch_monitor.record.schema import FILE
from rankwatch_monitor.record.store import Store

PER_NODE = 8
LOST, SILENT, STILL = 203, 411, 100
"""The ranks in trouble."""

GROWTH = 1.05
"""Growth of the last module's output per batch."""

SECONDS = 0.5
"""Duration of a batch."""

NORM, MEMORY = 0.5, 30 << 30
"""Of the gradients of each step; and what tensors take on the first rank's GPU."""


def host(rank: int) -> str:
    return f"gpu-a100-{rank // PER_NODE:04}.cluster"


def frames(batch: int, modules: int = 24) -> list[Frame]:
    names = [f"decoder.layers.{number // 2}.{('attention', 'feed_forward')[number % 2]}" for number in range(modules)]
    return [
        makers.frame(
            makers.reading("weight", 0.5, low=0.1, dtype="float16"),
            makers.reading(
                "output", 10.0 * (number + 1) * GROWTH ** (min(batch, 100) if number == modules - 1 else 0), dtype="float16"
            ),
            module=name,
            at=(batch, 0, number),
        )
        for number, name in enumerate(names)
    ]


def write(folder: Path, ranks: int = 1024, batches: int = 20, *, trouble: bool = True, verdict: bool = False) -> Path:
    """Writes a running run, ``crowd-0``, that started ``batches`` batches ago; returns its folder."""
    run = folder / "crowd-0"
    run.mkdir(parents=True)
    (folder / "latest").symlink_to(run.name)
    store = Store(run / FILE)
    now = time.time()
    begun = now - batches * SECONDS
    hellos = [
        Entry(0.0, rank, makers.hello(rank, ranks, job="crowd", host=host(rank), local_rank=rank % PER_NODE))
        for rank in range(ranks)
    ]
    store.write([Entry(0.0, NO_RANK, Opened("crowd", 0, ranks)), *hellos], begun)
    for batch in range(batches):
        store.write(list(trained(ranks, batch, begun)), begun + batch * SECONDS)
    store.write(list(_events(ranks, batches, trouble=trouble, verdict=verdict)), now)
    standing = RunStanding("crowd", 0, ranks, int(verdict), 0, None, False, 1.0, "")
    store.write(
        [], now, Show("crowd-0", tuple(_standing(rank, batches, trouble=trouble) for rank in range(ranks)), standing)
    )
    store.close()
    return run


def trained(ranks: int, batch: int, begun: float) -> Iterator[Entry]:
    made = frames(batch)
    table = FrameTable(tuple(frame.spec for frame in made))
    lows = pack(table.typecode, [low for frame in made for low in frame.abs_min])
    highs = pack(table.typecode, [high for frame in made for high in frame.abs_max])
    start = begun + batch * SECONDS
    summary = BatchSummary(batch, 0, batch, start, start + SECONDS, False, table.id, lows, highs, bytes(table.rows), NORM)
    for rank in range(ranks):
        memory = MEMORY + rank * (1 << 20)
        yield Entry(batch * SECONDS, rank, Trained(batch + 1, summary._replace(memory=memory), table))


def _events(ranks: int, batch: int, *, trouble: bool, verdict: bool) -> Iterator[Entry]:
    now = batch * SECONDS
    if trouble and ranks > LOST:
        yield Entry(now, LOST, Left(RankState.LOST))
    for rank in range(min(4, ranks)):
        value = makers.notice(module="decoder.layers.11.feed_forward", batch=batch - 1, value=9000.0, growth=0.07)
        yield Entry(now, rank, messages.Noticed(batch + 1, value))
    if verdict:
        yield Entry(now, NO_RANK, Reached(tuple(range(ranks)), ((batch, batch, 0, 24),) * ranks, (batch - 1,) * ranks))
        yield Entry(now, 7, messages.Tripped(batch + 2, makers.trip(at=(batch, 0, 23), before=tuple(frames(batch)[:20]))))
        yield Entry(now, NO_RANK, Decided(Outcome.ABORTED, "rank 7 overflowed", True))


def _standing(rank: int, batch: int, *, trouble: bool) -> RankStanding:
    place = (batch, 0, rank % 24, "forward", 0.2, 0.1, "", 0, 0)
    if trouble and rank == LOST:
        return RankStanding(rank, RankState.LOST, batch - 7, 0, 3, "backward", 9.0, 9.0, "", 0, 0)
    if trouble and rank == SILENT:
        place = (batch, 0, 3, "forward", 14.0, 3.0, "silent, but still connected", 2, 5)
    if trouble and rank == STILL:
        place = (batch - 1, 0, 7, "backward", 0.3, 42.0, "", 0, 0)
    return RankStanding(rank, RankState.RUNNING, *place)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
