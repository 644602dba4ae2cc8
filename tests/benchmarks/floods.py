"""How long another run's abort takes while one client floods the collector with messages that it accepts.

    python tests/benchmarks/floods.py [--seconds 5] [--kinds BYE TUNE] [--json FILE]

One run after another connects, trips and waits for ABORT, without a flood ("quiet") and beside a flood of each kind of
``greedy.py``, which has the key of another job, or the collector's own where a job's key cannot do it. Milliseconds from TRIP to
ABORT at this client; the collector's memory and the disk afterwards, in MiB.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("tests", "agent", "monitor")]

import zmq

import greedy
import makers
from benchmarks.load import collector, quantile
from jobs import environment
from rankwatch.shared import connection as connections
from rankwatch.shared import messages, sockets, wire
from rankwatch.shared.connection import Connection
from rankwatch_monitor.serve import control

OF_ALL_JOBS = ("HELLO", "INVITE", greedy.CONNECTIONS)
"""Kinds for which a client needs the collector's own key."""

SOON = 60_000


class Victims:
    """Runs of one rank that trip, each after the one before."""

    def __init__(self, connection: Connection) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._connection = connection
        self._numbers = itertools.count()

    def abort(self) -> float:
        """Seconds from TRIP to ABORT of one run."""
        socket = sockets.dealer(self._context, self._connection)
        job = f"victim{next(self._numbers)}"
        socket.send(wire.encode(makers.hello(job=job, incarnation=job)))
        _await(socket, messages.Welcome)
        begun = time.perf_counter()
        socket.send(wire.encode(messages.Tripped(1, makers.trip())))
        _await(socket, messages.Abort)
        took = time.perf_counter() - begun
        socket.send(wire.encode(messages.Ack(1, abort=True)))
        socket.send(wire.encode(messages.Bye(2, "aborted", "")))
        socket.close(1000)
        return took

    def close(self) -> None:
        self._context.destroy(linger=0)


def _await(socket: zmq.Socket[bytes], kind: type[messages.Message]) -> None:
    while socket.poll(SOON):
        if isinstance(wire.decode(socket.recv()), kind):
            return
    raise TimeoutError(f"no {kind.__name__} within {SOON} ms")


def measure(kind: str, seconds: float) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with collector(folder, 0, folder / "log") as (usage, path):
            master = connections.read(path)
            if kind not in OF_ALL_JOBS:
                path = folder / "greedy.json"
                connections.write(control.invite(master, "greedy0"), path)
            victims, flood = Victims(master), None
            victims.abort()
            if kind != "quiet":
                command = [sys.executable, greedy.__file__, str(path), kind, str(seconds + 60)]
                flood = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)
                assert flood.stdout is not None
                flood.stdout.readline()
            took: list[float] = []
            until = time.monotonic() + seconds
            while time.monotonic() < until or not took:
                took.append(victims.abort())
            status = Path(f"/proc/{usage.pid}/status").read_text()
            if flood is not None:
                flood.kill()
                flood.wait()
            disk = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) >> 20
            victims.close()
    memory = int(status.partition("VmHWM:")[2].split()[0]) >> 10
    return {
        "aborts": len(took),
        "median": 1000 * quantile(took, 0.5),
        "p99": 1000 * quantile(took, 0.99),
        "longest": 1000 * max(took),
        "memory": memory,
        "disk": disk,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--kinds", nargs="+", default=["quiet", *greedy.ALL])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = {}
    for kind in options.kinds:
        found[kind] = measure(kind, options.seconds)
        print(f"{kind:12}", "  ".join(f"{name} {value:7.1f}" for name, value in found[kind].items()), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
