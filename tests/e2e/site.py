"""A real collector, and ranks that a test controls, for tests of faults.

The ranks train command by command (see ``scripts/fault_rank.py``), so the test chooses the moment of each fault. The collector is
``rankwatch collector``; ``scripts/fault_collector.py`` makes the collector write down the messages that it receives.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ports
from collectors import PATIENCE, until
from jobs import SCRIPTS, environment
from rankwatch_monitor.record.reader import RunRecord

ABORTED = 77
SPOOL = 1024
COMMAND = [sys.executable, str(SCRIPTS / "fault_collector.py")]


class Forge:
    """The process that ranks are forked from. ``host``: a prefix that runs a command on another host."""

    def __init__(self, host: Sequence[str] = ()) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [*host, sys.executable, str(SCRIPTS / "fault_rank.py"), str(theirs.fileno())],
                env=environment(), pass_fds=[theirs.fileno()],
            )  # fmt: skip

    def ask(self, what: str, argument: object, descriptors: list[int] | None = None) -> int:
        socket.send_fds(self._requests, [json.dumps([what, argument]).encode()], descriptors or [])
        return int(self._requests.recv(64))

    def close(self) -> None:
        self._requests.close()
        assert self._process.wait(PATIENCE) == 0


class Rank:
    """A rank that the test controls. ``code``: its exit code, once it has ended."""

    def __init__(self, forge: Forge, errors: Path, env: dict[str, str], stdout: str) -> None:
        self._forge = forge
        self._errors = errors
        self.code: int | None = None
        ours, theirs = socket.socketpair()
        with theirs, open(errors, "w") as stderr, open(stdout, "w") as out:
            self.pid = forge.ask("start", env, [theirs.fileno(), out.fileno(), stderr.fileno()])
        self._words, self._answers = ours.makefile("w"), ours.makefile("r")
        ours.close()

    def tell(self, word: str, *arguments: object) -> None:
        self._words.write(json.dumps([word, *arguments]) + "\n")
        self._words.flush()

    def hear(self) -> Any:
        answer = self._answers.readline()
        assert answer, f"the rank has ended: {self.errors}"
        return json.loads(answer)

    def ask(self, word: str, *arguments: object) -> Any:
        self.tell(word, *arguments)
        return self.hear()

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def wait(self) -> int:
        """Waits for the end of the process; its exit code, or minus the signal that ended it."""
        if self.code is None:
            with contextlib.suppress(ConnectionError):  # the rank ended before it read all commands
                self._answers.read()  # until the process ends, which closes the socket
            self.code = self._forge.ask("wait", self.pid)
        return self.code

    def close(self) -> int:
        self.tell("close")
        return self.wait()

    @property
    def errors(self) -> str:
        return self._errors.read_text()


class Site:
    """A collector and its ranks in one folder. A restarted collector finds the first one's connection file.

    Args:
        forges: they fork the ranks, in turn.
        listen, host: where the collector listens, and a prefix for its command.
    """

    def __init__(self, forges: Sequence[Forge], folder: Path, *, listen: str = "", host: Sequence[str] = ()) -> None:
        self._forges = forges
        self._listen = listen or ports.address()
        self._host = host
        self.folder = folder
        self.runs = folder / "runs"
        self.connection = folder / "connection.json"
        self.faults: dict[str, str] = {}
        """Environment of the next collectors; see ``scripts/fault_collector.py``."""
        self.ranks: list[Rank] = []
        self.collectors: list[subprocess.Popen[bytes]] = []

    def collect(self, *options: str, heartbeat: float = 0.2, stdout: str | None = None) -> subprocess.Popen[bytes]:
        listen = [] if self.connection.exists() else ["--listen", self._listen]
        paths = ["--connection-file", str(self.connection), "--runs-dir", str(self.runs), "--heartbeat", str(heartbeat)]
        started = self.log.count("collecting on")
        with open(self.folder / "log", "a") as log, open(stdout or self.folder / "out", "a") as out:
            command = [*self._host, *COMMAND, "collector", *listen, *paths, *options]
            self.collectors.append(subprocess.Popen(command, env=self._environment, stdout=out, stderr=log))
        until(lambda: self.log.count("collecting on") > started)
        return self.collectors[-1]

    def start(self, ranks: int, *, stdout: str = os.devnull, **options: str) -> list[Rank]:
        """Starts all ranks of a job, and waits until each is watched."""
        for rank in range(ranks):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "RANKWATCH_JOB": "train"}
            error_file = str(self.folder / f"error-{rank}.json")
            env = place | {"RANKWATCH_CONNECTION": str(self.connection), "TORCHELASTIC_ERROR_FILE": error_file} | options
            self.ranks.append(Rank(self._forges[rank % len(self._forges)], self.folder / f"rank-{rank}", env, stdout))
        for started in self.ranks:
            assert started.hear() == "ready"
        return self.ranks

    def train(self, batches: int, *, to: int = 0, settles: bool = False) -> None:
        """All ranks train, ``to`` so many batches in all. ``settles``: until the collector has acknowledged what they sent."""
        for rank in self.ranks:
            assert rank.ask("batches", batches) == (to or batches)
            assert not settles or rank.ask("settle")

    def end(self) -> int:
        """Ends the collector by SIGTERM; returns its exit code."""
        self.collectors[-1].terminate()
        return self.collectors[-1].wait(PATIENCE)

    def clear(self) -> None:
        for process in self.collectors:
            process.kill()
            process.wait()
        for rank in self.ranks:
            if rank.code is None:
                rank.kill()
                rank.wait()

    @property
    def _environment(self) -> dict[str, str]:
        return environment(FAULT_NOTES=str(self.folder / "notes"), **self.faults)

    @property
    def log(self) -> str:
        """The stderr of the collectors."""
        path = self.folder / "log"
        return path.read_text() if path.exists() else ""

    @property
    def out(self) -> str:
        return (self.folder / "out").read_text()

    def notes(self, kind: str, collector: subprocess.Popen[bytes] | None = None) -> list[tuple[Any, ...]]:
        """The messages of this kind that the collectors, or the given one, wrote down; see ``scripts/fault_collector.py``."""
        path = self.folder / "notes"
        notes = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [tuple(fact) for what, pid, *fact in notes if what == kind and collector in (None, self._by_pid.get(pid))]

    def greeted(self, collector: subprocess.Popen[bytes] | None = None) -> list[int]:
        """The rank of each HELLO that was received."""
        return sorted(rank for _, rank, _ in self.notes("hello", collector))

    def recorded(self, run: str = "train-0") -> Counter[tuple[int, int]]:
        """How often each (rank, batch) is in the run's record."""
        with RunRecord(self.runs / run / "run.db") as record:
            digests = record.digests()
        return Counter(zip(digests["rank"].tolist(), digests["batch"].tolist(), strict=True))

    @property
    def _by_pid(self) -> dict[int, subprocess.Popen[bytes]]:
        return {process.pid: process for process in self.collectors}

    def report(self, run: str = "latest") -> dict[str, Any]:
        parsed: dict[str, Any] = json.loads((self.runs / run / "report.json").read_text())
        return parsed


def trained(*batches: int) -> Counter[tuple[int, int]]:
    """What ``recorded`` returns when each rank has trained this many batches: every (rank, batch) once."""
    return Counter((rank, batch) for rank, count in enumerate(batches) for batch in range(count))


def trip_stops_all(site: Site, culprit: int) -> None:
    """One rank trips while the others train: all are aborted, and each names the culprit."""
    others = [rank for index, rank in enumerate(site.ranks) if index != culprit]
    for other in others:
        other.tell("train")
    site.ranks[culprit].tell("trip")
    assert [rank.wait() for rank in site.ranks] == [ABORTED] * len(site.ranks)
    for rank in site.ranks:
        assert f"rank {culprit} of {len(site.ranks)}" in rank.errors
        assert "gate (Gate), output: inf" in rank.errors
