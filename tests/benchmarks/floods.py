"""How long another run's abort takes while one client floods the collector with messages that it accepts.

    python tests/benchmarks/floods.py [--seconds 5] [--kinds BYE TUNE] [--json FILE]

Two collectors side by side: one is flooded with each kind of ``greedy.py`` in turn, the other one is left in peace. At each of
them, one run after another connects, trips and waits for ABORT. The flood has the key of another job; to INVITE, it takes the
collector's own. Milliseconds from TRIP to ABORT at the client, and those of CPU time in them of the flooded collector's loop;
the flooded collector's memory and disk afterwards, in MiB.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("tests", "agent", "monitor")]

import zmq

import greedy
import makers
from benchmarks.load import collector, quantile
from jobs import environment
from rankwatch.shared.link import connection as connections
from rankwatch.shared.link import sockets, wire
from rankwatch.shared.link.connection import Connection
from rankwatch.shared.types import messages
from rankwatch_monitor.serve.door import control

SOON = 60_000
"""Milliseconds in which an answer comes, if one comes at all."""


class Victims:
    """Runs of one rank that trip, each after the one before. ``pid``: the collector's."""

    def __init__(self, path: Path, pid: int) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._connection: Connection = connections.read(path)
        self._numbers = itertools.count()
        self._loop = Path(f"/proc/{pid}/task/{pid}/schedstat")
        self.took: list[float] = []
        self.worked: list[float] = []

    def abort(self) -> None:
        """One run; ``took`` has the seconds from its TRIP to its ABORT, ``worked`` those of the loop's CPU time."""
        socket = sockets.dealer(self._context, self._connection)
        job = f"victim{next(self._numbers)}"
        socket.send(wire.encode(makers.hello(job=job, incarnation=job)))
        _await(socket, messages.Welcome)
        begun, worked = time.perf_counter(), self._cpu()
        socket.send(wire.encode(messages.Tripped(1, makers.trip())))
        _await(socket, messages.Abort)
        self.took.append(time.perf_counter() - begun)
        self.worked.append(self._cpu() - worked)
        socket.send(wire.encode(messages.Ack(1, abort=True)))
        socket.send(wire.encode(messages.Bye(2, "aborted", "")))
        socket.close(1000)

    def _cpu(self) -> float:
        return int(self._loop.read_text().split()[0]) / 1e9

    def p99(self) -> float:
        return quantile(self.took, 0.99)

    def close(self) -> None:
        self._context.destroy(linger=0)


def _await(socket: zmq.Socket[bytes], kind: type[messages.Message]) -> None:
    while socket.poll(SOON):
        if isinstance(wire.decode(socket.recv()), kind):
            return
    raise TimeoutError(f"no {kind.__name__} within {SOON} ms")


def measure(kind: str, seconds: float, folder: Path) -> dict[str, float]:
    """The figures of one flood."""
    with ExitStack() as opened:
        (flooded := folder / "flooded").mkdir()
        (quiet := folder / "quiet").mkdir()
        usage, path = opened.enter_context(collector(flooded, None, folder / "flooded.log"))
        quiet_usage, quiet_path = opened.enter_context(collector(quiet, None, folder / "quiet.log"))
        victims, others = Victims(path, usage.pid), Victims(quiet_path, quiet_usage.pid)
        opened.callback(victims.close)
        opened.callback(others.close)
        if kind != "INVITE":
            connections.write(control.invite(connections.read(path), greedy.JOB), path := folder / "greedy.json")
        command = [sys.executable, greedy.__file__, str(path), kind, str(seconds + 60)]
        flood = opened.enter_context(subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True))
        opened.callback(flood.kill)
        assert flood.stdout is not None
        assert flood.stdout.readline() == "flooding\n"
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            victims.abort()
            others.abort()
        assert flood.poll() is None, "the flood has ended"
        memory = usage.largest()
    return {
        "aborts": len(victims.took),
        "median": 1000 * quantile(victims.took, 0.5),
        "p99": 1000 * victims.p99(),
        "longest": 1000 * max(victims.took),
        "quiet p99": 1000 * others.p99(),
        "loop": 1000 * quantile(victims.worked, 0.5),
        "loop p99": 1000 * quantile(victims.worked, 0.99),
        "memory": memory,
        "disk": _on_disk(flooded) >> 20,
    }


def _on_disk(folder: Path) -> int:
    size = 0
    for file in folder.rglob("*"):
        with suppress(FileNotFoundError):  # it was renamed meanwhile
            size += file.stat().st_size if file.is_file() else 0
    return size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--kinds", nargs="+", default=greedy.ALL)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = {}
    for kind in options.kinds:
        with tempfile.TemporaryDirectory() as folder:
            found[kind] = measure(kind, options.seconds, Path(folder))
        print(f"{kind:12}", "  ".join(f"{name} {value:6.1f}" for name, value in found[kind].items()), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
