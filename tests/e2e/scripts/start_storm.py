"""Collectors of processes of their own, in one folder of runs, each with a run of the same job that begins at one moment.

start_storm.py FOLDER COLLECTORS
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import makers
from collectors import Running, until
from rankwatch.shared.link import wire
from rankwatch.shared.link.sockets import dealer
from rankwatch.shared.types import messages

FOLDER, COLLECTORS = Path(sys.argv[1]), int(sys.argv[2])


def collect(number: int, ready: int, start: int) -> None:
    own = FOLDER / f"collector-{number}"
    own.mkdir()
    (own / "runs").symlink_to(FOLDER / "runs")
    running = Running(own)
    rank = dealer(running.collector._context, running.collector.connection)
    assert rank.poll(30_000, 2)  # connected
    os.write(ready, b"\0")
    os.read(start, 1)  # until its last writer is closed
    rank.send(wire.encode(makers.hello(host=f"host-{number}")))
    rank.send(wire.encode(messages.Bye(1, "finished", f"of collector {number}")))
    until(lambda: running.reports)
    rank.close(0)
    running.stop()


if __name__ == "__main__":
    (FOLDER / "runs").mkdir()
    (is_ready, ready), (start, hold) = os.pipe(), os.pipe()
    for number in range(COLLECTORS):
        if os.fork() == 0:
            os.close(hold)
            collect(number, ready, start)
            sys.exit()
    for _ in range(COLLECTORS):
        os.read(is_ready, 1)
    os.close(hold)
    sys.exit(any(os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(COLLECTORS)))
