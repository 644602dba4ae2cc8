"""Clients with a valid key that send one kind of message without end. A script: ``greedy.py CONNECTION KIND SECONDS``.

The flood runs at the lowest priority, so that on few cores it takes no core from the collector. It prints what it sent.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / folder) for folder in ("tests", "agent", "monitor")]

import msgpack
import zmq

import makers
from rankwatch.shared.link import connection as connections
from rankwatch.shared.link import sockets, wire
from rankwatch.shared.types import messages
from rankwatch.shared.types.calls import MAX_CALLS, MAX_TOLD, CollectiveCall, GroupCount
from rankwatch.shared.types.fields import MAX_RANKS
from rankwatch.shared.types.fingerprint import FingerprintRow, FingerprintTable, RankMesh
from rankwatch.shared.types.frame import BEGINNING, FrameTable
from rankwatch.shared.types.gpu import Gpu
from rankwatch.shared.types.tuning import Tuning
from rankwatch_monitor.decide.replicas.comparison import MAX_TABLE_ROWS

LONG = "x" * 16_000
NESTED = msgpack.packb(["BEAT", [[0] * 60] * 100_000])

Parts = list[bytes]
_MEBIBYTE = bytes(1 << 20)


def _frame_table(number: int, rows: int = 8000) -> FrameTable:
    """Another one for each number, of about 50 bytes a row."""
    spec = makers.frame().spec
    return FrameTable(tuple(replace(spec, module=f"layers.{number}.{row}") for row in range(rows)))


def _long_trip(number: int) -> messages.Tripped:
    """Of 800 KB."""
    trip = makers.trip()
    return messages.Tripped(number, replace(trip, frames=trip.frames * 10_000))


def _wide_table(number: int) -> FingerprintTable:
    """Of 330 bytes, for half a million ranks: eight meshes, which are others for each number."""
    firsts = range(8 * number, 8 * number + 8)
    meshes = [RankMesh(tuple(range(first, MAX_RANKS)), (MAX_RANKS - first,), (True,), source="DDP") for first in firsts]
    rows = [FingerprintRow(f"{mesh}.weight", "float32", 64, mesh, 0, True) for mesh in range(len(meshes))]
    return FingerprintTable(tuple(rows), tuple(meshes))


JOB = "greedy"
"""The key of this job is enough for all kinds but INVITE."""


def _hello(number: int) -> messages.Hello:
    """Another run each time."""
    return makers.hello(job=JOB, incarnation=f"{number}-{os.getpid()}", start=f"{number}-{os.getpid()}")


def _wide_hello(number: int) -> messages.Hello:
    """Another run each time, with all that a HELLO can say."""
    most = "x" * 1024
    return replace(_hello(number), world_size=MAX_RANKS, host=most, device=most, torch=most, gpu=Gpu(most, most, most, most))


_CALLS = (CollectiveCall(1, "x" * 80, "x" * 160),) * MAX_CALLS


def _counts(number: int) -> tuple[GroupCount, ...]:
    """Of other groups each time."""
    return tuple(GroupCount(MAX_TOLD * number + place, number, number) for place in range(MAX_TOLD))


KINDS: dict[str, Callable[[int], messages.Message]] = {
    "HELLO": _hello,
    "wide HELLO": _wide_hello,
    "TABLE": lambda n: messages.Table(_frame_table(n)),
    "BATCH": lambda n: messages.Batch(n, makers.summary(n)),
    "TRIP": lambda n: messages.Tripped(n, makers.trip()),
    "CLOSEUP": lambda n: messages.LookedCloser(n, makers.closeup(note=LONG)),
    "NOTICE": lambda n: messages.Noticed(n, makers.notice(batch=n)),
    "FINGERPRINTS": lambda n: messages.Fingerprints(makers.fingerprint_table(2000 + n % 500, 1)),
    "FINGERPRINT": lambda n: messages.Fingerprinted(n, makers.fingerprint(makers.fingerprint_table(2, 1), n)),
    "OFF": lambda n: messages.Off(n, LONG),
    "BEAT": lambda n: makers.beat(n, 0, 0),
    "INSPECTED": lambda n: messages.Inspected(n, LONG, (LONG,) * messages.MAX_STACK_LINES),
    "counting BEAT": lambda n: replace(makers.beat(n, 0, 0), calls=_counts(n)),
    "RECOUNTED": lambda n: messages.Recounted(0, n % 64, LONG, MAX_RANKS, 1, n, _CALLS),
    "ACK": lambda n: messages.Ack(n, abort=True),
    "BYE": lambda n: messages.Bye(n, "finished", LONG),
    "PROBE": lambda n: messages.Probe(BEGINNING),
    "TUNE": lambda n: messages.Tune("", Tuning(trace_batch_nums=tuple(range(n, n + 5000)))),
    "INVITE": lambda n: messages.Invite(f"job{n}"),
}
LONG_KINDS: dict[str, Callable[[int], messages.Message]] = {
    "long TABLE": lambda n: messages.Table(_frame_table(n, 100_000)),
    "long TRIP": _long_trip,
    "long FINGERPRINTS": lambda n: messages.Fingerprints(makers.fingerprint_table(MAX_TABLE_ROWS - n, 1)),
    "wide FINGERPRINTS": lambda n: messages.Fingerprints(_wide_table(n)),
    "long BATCH": lambda n: messages.Batch(n + 1, makers.summary(n + 1, traced=True, of=_frame_table(0, 100_000))),
}
"""Few are made, and sent again and again."""
RAW: dict[str, Callable[[int], Parts]] = {
    "malformed": lambda n: [b"\x93\xa5HELLO" + bytes(1000)],
    "unknown": lambda n: [b"\x92\xa6FUTURE" + b"\xc0" * 1],
    "multipart": lambda n: [b"x"] * 50,
    "long multipart": lambda n: [_MEBIBYTE] * 100,
    "long malformed": lambda n: [NESTED],
}
MADE, LONG_MADE = 12, 3
"""Messages that are made, and sent again and again; a long one takes up to a second to make."""

CONNECTIONS = "connections"
ALL = (*KINDS, *LONG_KINDS, *RAW, CONNECTIONS)


def bodies(kind: str) -> Iterator[Parts]:
    """What is sent after a HELLO. Some tables are made once, since making one takes longer than reading it."""
    first = [wire.encode(messages.Table(makers.table()))] if kind == "BATCH" else []
    if kind == "long BATCH":
        first = [wire.encode(messages.Table(_frame_table(0, 100_000)))]
    if kind == "FINGERPRINT":
        first = [wire.encode(messages.Fingerprints(makers.fingerprint_table(2, 1)))]
    for body in first:
        yield [body]
    if kind == "wide HELLO":  # the run ends, and has a report
        for number in itertools.count(1):
            yield [wire.encode(_wide_hello(number))]
            yield [wire.encode(messages.Bye(1, "finished", ""))]
    if kind in LONG_KINDS or kind in ("TABLE", "FINGERPRINTS"):
        count = LONG_MADE if kind in LONG_KINDS else MADE
        made = [[wire.encode({**KINDS, **LONG_KINDS}[kind](number))] for number in range(count)]
        yield made[0]
        yield from itertools.cycle(made)
    for number in itertools.count(1):
        yield RAW[kind](number) if kind in RAW else [wire.encode(KINDS[kind](number))]


def flood(path: Path, kind: str, seconds: float) -> int:
    """How many messages were sent."""
    connection = connections.read(path)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    if kind != CONNECTIONS:
        made = bodies(kind)
        made = itertools.chain([next(made)], made)  # they are made before the flood begins
    os.nice(19)  # and not at this priority: where other processes have all cores, that takes minutes
    print("flooding", flush=True)
    until, sent = time.monotonic() + seconds, 0
    if kind == CONNECTIONS:
        while time.monotonic() < until:
            some = [sockets.dealer(context, connection) for _ in range(50)]
            for socket in some:
                socket.setsockopt(zmq.SNDTIMEO, 1000)
                socket.send(wire.encode(_hello(sent)))
                sent += 1
            for socket in some:
                socket.close(0)
        return sent
    socket = sockets.dealer(context, connection)
    if kind != "INVITE":
        socket.send(wire.encode(_hello(0)))
    control = sockets.dealer(context, connection) if kind == "TUNE" else socket
    while time.monotonic() < until:
        if control.poll(100, zmq.POLLOUT):
            control.send_multipart(next(made))
            sent += 1
        for each in {socket, control}:
            while each.poll(0):
                each.recv()
    context.destroy(linger=0)
    return sent


if __name__ == "__main__":
    print(flood(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])))
