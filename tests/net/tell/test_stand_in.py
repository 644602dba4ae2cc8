"""A stand-in hears for a rank that keeps its GIL, at a real collector; the rank says that it is on another host."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from socket import gethostname
from typing import Any

import pytest
import zmq

import makers
from collectors import Running, until
from files import no_file_stays_open
from jobs import environment
from rankwatch.errors import EXIT_ABORTED
from rankwatch.shared.link import connection as connections
from rankwatch.shared.link import sockets, wire
from rankwatch.shared.link.connection import Connection
from rankwatch.shared.types import messages
from rankwatch.tell import stand_in

RANK = """
import ctypes, os, sys
from pathlib import Path
from rankwatch.shared.link.connection import read
from rankwatch.shared.types.frame import BEGINNING
from rankwatch.shared.system.identity import Identity
from rankwatch.tell import stand_in
from rankwatch.tell.link import Link
host, what = sys.argv[2:]
stand_in.LISTEN_AFTER, stand_in.TURN = 2.0, 0.1
link = Link(
    read(Path(sys.argv[1])), Identity("train", 0, 0, 2, 0, host, os.getpid()), job="train",
    progress=lambda: (BEGINNING, "forward"), on_abort=print, device="cpu", torch_version="2.13.0",
)
print(link.start(), flush=True)
if what == "keeps its GIL until a byte comes":
    ctypes.PyDLL(None).read(0, ctypes.create_string_buffer(1), 1)
print(Path("/proc/self/timers").read_text().count("notify:"), "timers", flush=True)
sys.stdin.read()
link.close("finished")
"""


@contextmanager
def rank(collector: Running, host: str, what: str = "keeps its GIL until a byte comes", **env: str) -> Iterator[Any]:
    """The process of a rank that is connected."""
    command = [sys.executable, "-c", RANK, str(collector.folder / "connection.json"), host, what]
    env = environment(**env)
    pipe = subprocess.PIPE
    with subprocess.Popen(command, text=True, env=env, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n"
        try:
            yield process
        finally:
            process.kill()


def stand_ins(pid: int) -> int:
    """How many processes stand in for this one: their stdin is a file that names it."""
    found = 0
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            given = entry / "fd" / str(stand_in.STDIN)
            # The shell that starts one has the rank's own pipe: to read it would wait, and take what is meant for the rank.
            if b"rankwatch.tell.stand_in" in (entry / "cmdline").read_bytes() and given.is_file():
                found += f'"pid": {pid}}}' in given.read_text(errors="replace")
    return found


@pytest.fixture
def collector(tmp_path: Path) -> Iterator[Running]:
    running = Running(tmp_path, abort_grace=0.1)
    yield running
    running.stop()


def test_a_rank_that_keeps_its_gil_is_ended_by_its_stand_in(collector: Running, tmp_path: Path) -> None:
    path = os.pathsep.join([str(tmp_path / "a 'folder'; exit"), environment()["PYTHONPATH"]])
    with rank(collector, "elsewhere", PYTHONPATH=path) as process:
        trip(collector)
        assert process.wait() == EXIT_ABORTED
        assert process.stderr.read() == "rankwatch: rank 0 is ended: its GIL is kept, and it cannot hear the abort\n"
        until(lambda: not stand_ins(process.pid))


@pytest.mark.slow
def test_a_stand_in_is_over_when_its_rank_goes_on_or_is_gone(collector: Running) -> None:
    with rank(collector, "elsewhere") as process:
        until(lambda: stand_ins(process.pid) == 1)
        process.stdin.write("go on")
        process.stdin.flush()
        until(lambda: not stand_ins(process.pid))
        assert process.stdout.readline() == "1 timers\n"
        process.communicate()
        assert process.returncode == 0
    with rank(collector, "elsewhere") as process:
        until(lambda: stand_ins(process.pid) == 1)
        process.kill()
        until(lambda: not stand_ins(process.pid))


@pytest.mark.parametrize(("host", "timers"), [(gethostname(), 0), ("elsewhere", 1)], ids=["the collector's", "another"])
def test_only_a_rank_on_another_host_has_a_timer_for_one(collector: Running, host: str, timers: int) -> None:
    with rank(collector, host, "trains") as process:
        assert process.stdout.readline() == f"{timers} timers\n"
        process.communicate()
        assert process.returncode == 0


def test_where_the_system_has_no_such_timer_nothing_else_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(call: object) -> None:
        raise OSError("there is no POSIX timer")

    monkeypatch.setattr(stand_in, "NativeTimer", refuse)
    with no_file_stays_open():
        none = stand_in.StandIn()
        for _ in range(3):
            none.prepare(Connection("tcp://head:1", "", "", ""), "train-0", makers.hello())
            none.turn(1.0)
        none.close()


def test_a_stand_in_leaves_nothing_behind() -> None:
    timers = _timers()
    with no_file_stays_open():
        for _ in range(20):
            some = stand_in.StandIn()
            some.prepare(Connection("tcp://head:1", "", "", ""), "train-0", makers.hello())
            assert _timers() == timers + 1
            some.turn(1.0)
            some.close()
    assert _timers() == timers


def _timers() -> int:
    return Path("/proc/self/timers").read_text().count("notify:")


def trip(collector: Running) -> None:
    """The other rank of the run overflows."""
    with zmq.Context() as context, sockets.dealer(context, connections.read(collector.folder / "connection.json")) as socket:
        socket.send(wire.encode(makers.hello(1, 2)))
        socket.recv()
        socket.send(wire.encode(messages.Tripped(1, makers.trip())))
        while not isinstance(wire.decode(socket.recv()), messages.Abort):
            pass
        socket.send(wire.encode(messages.Bye(2, "aborted", "")))
        socket.recv()
