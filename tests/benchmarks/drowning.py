"""How long an abort takes while batches come faster than the collector's core handles them.

    python tests/benchmarks/drowning.py [--ranks 64,1024] [--seconds 60] [--trips 10] [--json FILE]

Ranks in other processes send batches (1,000 readings) as fast as their windows allow, as agents do whose steps are too fast, to a
real ``rankwatch collector`` on one core. Beside them, small runs of 8 ranks trip one after another, each rank 0 behind a full
window of its own batches: first with ranks that are known to be past the batch ("known"), then with ranks that the collector
must ask ("asked"), in turn. Then the large run itself trips while it drowns the collector, equally often in both ways.

Milliseconds from TRIP to ABORT at the rank that trips; batches that are sent each second; the collector's memory at most, in
MiB.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("tests", "agent", "monitor")]

import makers
from benchmarks.load import TRIP_RANKS, Crowd, Ranks, collector, columns, show, spread
from rankwatch.shared.link import connection as connections
from rankwatch.shared.link import wire
from rankwatch.shared.link.connection import Connection
from rankwatch.shared.types import messages
from rankwatch_monitor.serve.collector import raise_descriptor_limit

FULL = 50
"""Batches that are sent before a trip, as far as the window allows."""

PAST, AHEAD = 0, 1 << 40
"""A batch that all ranks are known to be past, and one that none is."""

WARM = 10.0
"""Seconds until the collector drowns."""

LONG = 60.0
"""Seconds in which an ABORT comes, if one comes at all."""


def small_run(connection: Connection, job: str, batch: int) -> float:
    """Milliseconds from TRIP to ABORT of a run of its own."""
    with closing(Ranks(connection, job, TRIP_RANKS, range(TRIP_RANKS))) as ranks:
        ranks.connect()
        for index in range(1, TRIP_RANKS):
            ranks.send(index, wire.encode(makers.beat(1, 0, 0)))
        for index in range(1, TRIP_RANKS):  # until it is known
            while not any(isinstance(message, messages.Ack) for message in ranks.receive(index)):
                ranks.sockets[index].poll(1000)
        return trip(ranks, batch)


def trip(ranks: Ranks, batch: int) -> float:
    seq = ranks.fill(0, FULL)
    begun = time.time()
    ranks.trip(0, seq, (batch, 0, 0))
    while ranks.aborted_at(0) is None:
        ranks.heed_all()
        time.sleep(0.0002)
        if time.time() - begun > LONG:
            raise TimeoutError(f"no ABORT within {LONG:g} s")
    while ranks.heed_all():
        pass
    ranks.leave()
    return 1000 * ((ranks.aborted_at(0) or 0.0) - begun)


def measure(world_size: int, seconds: float, trips: int, cores: list[int], folder: Path) -> dict[str, Any]:
    found: dict[str, list[float]] = {"small, known": [], "small, asked": [], "large, known": [], "large, asked": []}
    with collector(folder, cores[0], folder / "log") as (usage, path):
        connection = connections.read(path)
        crowd = Crowd(path, "drown", world_size, range(1, world_size), cores[1:] or cores)
        try:
            crowd.call("connect")
            crowd.begin("flood", WARM + seconds)
            time.sleep(WARM)
            until, number = time.time() + seconds, 0
            while time.time() < until:
                found["small, asked" if number % 2 else "small, known"].append(
                    small_run(connection, f"small{number}", AHEAD if number % 2 else PAST)
                )
                number += 1
            sent = sum(crowd.finish())
            with closing(Ranks(connection, "drown", world_size, range(1))) as first:
                for number in range(1, 2 * trips + 1):
                    crowd.call("leave")
                    crowd.begin("connect", number)
                    first.connect(number)
                    crowd.finish()
                    crowd.begin("flood", WARM + LONG)
                    time.sleep(WARM / 4)
                    found["large, asked" if number % 2 else "large, known"].append(
                        trip(first, AHEAD if number % 2 else PAST)
                    )
                    crowd.finish()
            memory = usage.largest()
        finally:
            crowd.close()
    rows = {f"{name} {part}": value for name, times in found.items() for part, value in summed_up(times).items()}
    return {"ranks": world_size, "batches/s": sent / (WARM + seconds), **rows, "MiB at most": memory}


def summed_up(times: list[float]) -> dict[str, float]:
    return {"aborts": len(times), **{name.strip(): value for name, value in spread("", times).items()}}


NAMES = [f"{size}, {way}" for size in ("small", "large") for way in ("known", "asked")]
COLUMNS = {"ranks": "{}", "batches/s": "{:.0f}", "MiB at most": "{:.0f}"}
for _name in NAMES:
    COLUMNS |= {f"{_name} aborts": "{}", **columns(_name)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=lambda text: [int(part) for part in text.split(",")], default=[64, 1024])
    parser.add_argument("--seconds", type=float, default=60.0, help="for which small runs trip")
    parser.add_argument("--trips", type=int, default=10, help="of the large run, of either kind")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[1:] or cores)  # the first core is the collector's alone
    raise_descriptor_limit()
    rows = []
    for world_size in arguments.ranks:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(world_size, arguments.seconds, arguments.trips, cores, Path(folder)))
        show(rows[-1:], COLUMNS)
        print(flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
