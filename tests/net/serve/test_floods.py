"""A client with a valid key sends one kind of accepted message without end: other runs' aborts do not wait for it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from pathlib import Path

import pytest
import zmq

import greedy
import makers
import records
from benchmarks.floods import measure
from collectors import Running
from links import Rank
from rankwatch.shared.link import sockets, wire
from rankwatch.shared.types import messages
from rankwatch_monitor.record.reader import RunRecord
from rankwatch_monitor.record.schema import FILE
from rankwatch_monitor.serve.door import control
from rankwatch_monitor.serve.door import fair_queue as turns
from rankwatch_monitor.serve.door.inbox import Item, Letter

PROMPT, PROMISED = 20.0, 50.0
"""Milliseconds of the loop's CPU time from TRIP to ABORT, median and p99: a busy machine does not change how much goes first."""

MAX_MEMORY, MAX_DISK = 1024, 256
"""MiB of the flooded collector."""


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.parametrize("kind", [*greedy.KINDS, *greedy.LONG_KINDS, *greedy.RAW])
def test_another_runs_abort_beside_a_flood(kind: str, tmp_path: Path) -> None:
    found = measure(kind, 4.0, tmp_path)
    assert found["loop"] < PROMPT, found
    assert found["loop p99"] < PROMISED, found
    assert found["memory"] < MAX_MEMORY, found
    assert found["disk"] < MAX_DISK, found
    assert "an error of ours" not in (tmp_path / "flooded.log").read_text()


@pytest.mark.alone
@pytest.mark.slow
def test_what_was_not_taken_beside_a_flood_with_the_same_key_is_sent_again(
    tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "WORK_AT_ONCE", 1e-9)
    monkeypatch.setattr(turns, "WORK_PER_SECOND", 1e-9)
    monkeypatch.setattr(turns, "CONTEST", 1e9)
    monkeypatch.setattr(turns, "MAX_WAITING", 32 * turns.OVERHEAD)
    refused, add = set[bytes](), turns.Turns.add

    def noted(own: turns.Turns, item: Item, before: Iterable[Letter] = ()) -> bool:
        is_taken = add(own, item, before)
        if not is_taken:
            refused.add(item.peer)
        return is_taken

    monkeypatch.setattr(turns.Turns, "add", noted)
    running = Running(tmp_path)
    invited = control.invite(running.collector.connection, "train")  # with the other key, so that there are two
    rank = Rank(invited, 0, 2)
    assert rank.link.start()
    table = makers.table()
    flood, hello = sockets.dealer(context, invited), wire.encode(makers.hello(1, 2, incarnation="greedy"))
    flood.send(hello)
    batches = count()
    while len(refused) < 2:
        flood.send(hello)  # else it stays deaf, and nothing fills what may wait
        for _ in range(50):
            flood.send(wire.encode(makers.beat(0, 0, 0)))
        rank.link.send_batch(table, makers.summary(next(batches)))
    flood.send(hello)
    flood.send(wire.encode(messages.Bye(1, "finished", "")))
    rank.link.close("finished")
    context.destroy(linger=5000)
    running.stop()
    recorded = records.read(tmp_path / "runs" / "train-0" / FILE, RunRecord.digests)["batch"].tolist()
    assert recorded == list(range(next(batches)))


def test_a_long_table_that_is_malformed_costs_its_sender_an_error_alone(
    collector: Running, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    socket = sockets.dealer(context, collector.collector.connection)
    socket.send(wire.encode(makers.hello()))
    socket.send(b"\x92\xa5TABLE" + bytes(100_000))
    socket.send(wire.encode(makers.beat(0, 0, 0)))
    heard = [type(wire.decode(socket.recv())) for _ in range(3)]
    assert heard == [messages.Welcome, messages.Error, messages.Ack]
