"""The load that one collector can take: a real ``rankwatch collector`` on one core, simulated ranks on the others.

    python tests/benchmarks/load.py [--ranks 64,1024,16384x4] [--parameters 0,1000] [--groups 0,4] [--seconds 60] [--trips 10]
        [--json FILE]

Every rank is a DEALER with its own keys. It sends HELLO and its frame table, then one batch (1,000 readings) each second, or
with "16384x4" every 4 seconds, as the steps of large jobs are long; and a BEAT each heartbeat, as an agent does. With
--parameters, each rank also sends its fingerprint with each batch: of all parameters with the first three, then of a 16th. A
few processes hold all the ranks. With --groups, each batch and beat says how many collectives of so many process groups the rank
has called by then, the same on all ranks. Beside these ranks
  - a probe rank (in its own run) asks for an ACK every 50 ms: "latency" is the time from its BEAT to the ACK;
  - small runs of 8 ranks trip one after another: "small: TRIP to ABORT" and "to last ACK" are the times that the tripping
    rank and the last rank see.
"decode us" and "compare us" are the collector's CPU time for one fingerprint, with all ranks equal, measured in this process;
"calls us" is that for what one batch says of the groups, decoded and compared.
For each size it prints messages per second, the collector's CPU (100 % is one core, its I/O thread included), the collector's
memory at the start, middle and end of the load, what a rank costs of it (and of a bare ROUTER's), and these latencies. "behind"
counts sends that found the queue full or the window closed.

Then the large run itself trips repeatedly: for restarts 1, 2, 3, ... of its job all ranks connect and train as before, and
meanwhile rank 0 trips. "TRIP to ABORT" is the time that rank 0 sees; "all told" is when the last rank has its ABORT, and
"TRIP to last ACK" when the collector has the last rank's ACK. This last figure is the first one plus the report's
``acknowledged_in``, which counts from the decision, so the sum is slightly too large. The collector knows that all ranks are
past the batch that trips; in "asked" the ranks have not reached that batch, and each must answer before the verdict. "bare" is
a ROUTER without load that sends to the same number of ranks and receives their answers.

"flood": the same processes send the same batches as fast as the windows of the ranks allow, first to the collector and then, as
fast as they are accepted, to a bare ROUTER (also CURVE; it receives and drops messages). The figure is the collector's rate
divided by the ROUTER's rate.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("tests", "agent", "monitor")]

import zmq

import makers
from desk import connected
from jobs import environment
from rankwatch.shared.link import connection as connections
from rankwatch.shared.link import sockets, wire
from rankwatch.shared.link.connection import Connection
from rankwatch.shared.types import messages
from rankwatch.shared.types.calls import GroupCount
from rankwatch.shared.types.fields import MAX_INT
from rankwatch.shared.types.fingerprint import ALL_ROWS, Fingerprint, FingerprintRow, FingerprintTable, RankMesh
from rankwatch.shared.types.frame import NO_STAGE, BatchSummary, FrameSpec, FrameTable, Kind, Moment, ReadingSpec, pack
from rankwatch.tell.window import Window
from rankwatch_monitor.decide.replicas.comparison import ReplicaWatch
from rankwatch_monitor.serve.collector import TO_PEER, raise_descriptor_limit

ROWS = 1000
VARIANTS = 8
"""Different sets of readings among the ranks; the ranks' messages differ in nothing else."""

