"""Checks that this host can reach the collector: the connection file, the address, the key, the answer."""

from __future__ import annotations

import socket as stdlib_socket
import time

import zmq
from zmq.utils.monitor import recv_monitor_message

from ...errors import AddressError, ConnectionFileError, ProtocolError
from ...shared.link import connection as connections
from ...shared.link import wire
from ...shared.link.connection import Connection
from ...shared.link.sockets import dealer, knock, receive
from ...shared.types import messages
from ..result import CheckResult, fail, ok, skip

CHECK = "collector"
_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_ENDS = _REFUSED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


def collector(source: str, timeout: float) -> CheckResult:
    """``source`` is the value of RANKWATCH_CONNECTION."""
    if not source:
        return skip(CHECK, "RANKWATCH_CONNECTION is not set")
    try:
        connection = connections.read(source)
    except ConnectionFileError as error:
        return fail(CHECK, str(error), "RANKWATCH_CONNECTION is to name the file that `rankwatch collector` wrote")
    deadline = time.monotonic() + timeout
    return _unreachable(connection, timeout / 2) or _unwelcome(connection, deadline)


def _unreachable(connection: Connection, timeout: float) -> CheckResult | None:
    host, _, port = connection.address.removeprefix("tcp://").rpartition(":")
    try:
        knock(connection.address, timeout)
    except stdlib_socket.gaierror:
        advice = f"give the collector an address that resolves here: rankwatch collector --listen tcp://ADDRESS:{port}"
        return fail(CHECK, f"{connection.address}: {host} does not resolve on this host", advice)
    except ConnectionRefusedError:
        return fail(
            CHECK, f"{connection.address}: nobody listens there", "is the collector running, and is this its newest file?"
        )
    except TimeoutError:
        advice = f"a firewall? let port {port} of {host} through from this host"
        return fail(CHECK, f"{connection.address}: no answer from that host or port in {timeout:g} s", advice)
    except (OSError, AddressError) as error:
        return fail(CHECK, f"{connection.address}: {error}", "is it an address that this host has a route to?")
    return None


def _unwelcome(connection: Connection, deadline: float) -> CheckResult:
    """A completed handshake proves the keys of both sides; an answer proves that a collector is behind the address."""
    began = time.monotonic()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        socket = dealer(context, connection)
        monitor = socket.get_monitor_socket(_ENDS)
        if not _is_admitted(socket, monitor, deadline):
            return fail(
                CHECK,
                f"{connection.address} takes the connection and refuses the key",
                "the file is of another collector, or of one that was started anew: copy its connection file again",
            )
        socket.send(wire.encode(messages.Ack(0, abort=False)))  # harmless, and answered: this peer sent no HELLO
        if not socket.poll(_left(deadline), zmq.POLLIN):
            return fail(CHECK, f"{connection.address} has our key and does not answer", "does it hang? see its log")
        wire.decode(receive(socket))
    except ProtocolError as error:
        return fail(
            CHECK, f"{connection.address} answers what cannot be read: {error}", "use the same release on both sides"
        )
    finally:
        context.destroy(linger=0)
    how = "encrypted" if connection.is_encrypted else "in plain text"
    seconds = time.monotonic() - began
    return ok(CHECK, f"{connection.address} answers, {how}, in {seconds:.3f} s", seconds=seconds)


def _is_admitted(socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes], deadline: float) -> bool:
    """Whether the handshake succeeds. The socket is not writable before it (see ``dealer``)."""
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLOUT)
    poller.register(monitor, zmq.POLLIN)
    while ready := dict(poller.poll(_left(deadline))):
        if socket in ready:
            return True
        if recv_monitor_message(monitor)["event"] != zmq.EVENT_HANDSHAKE_SUCCEEDED:
            return False
    return False


def _left(deadline: float) -> int:
    return max(0, int(1000 * (deadline - time.monotonic())))
