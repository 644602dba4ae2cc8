"""Time from the bad value to the end of the job: real torchrun jobs with an overflow on one rank, timed from outside.

    python tests/benchmarks/abort.py [--runs 5] [--json FILE]

Prints medians (and the range) over the runs, in milliseconds:
  TRIP to ABORT       in the collector, from TRIP received to the first ABORT sent
  bad value to ABORT  from the tripping frame on the rank to the first ABORT sent
  bad value to ACKs   from the same frame to the last rank's acknowledgement
  bad value to exit   from the same frame to the end of the last rank's process, interpreter shutdown included
"overflow": the other ranks keep running. "stuck": the other ranks wait in a collective that never finishes. "bare": the same
training without rankwatch, where one rank raises an exception; this is the time of torchrun and the interpreters alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("tests", "agent", "monitor")]

from jobs import SCRIPTS, environment, torchrun
from rankwatch.shared.messages import Abort, Ack, Tripped
from rankwatch_monitor.decide.effects import Effect, Send, SendAll
from rankwatch_monitor.decide.ledger import Event, Received
from rankwatch_monitor.decide.options import Options
from rankwatch_monitor.serve.collector import Collector
from rankwatch_monitor.serve.run_folder import RunsFolder

GRACE = 2.0


@dataclass
class Times:
    """Unix seconds of one run's events; all processes are on this machine and share its clock."""

    bad_value: float = 0.0
    trip: float = 0.0
    abort: float = 0.0
    last_ack: float = 0.0
    last_exit: float = 0.0


class Watched(Collector):
    """The collector; it notes when each event happens."""

    times = Times()

    def _perform(self, event: Event) -> None:
        if isinstance(event, Received) and isinstance(event.message, Tripped) and not self.times.trip:
            self.times.trip, self.times.bad_value = time.time(), event.message.trip.time
        if isinstance(event, Received) and isinstance(event.message, Ack):
            self.times.last_ack = time.time()
        super()._perform(event)

    def _do(self, effects: Iterator[Effect]) -> None:
        done = list(effects)
        super()._do(iter(done))
        if not self.times.abort and any(isinstance(e, (Send, SendAll)) and isinstance(e.message, Abort) for e in done):
            self.times.abort = time.time()


def ranks_alive(marker: str) -> int:
    """The number of live processes of the job that are ranks (torchrun sets RANK for them)."""
    alive = 0
    for entry in Path("/proc").iterdir():
        try:
            variables = (entry / "environ").read_bytes().split(b"\0") if entry.name.isdigit() else []
        except OSError:
            continue
        names = {variable.partition(b"=")[0] for variable in variables}
        alive += f"TEST_JOB_MARKER={marker}".encode() in variables and b"RANK" in names
    return alive


def time_one(command: list[str], folder: Path) -> Times:
    """Runs the job once under a collector of its own."""
    Watched.times = times = Times()
    marker = uuid.uuid4().hex
    collector = Watched(
        listen="tcp://127.0.0.1:0",
        connection_file=folder / "connection.json",
        runs=RunsFolder(folder / "runs"),
        options=Options(abort_grace=GRACE),
        show=lambda report, news: None,
    )
    env = environment(
        TEST_JOB_MARKER=marker,
        RANKWATCH_CONNECTION=str(folder / "connection.json"),
        FAULT_TIME_FILE=str(folder / "fault"),
    )
    job = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def follow() -> None:
        pause = threading.Event()
        while not times.bad_value:
            pause.wait(0.005)
            if (folder / "fault").exists():
                times.bad_value = float((folder / "fault").read_text() or 0)
        while ranks_alive(marker):
            pause.wait(0.005)
        times.last_exit = time.time()
        job.wait()
        collector.stop()

    follower = threading.Thread(target=follow)
    follower.start()
    try:
        collector.serve()
    finally:
        collector.close()
        follower.join()
    return times


ROWS: dict[str, Callable[[Times], float]] = {
    "TRIP to ABORT": lambda t: t.abort - t.trip,
    "bad value to ABORT": lambda t: t.abort - t.bad_value,
    "bad value to ACKs": lambda t: t.last_ack - t.bad_value,
    "bad value to exit": lambda t: t.last_exit - t.bad_value,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    jobs = {
        "bare, 2 ranks": torchrun("train.py", "bare", ranks=2),
        "overflow, 2 ranks": torchrun("train.py", "overflow", ranks=2),
        "bare, 4 ranks": torchrun("train.py", "bare", ranks=4),
        "overflow, 4 ranks": torchrun("train.py", "overflow", ranks=4),
        f"stuck, 4 ranks, grace {GRACE:g} s": [sys.executable, str(SCRIPTS / "two_nodes.py"), "stuck"],
    }
    results: dict[str, list[dict[str, float]]] = {}
    for name, command in jobs.items():
        runs = []
        for _ in range(arguments.runs):
            with tempfile.TemporaryDirectory() as folder:
                runs.append(time_one(command, Path(folder)))
        results[name] = [asdict(times) for times in runs]
        print(f"{name} ({arguments.runs} runs, ms)", flush=True)
        for row, what in ROWS.items():
            if name.startswith("bare") and row != "bad value to exit":
                continue
            values = sorted(1000 * what(times) for times in runs)
            print(f"  {row:<20}{statistics.median(values):9.1f}   ({values[0]:.1f} to {values[-1]:.1f})", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
