"""Somebody without a key on the cable between a rank and its collector: who reads along, changes bytes, or repeats them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

import makers
from cables import Cable
from collectors import Running, until
from links import link_to
from rankwatch.shared.types.frame import FrameTable
from rankwatch.tell.link import Link

NAME = "secret_module"
LEAST = 1000
"""Bytes of a piece that has a message: a TABLE. Handshakes are smaller."""


@pytest.fixture
def cable(collector: Running) -> Iterator[Cable]:
    cable = Cable(int(collector.collector.connection.address.rpartition(":")[2]))
    yield cable
    cable.close()


@pytest.fixture
def rank(collector: Running, cable: Cable) -> Iterator[Link]:
    tapped = replace(collector.collector.connection, address=cable.address)
    link = link_to(tapped, on_abort=lambda abort: pytest.fail(f"the rank was stopped: {abort}"))
    link.start()
    until(lambda: link.is_online)
    yield link
    link.close("finished")


def send(rank: Link, batch: int) -> None:
    table = FrameTable((makers.frame(module=NAME).spec,) * 64)
    rank.send_batch(table, makers.summary(batch, of=table))


def test_who_reads_the_traffic_sees_no_name(rank: Link, cable: Cable) -> None:
    send(rank, 0)
    until(lambda: not rank._spool)
    assert len(cable.seen) > LEAST
    assert NAME.encode() not in cable.seen
    assert b"HELLO" not in cable.seen.replace(b"\x05HELLO", b"")  # CURVE's own command of this name is no message


@pytest.mark.parametrize("change", ["changed", "repeated"])
def test_who_changes_the_traffic_only_breaks_the_connection(
    rank: Link, cable: Cable, collector: Running, change: str
) -> None:
    refused = collector.collector.ledger.refused

    def tamper(data: bytes) -> bytes:
        if len(data) < LEAST:
            return data
        cable.tamper = lambda data: data  # once
        return data[:-8] + bytes([data[-8] ^ 1]) + data[-7:] if change == "changed" else data * 2

    cable.tamper = tamper
    before = cable.connections
    send(rank, 0)
    until(lambda: cable.connections > before)
    until(lambda: not rank._spool)
    assert collector.collector.ledger.refused == refused
    assert collector.collector.ledger.runs["train-0"].ranks[0].last_batch == 0
