"""Somebody without a key on the cable between a rank and its collector: who reads along, changes bytes, or repeats them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

import pytest

import makers
from collectors import Running, until
from links import link_to
from rankwatch.shared.types.frame import FrameTable
from rankwatch.tell.link import Link

NAME = "secret_module"
LEAST = 1000
"""Bytes of a piece that has a message: a TABLE. Handshakes are smaller."""


class Cable:
    """Passes on what a rank and its collector send each other, and what ``tamper`` makes of the rank's bytes."""

    def __init__(self, port: int) -> None:
        self.tamper: Callable[[bytes], bytes] = lambda data: data
        self.seen = b""
        self.connections = 0
        self._port = port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                rank, _ = self._server.accept()
                self.connections += 1
                collector = socket.create_connection(("127.0.0.1", self._port))
                threading.Thread(target=self._pass, args=(rank, collector, True), daemon=True).start()
                threading.Thread(target=self._pass, args=(collector, rank, False), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, is_ranks: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self.seen += data
                target.sendall(self.tamper(data) if is_ranks else data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._server.close()


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
