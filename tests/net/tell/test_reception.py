"""What a rank takes of its collector, where there is little time for it."""

from __future__ import annotations

import time

import pytest
import zmq

from rankwatch.shared.link import wire
from rankwatch.shared.types import messages
from rankwatch.tell.reception import BURST, PER_BYTE, Reception

ABORT = messages.Abort("stop", 0, 0.0, 60.0)
SOON = 10_000


@pytest.fixture
def pair(context: zmq.Context[zmq.Socket[bytes]]) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    rank, collector = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    rank.bind("inproc://link")
    collector.connect("inproc://link")
    return rank, collector


@pytest.mark.parametrize("is_aborted", [False, True])
def test_in_a_flood_all_is_dropped_but_the_first_abort(
    pair: tuple[zmq.Socket[bytes], zmq.Socket[bytes]], is_aborted: bool
) -> None:
    rank, collector = pair
    handled: list[messages.Message] = []
    reception = Reception("rank 0", lambda socket, message: handled.append(message), lambda: is_aborted)
    reception._work.has(time.monotonic())  # the allowance begins now
    reception._work.spend(0.75 * BURST)
    for message in (messages.Ack(1, abort=False), ABORT, messages.Inspect(1)):
        collector.send(wire.encode(message))
    assert rank.poll(SOON)
    assert reception.receive(rank)
    assert handled == ([] if is_aborted else [ABORT])


def test_while_there_is_time_all_is_handled_and_without_any_nothing_is_received(
    pair: tuple[zmq.Socket[bytes], zmq.Socket[bytes]],
) -> None:
    rank, collector = pair
    handled: list[messages.Message] = []
    reception = Reception("rank 0", lambda socket, message: handled.append(message), lambda: False)
    sent: list[messages.Message] = [messages.Ack(1, abort=False), ABORT]
    for message in sent:
        collector.send(wire.encode(message))
    assert rank.poll(SOON)
    assert reception.receive(rank)
    assert handled == sent
    reception._work.spend(2 * BURST)
    collector.send(wire.encode(ABORT))
    assert rank.poll(SOON)
    assert not reception.receive(rank)
    assert handled == sent
    assert rank.poll(SOON)


def test_what_zeromq_has_decrypted_is_charged(pair: tuple[zmq.Socket[bytes], zmq.Socket[bytes]]) -> None:
    rank, collector = pair
    reception = Reception("rank 0", lambda socket, message: None, lambda: False)
    before = reception._work.left(time.monotonic())
    for _ in range(16):
        collector.send(bytes(1 << 20))
    while rank.poll(0):
        reception.receive(rank)
    spent = BURST * (before - reception._work._saved / BURST)
    assert spent > 0.9 * 16 * PER_BYTE * (1 << 20)
