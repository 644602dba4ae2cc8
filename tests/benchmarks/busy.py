"""How long an abort takes where other processes have all cores of the head node: data workers, ranks, a build.

    python tests/benchmarks/busy.py [--seconds 20] [--spinners 5] [--ranks 40] [--json FILE]

One run after another connects, trips and waits for ABORT, while other runs train 20 batches a second a rank; first on idle
cores, then with this many busy processes a core. Milliseconds from TRIP to ABORT at the client. "beat" is the time of a rank's
BEAT to its ACK, and "echo" that of a bare Python process that sends a byte back: what the scheduler alone takes. The client
itself must not wait for the busy processes, so it has to run as root.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("tests", "agent", "monitor")]

import makers
from benchmarks.floods import Victims
from benchmarks.load import PROBE_PAUSE, Ranks, batch_messages, collector, quantile
from rankwatch.shared import connection as connections
from rankwatch.shared import wire
from rankwatch.shared.connection import Connection

FIRST = -15
"""The niceness of this process."""

BATCHES = 20
"""A second, of each rank that trains."""

SPIN = "while True: pass"
ECHO = "import socket, sys; s = socket.socket(fileno=int(sys.argv[1]))\nwhile b := s.recv(1): s.send(b)"


@contextmanager
def spinners(count: int) -> Iterator[None]:
    started = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(count)]
    try:
        yield
    finally:
        for each in started:
            each.kill()
            each.wait()


class Echo:
    """A process that sends each byte back."""

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair()
        command = [sys.executable, "-c", ECHO, str(theirs.fileno())]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        self.took: list[float] = []

    def call(self) -> None:
        begun = time.perf_counter()
        self._ours.send(b"x")
        self._ours.recv(1)
        self.took.append(time.perf_counter() - begun)

    def close(self) -> None:
        self._ours.close()
        self._process.wait()


class Load(threading.Thread):
    """Ranks of runs of one rank each, that train until ``close``."""

    def __init__(self, connection: Connection, count: int) -> None:
        super().__init__()
        self._runs = [Ranks(connection, f"load{number}", 1, range(1)) for number in range(count)]
        self._over = threading.Event()
        for run in self._runs:
            run.connect()
        self.start()

    def run(self) -> None:
        begun, batch = time.time(), 0
        while not self._over.is_set():
            packed = batch_messages(batch)
            for run in self._runs:
                run.send(0, packed[0])
                for _ in run.receive(0):
                    pass
            batch += 1
            self._over.wait(max(0.0, begun + batch / BATCHES - time.time()))

    def close(self) -> None:
        self._over.set()
        self.join()
        for run in self._runs:
            run.leave()
            run.close()


def beat(probe: Ranks) -> float:
    begun = time.perf_counter()
    probe.send(0, wire.encode(makers.beat(0, 0, 0)))
    probe.sockets[0].poll(60_000)
    took = time.perf_counter() - begun
    for _ in probe.receive(0):
        pass
    return took


def measure(seconds: float, busy: int, ranks: int, folder: Path) -> dict[str, float]:
    with ExitStack() as opened:
        usage, path = opened.enter_context(collector(folder, None, folder / "log"))
        echo = opened.enter_context(closing(Echo()))
        opened.enter_context(spinners(busy))
        os.setpriority(os.PRIO_PROCESS, 0, FIRST)  # for the threads to come, too
        opened.callback(os.setpriority, os.PRIO_PROCESS, 0, 0)
        connection = connections.read(path)
        victims = opened.enter_context(closing(Victims(path, usage.pid)))
        opened.enter_context(closing(Load(connection, ranks)))
        probe = opened.enter_context(closing(Ranks(connection, "probe", 1, range(1))))
        probe.connect()
        beats = []
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            victims.abort()
            echo.call()
            beats.append(beat(probe))
            time.sleep(PROBE_PAUSE)
    found = {"aborts": float(len(beats))}
    for name, took in (("echo", echo.took), ("beat", beats), ("abort", victims.took)):
        found |= {f"{name} p{share}": 1000 * quantile(took, share / 100) for share in (50, 99)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--spinners", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=40)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = {}
    for name, busy in (("idle", 0), ("busy", options.spinners * (os.cpu_count() or 1))):
        with tempfile.TemporaryDirectory() as folder:
            found[name] = measure(options.seconds, busy, options.ranks, Path(folder))
        print(f"{name:5}", "  ".join(f"{key} {value:6.1f}" for key, value in found[name].items()), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