MODULES = [
    FrameSpec(f"layers.{index}", "Linear", tuple(ReadingSpec(kind, label, "float32") for kind, label in rows))
    for index, rows in enumerate(
        [[(Kind.PARAMETER, "weight"), (Kind.PARAMETER, "bias"), (Kind.INPUT, "input[0]"), (Kind.OUTPUT, "output")]]
        * (ROWS // 4)
    )
]
TABLE = FrameTable(tuple(MODULES))
PARAMETERS = 1000
CALLS = 64
"""Collectives of a group in a batch."""

SLOTS = 16

TRIPS = 100
TRIP_RANKS = 8
RANKS_A_PROCESS = 4096
RANKS_AN_ADDRESS = 16_384
LONGEST = 30
"""Batches until a tripping run would end by itself."""

TRIP_AFTER = 4.0
"""Batches until rank 0 of the large run trips."""

PROBE_PAUSE = 0.05
SIMULATION_NICE = 10
"""The nice value of the processes that simulate ranks: the process that measures latencies must not wait for them."""

TOLD_WITHIN = 30_000
"""Milliseconds that a rank waits for its ABORT."""

UNBOUNDED = 1 << 60
"""The window of a rank that has no WELCOME."""

FLOODS = ("flood", "drown")
"""Jobs whose ranks send as fast as they can."""

ABORT_ACK = wire.encode(messages.Ack(0, abort=True))

PACE = 0.005
"""Seconds between bursts of a process that simulates ranks."""


def counts(batch: int, groups: int) -> tuple[GroupCount, ...]:
    """The same on all ranks."""
    return tuple(GroupCount(group, CALLS * (batch + 1), hash((group, batch)) & MAX_INT) for group in range(1, groups + 1))


def batch_messages(batch: int, seq: int = 0, groups: int = 0) -> list[bytes]:
    """One batch message for each variant of rank."""
    made = []
    for variant in range(VARIANTS):
        column = pack("f", [1.0 + (row * (variant + 1) + batch) % 97 for row in range(ROWS)])
        summary = BatchSummary(batch, 0, batch, time.time(), time.time(), False, TABLE.id, column, column, bytes(ROWS))
        made.append(wire.encode(messages.Batch(seq or batch + 1, summary, counts(batch, groups))))
    return made


def fingerprint_table(ranks: range, parameters: int) -> FingerprintTable:
    """Of a model with this many parameters in DDP, in slots of the same size."""
    rows = [
        FingerprintRow(f"layers.{row}.weight", "float32", 4096, 0, row * SLOTS // parameters, True)
        for row in range(parameters)
    ]
    return FingerprintTable(tuple(rows), (RankMesh(tuple(ranks), (len(ranks),), (True,), source="DDP"),))


def fingerprint_message(table: FingerprintTable, batch: int) -> bytes:
    """The fingerprint as ``batch`` begins: of all rows in the first three batches, then of a slot. Equal on all ranks."""
    slot = ALL_ROWS if batch < 3 else batch % SLOTS
    lanes = b"".join(
        hashlib.blake2b(f"{batch} {row.parameter}".encode(), digest_size=16).digest() for row in table.rows_of(slot)
    )
    of_batch = Fingerprint(table.id, 0, batch, batch, slot, False, False, True, lanes)
    return wire.encode(messages.Fingerprinted(2 * batch + 1, of_batch))


class Ranks:
    """Some ranks of a run, each with a socket, in this process. With ``parameters``, they send fingerprints of them.

    Rank 0 of a large run only trips: the others are each other's replicas.
    """

    def __init__(
        self,
        connection: Connection,
        job: str,
        world_size: int,
        numbers: range,
        parameters: int = 0,
        every: float = 1.0,
        groups: int = 0,
    ) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.context.set(zmq.MAX_SOCKETS, sockets.MAX_PEERS)
        self.numbers = numbers
        self.behind = 0
        self.heartbeat = 1.0
        self._every, self._groups = every, groups
        self._job, self._world_size = job, world_size
        self._table = fingerprint_table(range(1, world_size), parameters) if parameters else None
        self._flooded = 0
        self._asked: set[int] = set()
        self._told: dict[int, float] = {}
        """When each rank had its ABORT (Unix seconds), in this order."""
        self.windows = [Window() for _ in numbers]
        for window in self.windows:
            window.renew(UNBOUNDED)
        self.sockets = [sockets.dealer(self.context, _from_source(connection, number)) for number in numbers]
        for socket in self.sockets:
            socket.setsockopt(zmq.RCVTIMEO, TOLD_WITHIN)

    def connect(self, restart: int = 0) -> None:
        """Returns when every rank has its WELCOME and has sent its frame table."""
        self._asked, self._told = set(), {}
        hellos = []
        for number in self.numbers:
            process = {"restart": restart, "incarnation": f"{self._job}-{restart}-{number}-{os.getpid()}"}
            hellos.append(wire.encode(makers.hello(number, self._world_size, job=self._job, **process)))
        tables = [wire.encode(messages.Table(TABLE))]
        if self._table is not None:
            tables.append(wire.encode(messages.Fingerprints(self._table)))
        waiting, said = set(range(len(self.sockets))), set()
        while waiting:
            for index in list(waiting):
                if index not in said and self.send(index, hellos[index], required=False):
                    said.add(index)
                for message in self.receive(index):
                    if isinstance(message, messages.Welcome):
                        self.heartbeat = message.heartbeat
                        self.windows[index].renew(message.window)
                        waiting.discard(index)
                        for table in tables:
                            self.send(index, table)
            time.sleep(0.001)

    def send(self, index: int, message: bytes, *, required: bool = True) -> bool:
        try:
            self.sockets[index].send(message, zmq.NOBLOCK)
        except zmq.Again:
            self.behind += required
            return False
        return True

    def stream(self, index: int, seq: int, message: bytes, *, required: bool = True) -> bool:
        """Sends a batch or fingerprint if the window of the rank allows it."""
        if not self.windows[index].is_open:
            self.behind += required
            return False
        is_sent = self.send(index, message, required=required)
        if is_sent:
            self.windows[index].send(seq, len(message))
        return is_sent

    def fill(self, index: int, most: int) -> int:
        """Sends batches until the window is closed, but at most so many; returns the number of the next message."""
        seq = 1
        while seq <= most and self.stream(index, seq, batch_messages(seq - 1)[0], required=False):
            seq += 1
        return seq

    def trip(self, index: int, seq: int, at: tuple[int, int, int]) -> None:
        """As an agent does: ahead of the batches, where the window holds some back."""
        number = seq if self.windows[index].is_open else messages.AHEAD
        trip = wire.encode(messages.Tripped(number, makers.trip(at=at)))
        while not self.send(index, trip, required=False):
            time.sleep(0.001)

    def receive(self, index: int) -> Iterator[messages.Message]:
        return map(wire.decode, self._receive(index))

    def _receive(self, index: int) -> Iterator[bytes]:
        while True:
            try:
                yield self.sockets[index].recv(zmq.NOBLOCK)
            except zmq.Again:
                return

    def train(self, begin: float, batches: int) -> list[float]:
        """Sends one batch each ``every`` seconds from ``begin`` (Unix seconds), the ranks evenly spread over them, and beats.

        A rank answers when asked, and ends on ABORT. Returns the times of the first and the last ABORT here; an empty list if
        the ranks trained to the end.
        """
        count, every = len(self.sockets), self._every
        beats_per_batch = every / self.heartbeat
        next_asked = next_told = 0
        for batch in range(batches):
            packed = batch_messages(batch, 2 * batch + 2 if self._table is not None else 0, self._groups)
            fingerprint = fingerprint_message(self._table, batch) if self._table is not None else b""
            where = messages.Beat(Moment(batch, batch, 0, len(MODULES)), "backward", 1, 0, time.time())
            beat = wire.encode(replace(where, calls=counts(batch, self._groups)))
            done = 0
            while done < count:
                # The collector asks or aborts the ranks in this order: polling all of them repeatedly would take longer.
                next_asked = self._heed_from(next_asked, self._asked)
                next_told = self._heed_from(next_told, self._told)
                if len(self._told) == count:
                    times = list(self._told.values())
                    return [times[0], times[-1]]
                due = min(count, int(((time.time() - begin) / every - batch) * count) + 1)
                for index in range(done, due):
                    if index not in self._told and not self._heed(index):
                        if fingerprint:
                            self.stream(index, 2 * batch + 1, fingerprint)
                        seq = 2 * batch + 2 if fingerprint else batch + 1
                        self.stream(index, seq, packed[self.numbers[index] % VARIANTS])
                        if int((batch + 1) * beats_per_batch) > int(batch * beats_per_batch):
                            self.send(index, beat)
                done = max(done, due)
                time.sleep(PACE)
        return []

    def _heed_from(self, index: int, heeded: Collection[int]) -> int:
        """Handles the messages of this rank and the next ones, up to the first rank without any; returns that rank."""
        while index < len(self.sockets) and (index in heeded or self._heed(index)):
            index += 1
        return index

    def _heed(self, index: int) -> bool:
        """Answers the PROBEs and ABORTs that came for a rank; returns whether one came."""
        heeded = False
        for data in self._receive(index):
            message = wire.decode(data)
            if isinstance(message, messages.Ack):
                self.windows[index].handle(message.handled)
            elif isinstance(message, messages.Probe):
                self._asked.add(index)
                step, batch, _, _ = message.moment
                past = Moment(step, batch, 0, len(MODULES))
                heeded = self.send(index, wire.encode(messages.Beat(past, "forward", 0, 0, time.time())))
            elif isinstance(message, messages.Abort):
                self._asked.add(index)
                self._told.setdefault(index, time.time())
                heeded = self.send(index, ABORT_ACK)
        return heeded

    def heed_all(self) -> bool:
        """Handles what has come for any rank; returns whether a PROBE or ABORT was there."""
        return any([self._heed(index) for index in range(len(self.sockets))])

    def aborted_at(self, index: int) -> float | None:
        """When the ABORT came (Unix seconds); None: it did not."""
        return self._told.get(index)

    def await_abort(self, index: int) -> float:
        """Acknowledges the ABORT of a rank; returns when the ABORT came (Unix seconds).

        Raises:
            zmq.Again: no ABORT came.
        """
        while not isinstance(wire.decode(self.sockets[index].recv()), messages.Abort):
            pass
        told = time.time()
        self.send(index, ABORT_ACK)
        return told

    def greet(self) -> None:
        for socket in self.sockets:
            socket.send(ABORT_ACK)

    def answer(self) -> float:
        """Every rank receives one message and answers it; returns when the last rank received its message (Unix seconds)."""
        for socket in self.sockets:
            socket.recv()
            socket.send(ABORT_ACK)
        return time.time()

    def leave(self) -> None:
        bye = wire.encode(messages.Bye(1 << 40, "aborted", ""))
        for index in range(len(self.sockets)):
            self.send(index, bye)

    def flood(self, seconds: float) -> int:
        """Sends batches as fast as they are accepted, and beats, until all ranks have their ABORT; returns their number."""
        sent, next_beat, end = 0, time.time(), time.time() + seconds
        while (now := time.time()) < end and len(self._told) < len(self.sockets):
            before, is_beat = sent, now >= next_beat
            next_beat += self.heartbeat * is_beat
            self._flooded += 1
            batches = batch_messages(self._flooded)
            beat = wire.encode(makers.beat(self._flooded, 0, 0))
            for index in range(len(self.sockets)):
                if not self._heed(index):
                    sent += self.stream(index, self._flooded + 1, batches[index % VARIANTS], required=False)
                if is_beat:
                    self.send(index, beat)
            if sent == before:
                time.sleep(0.0005)
        return sent

    def close(self) -> None:
        self.context.destroy(linger=0)


def _from_source(connection: Connection, number: int) -> Connection:
    """The connection of a rank: one address has ports for some 28,000 of them."""
    host, _, port = connection.address.removeprefix("tcp://").rpartition(":")
    source = f"127.0.0.{2 + number // RANKS_AN_ADDRESS}" if host == "127.0.0.1" else ""
    return replace(connection, address=f"tcp://{source}:0;{host}:{port}") if source else connection


def simulate(pipe: Pipe, path: str, job: str, world_size: int, numbers: range, *of: Any) -> None:
    """The body of a process that holds ranks: runs the calls that come through the pipe, one after another."""
    if job in FLOODS:
        sockets.SEND_HIGH_WATER = 4  # so that messages sent are messages accepted
    ranks = Ranks(connections.read(Path(path)), job, world_size, numbers, *of)
    while (call := pipe.recv()) is not None:
        name, *arguments = call
        value = getattr(ranks, name)
        pipe.send(value(*arguments) if callable(value) else value)
    ranks.close()


class Crowd:
    """The processes that hold the ranks of one run."""

    def __init__(
        self,
        path: Path,
        job: str,
        world_size: int,
        ranks: range,
        cores: list[int],
        parameters: int = 0,
        every: float = 1.0,
        groups: int = 0,
    ) -> None:
        count = max(min(len(cores), len(ranks)), -(-len(ranks) // RANKS_A_PROCESS))
        spawn = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for process in range(count):
            numbers = ranks[len(ranks) * process // count : len(ranks) * (process + 1) // count]
            ours, theirs = spawn.Pipe()
            of = theirs, str(path), job, world_size, numbers, parameters, every, groups
            started = spawn.Process(target=simulate, args=of)
            started.start()
            os.sched_setaffinity(started.pid or 0, {cores[process % len(cores)]})
            if job != "drown":  # its ranks must answer while they flood
                os.setpriority(os.PRIO_PROCESS, started.pid or 0, SIMULATION_NICE)
            self._pipes.append(ours)
            self._processes.append(started)

    def call(self, name: str, *arguments: Any) -> list[Any]:
        self.begin(name, *arguments)
        return self.finish()

    def begin(self, name: str, *arguments: Any) -> None:
        for pipe in self._pipes:
            pipe.send((name, *arguments))

    def finish(self) -> list[Any]:
        return [pipe.recv() for pipe in self._pipes]

    def close(self) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.send(None)
            process.join()


@dataclass
class Usage:
    """CPU time and memory of a process, from /proc."""

    pid: int

    def cpu(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def rest(self) -> None:
        """Returns when the process is idle: all messages are handled and written."""
        before = self.cpu()
        while True:
            time.sleep(0.5)
            if (now := self.cpu()) - before < 0.1:
                return
            before = now

    def memory(self) -> float:
        """Resident MiB."""
        return self._status("VmRSS")

    def largest(self) -> float:
        """Resident MiB at most so far."""
        return self._status("VmHWM")

    def _status(self, name: str) -> float:
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


class Size(NamedTuple):
    """A large run: its ranks, and the seconds between two batches of a rank."""

    ranks: int
    every: float = 1.0

    @staticmethod
    def of(text: str) -> Size:
        ranks, _, every = text.partition("x")
        return Size(int(ranks), float(every or 1))


@dataclass
class Latencies:
    """Latencies in milliseconds, measured during the load in a separate thread."""

    connection: Connection
    begin: float
    end: float
    beat: list[float] = field(default_factory=list)
    to_abort: list[float] = field(default_factory=list)
    to_last_ack: list[float] = field(default_factory=list)

    def measure(self) -> None:
        probe = Ranks(self.connection, "probe", 1, range(1))
        probe.connect()
        while time.time() < self.begin:
            time.sleep(0.01)
        trips = 0
        while (now := time.time()) < self.end:
            probe.send(0, wire.encode(makers.beat(0, 0, 0)))
            probe.sockets[0].poll(10_000)
            self.beat.append(1000 * (time.time() - now))
            for _ in probe.receive(0):
                pass
            if trips < TRIPS * (now - self.begin) / (self.end - self.begin):
                self.trip(f"trip{trips}")
                trips += 1
            time.sleep(PROBE_PAUSE)
        probe.send(0, wire.encode(messages.Bye(1, "finished", "")))
        probe.close()

    def trip(self, job: str) -> None:
        ranks = Ranks(self.connection, job, TRIP_RANKS, range(TRIP_RANKS))
        ranks.connect()
        for index in range(1, TRIP_RANKS):  # so that the collector knows that all are past it
            ranks.send(index, wire.encode(makers.beat(1, 0, 0)))
        ranks.sockets[1].poll(10_000)
        begun = time.time()
        ranks.send(0, wire.encode(messages.Tripped(1, makers.trip(at=(0, 0, 0)))))
        told = [ranks.await_abort(index) for index in range(TRIP_RANKS)]
        self.to_abort.append(1000 * (told[0] - begun))
        self.to_last_ack.append(1000 * (max(told) - begun))
        ranks.leave()
        ranks.close()


@dataclass
class Aborts:
    """Abort times of the large run, in milliseconds. Infinite: an ACK was missing when the report was written."""

    to_first: list[float] = field(default_factory=list)
    to_all: list[float] = field(default_factory=list)
    to_last_ack: list[float] = field(default_factory=list)
    memory: float = 0.0
    """MiB that the peers of a bare ROUTER take, connected."""


@dataclass
class LargeRun:
    """The run that makes the load: its rank 0, and all other ranks."""

    crowd: Crowd
    first: Ranks
    collector: Usage
    runs: Path
    every: float

    def trip(self, restart: int, batch: int, aborts: Aborts) -> None:
        """All ranks train as this restart of the job, until ``batch`` of rank 0 trips."""
        self.crowd.begin("connect", restart)
        self.first.connect(restart)
        self.crowd.finish()
        self.collector.rest()
        begin = time.time() + 0.5
        self.crowd.begin("train", begin, LONGEST)
        time.sleep(
            begin + self.every * (TRIP_AFTER + 0.37 * restart % 1) - time.time()
        )  # at any moment between two batches of a rank
        begun = time.time()
        self.first.send(0, wire.encode(messages.Tripped(1, makers.trip(at=(batch, 0, 0)))))
        told = self.first.await_abort(0)
        last_told = max(last for _, last in self.crowd.finish())
        report = self._report(restart)
        is_complete = all(row["acknowledged"] for row in report["ranks"])
        aborts.to_first.append(1000 * (told - begun))
        aborts.to_all.append(1000 * (last_told - begun))
        aborts.to_last_ack.append(1000 * (told - begun + report["acknowledged_in"]) if is_complete else math.inf)
        self.crowd.call("leave")
        self.first.leave()

    def _report(self, restart: int) -> dict[str, Any]:
        """The report, which is published once the last rank has acknowledged."""
        path = self.runs / f"load-{restart}" / "report.json"
        _until(path.exists)
        report: dict[str, Any] = json.loads(path.read_text())
        return report


@contextmanager
def collector(folder: Path, core: int | None, log: Path) -> Iterator[tuple[Usage, Path]]:
    """A real collector, pinned to one core if any."""
    path = folder / "connection.json"
    command = [sys.executable, "-m", "rankwatch_monitor", "collector", "--listen", "tcp://127.0.0.1:0"]
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, "--runs-dir", str(folder), "--connection-file", str(path)],
            env=environment(), stdout=file, stderr=file,
            preexec_fn=lambda: os.sched_setaffinity(0, {core} if core is not None else os.sched_getaffinity(0)),
        )  # fmt: skip
        try:
            _until(path.exists)
            yield Usage(process.pid), path
        finally:
            process.terminate()
            process.wait()


def bare_router(pipe: Pipe, path: str, core: int) -> None:
    """A process with a ROUTER, with CURVE as in the collector. The pipe gives the number of ranks to abort; 0: drops all."""
    os.sched_setaffinity(0, {core})
    raise_descriptor_limit()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, sockets.MAX_PEERS)
    server, client = sockets.new_key_pair(), sockets.new_key_pair()
    sockets.authenticator(context, lambda key: True)
    socket, address = sockets.router(context, "tcp://127.0.0.1:0", server)
    connections.write(Connection(address, server.public, client.public, client.secret, ""), Path(path))
    pipe.send("listening")
    abort = wire.encode(messages.Abort("x" * 200, 0, 0.0, 10.0))
    for count in iter(pipe.recv, 0):
        peers = [socket.recv_multipart()[0] for _ in range(count)]
        pipe.send("greeted")
        pipe.recv()
        begun = time.time()
        for peer in peers:
            socket.send(peer, TO_PEER)
            socket.send(abort, zmq.NOBLOCK)
        for _ in peers:
            socket.recv_multipart()
        pipe.send((begun, time.time()))
    while True:
        socket.recv_multipart()


@contextmanager
def bare(folder: Path, core: int) -> Iterator[tuple[Pipe, Path, Usage]]:
    """A ``bare_router`` in a separate process."""
    spawn = multiprocessing.get_context("spawn")
    path = folder / "bare.json"
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=bare_router, args=(theirs, str(path), core), daemon=True)
    process.start()
    try:
        ours.recv()
        yield ours, path, Usage(process.pid or 0)
    finally:
        process.kill()
        process.join()


def bare_aborts(world_size: int, times: int, cores: list[int], folder: Path) -> Aborts:
    """The times for a ROUTER to send to idle, waiting ranks and to receive their answers."""
    aborts = Aborts()
    with bare(folder, cores[0]) as (pipe, path, usage):
        alone = usage.memory()
        crowd = Crowd(path, "bare", world_size, range(world_size), cores[1:] or cores)
        try:
            for _ in range(times):
                crowd.call("greet")
                pipe.send(world_size)
                pipe.recv()
                aborts.memory = usage.memory() - alone
                crowd.begin("answer")
                time.sleep(0.5)  # the ranks begin to wait; a late rank finds its message already there
                pipe.send("tell")
                begun, ended = pipe.recv()
                aborts.to_all.append(1000 * (max(crowd.finish()) - begun))
                aborts.to_last_ack.append(1000 * (ended - begun))
        finally:
            crowd.close()
    return aborts


def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.01)


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[math.ceil(share * len(values)) - 1] if values else float("nan")


def under_load(
    size: Size, parameters: int, groups: int, seconds: int, trips: int, cores: list[int], folder: Path
) -> dict[str, Any]:
    """One size of the first table."""
    world_size, every = size
    batches = round(seconds / every)
    with collector(folder, cores[0], folder / "log") as (usage, path):
        alone = usage.memory()
        crowd = Crowd(path, "load", world_size, range(1, world_size), cores[1:] or cores, parameters, every, groups)
        try:
            crowd.call("connect")
            connected = usage.memory()
            begin = time.time() + 1
            latencies = Latencies(connections.read(path), begin, begin + seconds)
            beside = threading.Thread(target=latencies.measure)
            beside.start()
            memory: list[float] = []
            started: list[float] = []

            def watch() -> None:
                while time.time() < begin:
                    time.sleep(0.01)
                started.append(usage.cpu())
                while time.time() < begin + seconds:
                    memory.append(usage.memory())
                    time.sleep(1)

            watcher = threading.Thread(target=watch)
            watcher.start()
            crowd.call("train", begin, batches)
            elapsed = time.time() - begin
            cpu = usage.cpu() - started[0]
            beside.join()
            watcher.join()
            behind = sum(crowd.call("behind"))
            heartbeat = max(crowd.call("heartbeat"))
            crowd.call("leave")
            with closing(Ranks(connections.read(path), "load", world_size, range(1))) as first:
                known, asked = Aborts(), Aborts()
                run = LargeRun(crowd, first, usage, folder, every)
                for number in range(trips):
                    run.trip(2 * number + 1, 0, known)
                    run.trip(2 * number + 2, LONGEST, asked)
        finally:
            crowd.close()
    without_load = bare_aborts(world_size, trips, cores, folder)
    table = fingerprint_table(range(1, world_size), parameters) if parameters else None
    return {
        "ranks": world_size,
        "seconds a batch": every,
        "ranks x batches/s": world_size / every,
        "parameters": parameters,
        "fingerprint bytes": len(fingerprint_message(table, SLOTS)) if table is not None else 0,
        "groups": groups,
        "batch bytes": len(batch_messages(0, groups=groups)[0]),
        "calls us": cpu_of_calls(world_size, groups) if groups else 0.0,
        **(cpu_of_comparing(world_size, parameters) if parameters else {"decode us": 0.0, "compare us": 0.0}),
        "messages/s": (world_size - 1) * (batches * (1 + bool(parameters)) + seconds / heartbeat) / elapsed,
        "cpu %": 100 * cpu / elapsed,
        "seconds": elapsed,
        "behind": behind,
        "memory": [connected, memory[len(memory) // 6], memory[len(memory) // 2], memory[-1]],
        "KiB a rank, connected": 1024 * (connected - alone) / world_size,
        "KiB a rank, at the end": 1024 * (memory[-1] - alone) / world_size,
        "KiB a rank, bare ROUTER": 1024 * without_load.memory / world_size,
        "latency p50": statistics.median(latencies.beat),
        "latency p99": quantile(latencies.beat, 0.99),
        "latency last": latencies.beat[-1],
        "small trips": len(latencies.to_abort),
        **spread("small: TRIP to ABORT", latencies.to_abort),
        **spread("small: TRIP to last ACK", latencies.to_last_ack),
        "trips": trips,
        **spread("TRIP to ABORT", known.to_first),
        **spread("all told", known.to_all),
        **spread("TRIP to last ACK", known.to_last_ack),
        **spread("asked: TRIP to ABORT", asked.to_first),
        **spread("asked: TRIP to last ACK", asked.to_last_ack),
        **spread("bare: all told", without_load.to_all),
        **spread("bare: to last ACK", without_load.to_last_ack),
    }


def cpu_of_comparing(world_size: int, parameters: int) -> dict[str, float]:
    """Microseconds of CPU time to decode a fingerprint and to compare it, in this process: of one rank and step."""
    table, watch = fingerprint_table(range(world_size), parameters), ReplicaWatch(world_size, lambda rank: ("", ""))
    for rank in range(world_size):
        watch.take_table(rank, table)
    spent = {"decode": 0.0, "compare": 0.0}
    for batch in range(SLOTS):
        message = fingerprint_message(table, batch)
        for rank in range(world_size):
            begun = time.thread_time()
            decoded = wire.decode(message)
            between = time.thread_time()
            assert isinstance(decoded, messages.Fingerprinted)
            watch.take(rank, NO_STAGE, decoded.fingerprint)
            spent["decode"] += between - begun
            spent["compare"] += time.thread_time() - between
    return {f"{name} us": 1e6 * seconds / (SLOTS * world_size) for name, seconds in spent.items()}


def cpu_of_calls(world_size: int, groups: int) -> float:
    """Microseconds of CPU that the counts of one batch take, decoded and compared; of batches of all ranks, after a first one."""
    desk = connected(world_size)
    batches = [
        (wire.encode(messages.Batch(1, makers.summary(), counts(batch, of))) for of in (0, groups)) for batch in range(4)
    ]
    spent = []
    for batch, (bare, full) in enumerate(batches):
        began = time.process_time()
        for number in range(world_size):
            message = wire.decode(full)
            assert isinstance(message, messages.Batch)
            desk.run.calls.take(desk.run.ranks[number], message.calls, float(batch), batch)
        counted = time.process_time() - began
        began = time.process_time()
        for _ in range(world_size):
            wire.decode(bare)
        spent.append((counted - (time.process_time() - began)) / world_size * 1e6)
    return statistics.median(spent[1:])


def spread(name: str, values: list[float]) -> dict[str, float]:
    return {f"{name} {part}": quantile(values, share) for part, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))}


def flood(world_size: int, seconds: float, cores: list[int], folder: Path) -> dict[str, Any]:
    """The second table."""

    def rate(path: Path, *, greeted: bool) -> float:
        crowd = Crowd(path, "flood", world_size, range(world_size), cores[1:] or cores)
        try:
            if greeted:
                crowd.call("connect")
            crowd.call("flood", seconds / 4)  # until all queues are full
            sent: list[int] = crowd.call("flood", seconds)
            return sum(sent) / seconds
        finally:
            crowd.close()

    with collector(folder, cores[0], folder / "log") as (_, path):
        ours = rate(path, greeted=True)
    with bare(folder, cores[0]) as (pipe, path, _):
        pipe.send(0)
        theirs = rate(path, greeted=False)
    return {"ranks": world_size, "collector": ours, "bare ROUTER": theirs, "ratio": ours / theirs}


def columns(name: str) -> dict[str, str]:
    return {f"{name} {part}": "{:.1f}" for part in ("p50", "p99", "max")}


LOAD_COLUMNS = {
    "ranks": "{:.0f}", "seconds a batch": "{:g}", "ranks x batches/s": "{:.0f}", "parameters": "{}",
    "fingerprint bytes": "{}", "groups": "{}", "batch bytes": "{}",
    "decode us": "{:.1f}", "compare us": "{:.1f}", "calls us": "{:.1f}",
    "messages/s": "{:.0f}", "cpu %": "{:.0f}", "seconds": "{:.1f}", "behind": "{}",
    **{f"KiB a rank, {when}": "{:.1f}" for when in ("connected", "at the end", "bare ROUTER")},
    "latency p50": "{:.1f}", "latency p99": "{:.1f}", "latency last": "{:.1f}",
    "small trips": "{}", **columns("small: TRIP to ABORT"), **columns("small: TRIP to last ACK"),
    "trips": "{}", **columns("TRIP to ABORT"), **columns("all told"), **columns("TRIP to last ACK"),
    **columns("asked: TRIP to ABORT"), **columns("asked: TRIP to last ACK"),
    **columns("bare: all told"), **columns("bare: to last ACK"),
}  # fmt: skip
FLOOD_COLUMNS = {"ranks": "{:.0f}", "collector": "{:.0f}", "bare ROUTER": "{:.0f}", "ratio": "{:.2f}"}


def show(rows: list[dict[str, Any]], columns: dict[str, str]) -> None:
    """One line for each column, one column for each size."""
    for name, form in columns.items():
        print(f"  {name:28}", *(f"{form.format(row[name]):>10}" for row in rows))
    if "memory" in rows[0]:
        for index, moment in enumerate(("connected", "warm", "in the middle", "at the end")):
            print(f"  {'MiB ' + moment:28}", *(f"{row['memory'][index]:10.0f}" for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--ranks",
        type=lambda text: [Size.of(part) for part in text.split(",")],
        default=[Size(64), Size(1024), Size(4096), Size(16384), Size(16384, 4), Size(32768, 4), Size(65536, 8)],
        help="RANKS, or RANKSxSECONDS where a batch comes every so many seconds",
    )
    parser.add_argument(
        "--parameters",
        type=lambda text: [int(part) for part in text.split(",")],
        default=[0, PARAMETERS],
        help="of which each rank sends fingerprints; 0: none; for each, every size is measured",
    )
    parser.add_argument(
        "--groups",
        type=lambda text: [int(part) for part in text.split(",")],
        default=[0, 4],
        help="whose collectives each rank counts; for each, every size is measured",
    )
    parser.add_argument("--seconds", type=int, default=60, help="of load at each size")
    parser.add_argument("--trips", type=int, default=10, help="of the large run, of either kind")
    parser.add_argument("--flood", type=int, default=64, metavar="RANKS", help="ranks of the flood; 0: none")
    parser.add_argument("--flood-seconds", type=float, default=10)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[1:] or cores)  # the first core is the collector's alone
    print(f"{len(cores)} cores, the collector on one of them; {ROWS} readings a batch, {len(batch_messages(0)[0])} bytes\n")
    result: dict[str, Any] = {"load": [], "flood": []}
    room = raise_descriptor_limit()
    for size, parameters, groups in itertools.product(arguments.ranks, arguments.parameters, arguments.groups):
        if size.ranks > room:
            print(f"  {size.ranks} ranks: not run, as a process may have files open for {room} ranks here (ulimit -Hn)\n")
            continue
        with tempfile.TemporaryDirectory() as folder:
            of = arguments.seconds, arguments.trips, cores, Path(folder)
            result["load"].append(under_load(size, parameters, groups, *of))
        show(result["load"][-1:], LOAD_COLUMNS)
        print(flush=True)
    if arguments.flood:
        with tempfile.TemporaryDirectory() as folder:
            result["flood"].append(flood(arguments.flood, arguments.flood_seconds, cores, Path(folder)))
        show(result["flood"], FLOOD_COLUMNS)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
