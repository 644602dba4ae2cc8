"""A control client: a peer that is no rank. It connects by the connection file, asks the collector one question and leaves."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import zmq

from rankwatch.errors import ProtocolError, UsageError
from rankwatch.shared.link import wire
from rankwatch.shared.link.connection import Connection
from rankwatch.shared.link.sockets import dealer, receive
from rankwatch.shared.types import messages

ANSWER_TIMEOUT = 5.0
"""Seconds that a collector has to answer, the connection included."""

STACKS_TIMEOUT = 12.0
"""Seconds for a rank's stack: the collector gives up a rank after ten."""


def tune(connection: Connection, change: messages.Tune, timeout: float = ANSWER_TIMEOUT) -> messages.Tuned:
    """Changes options of the ranks; returns the collector's answer.

    Raises:
        UsageError: no collector answers, or it refuses.
    """
    return _asked(connection, change, messages.Tuned, timeout)


def invite(connection: Connection, job: str, timeout: float = ANSWER_TIMEOUT) -> Connection:
    """A connection for the ranks of one job, whose keys are valid for that job alone. Raises UsageError as ``tune``."""
    answer = _asked(connection, messages.Invite(job), messages.Invited, timeout)
    keys = answer.client_public, answer.client_secret
    return Connection(connection.address, connection.server_public, *keys, job, for_job_alone=True)


Answer = TypeVar("Answer", messages.Tuned, messages.Invited, messages.Inspected)


def stacks(connection: Connection, run: str, rank: int) -> Iterator[messages.Inspected]:
    """Where ranks of this run are, as they answer. Raises UsageError as ``tune``."""
    with _connected(connection) as socket:
        question: messages.Message | None = messages.Inspect(0, run, rank)
        asked, answered = 1, 0
        while answered < asked:
            patience = STACKS_TIMEOUT if answered else ANSWER_TIMEOUT + STACKS_TIMEOUT
            answer = _ask(socket, question, messages.Inspected, time.monotonic() + patience)
            one = _checked(answer, messages.Inspected, connection, patience)
            question, asked, answered = None, one.asked, answered + 1
            yield one


def _asked(connection: Connection, question: messages.Message, expected: type[Answer], timeout: float) -> Answer:
    with _connected(connection) as socket:
        return _checked(_ask(socket, question, expected, time.monotonic() + timeout), expected, connection, timeout)


@contextmanager
def _connected(connection: Connection) -> Iterator[zmq.Socket[bytes]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        yield dealer(context, connection)
    finally:
        context.destroy(linger=0)


def _checked(answer: messages.Message | None, expected: type[Answer], connection: Connection, timeout: float) -> Answer:
    if isinstance(answer, expected):
        return answer
    if isinstance(answer, messages.Error):
        raise UsageError(f"the collector at {connection.address} refused: {answer.text}")
    raise UsageError(
        f"no collector answers at {connection.address} within {timeout:g} s: is it running, of this same release, "
        "and is this its connection file?"
    )


def _ask(
    socket: zmq.Socket[bytes], question: messages.Message | None, expected: type[messages.Message], deadline: float
) -> messages.Message | None:
    """``question``: None: the answer is another one to the question before."""
    if question is not None:
        if not _poll(socket, zmq.POLLOUT, deadline):
            return None
        socket.send(wire.encode(question), zmq.NOBLOCK)
    while _poll(socket, zmq.POLLIN, deadline):
        try:
            message = wire.decode(receive(socket))
        except ProtocolError as error:
            raise UsageError(f"the collector's answer cannot be read: {error}; use the same release on both sides") from None
        if isinstance(message, (expected, messages.Error)):
            return message
    return None


def _poll(socket: zmq.Socket[bytes], event: int, deadline: float) -> bool:
    return bool(socket.poll(max(0, int(1000 * (deadline - time.monotonic()))), event))
