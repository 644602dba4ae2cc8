"""The only file that creates ZeroMQ sockets: encrypted with CURVE by default, with limits, without lingering."""

from __future__ import annotations

import errno
import socket as stdlib_socket
from collections.abc import Callable
from typing import TYPE_CHECKING

import zmq
from zmq.utils.monitor import recv_monitor_message

from ...errors import AddressError, ProtocolError
from .connection import NO_KEYS, Connection, KeyPair, is_loopback
from .wire import MAX_MESSAGE_BYTES

if TYPE_CHECKING:
    from zmq.auth.thread import ThreadAuthenticator

SEND_HIGH_WATER = 1000
RECEIVE_HIGH_WATER = 4
"""Messages of one peer that wait in the collector; further ones wait in the rank."""
RANK_HIGH_WATER = 16
"""Messages of the collector that wait in a rank: few of them are decrypted before the rank has time for them."""
MAX_PEERS = 65_536

KEEPALIVE_IDLE, KEEPALIVE_INTERVAL, KEEPALIVE_PROBES = 2, 1, 3
"""Seconds, seconds, and how many probes may stay unanswered. The kernels send and answer them, whatever the processes do. So
a host that is cut off or gone loses its connection within about five seconds; a process that is stopped, or never releases
the interpreter, keeps it, and can be distinguished from a dead one. (ZeroMQ's own pings are answered by the process.)"""


def new_key_pair() -> KeyPair:
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


def dealer(
    context: zmq.Context[zmq.Socket[bytes]], connection: Connection, max_bytes: int = MAX_MESSAGE_BYTES
) -> zmq.Socket[bytes]:
    """A rank's socket, connecting in the background. Messages are queued only once it is connected.

    ZeroMQ ends the connection to a peer that sends a message of more than ``max_bytes``. Of its messages, RANK_HIGH_WATER
    wait here; further ones wait in the peer.
    """
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER)
    socket.setsockopt(zmq.RCVHWM, RANK_HIGH_WATER)
    socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
    socket.setsockopt(zmq.RECONNECT_IVL, 100)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    if connection.is_encrypted:
        socket.curve_serverkey = connection.server_public.encode()
        socket.curve_publickey = connection.client_public.encode()
        socket.curve_secretkey = connection.client_secret.encode()
    socket.connect(connection.address)
    return socket


def knock(address: str, timeout: float) -> None:
    """Connects to ``tcp://HOST:PORT`` once, within ``timeout`` seconds for each of its addresses, and says nothing.

    Raises:
        OSError: as Python's sockets do: refused, no answer, no such name.
        AddressError: the address is malformed.
    """
    host, port = _split(address)
    stdlib_socket.create_connection((host.strip("[]"), port), timeout).close()


def receive(socket: zmq.Socket[bytes]) -> bytes:
    """The next message of a ``dealer``, without waiting.

    Raises:
        zmq.Again: there is none.
        ProtocolError: it has several parts. All of them may be many, so that the socket is to be closed.
    """
    data: bytes = socket.recv(zmq.NOBLOCK)
    if socket.getsockopt(zmq.RCVMORE):
        raise ProtocolError("a message of several parts, which no message has")
    return data


def authenticator(context: zmq.Context[zmq.Socket[bytes]], admits: Callable[[str], bool]) -> ThreadAuthenticator:
    """Starts the thread that lets a peer connect to the sockets of ``context`` only if ``admits`` accepts its client key."""

    from zmq.auth.thread import ThreadAuthenticator  # here, since it imports asyncio, which ranks do without

    class AdmittedKeys:
        def callback(self, domain: str, key: bytes) -> bool:
            return admits(key.decode())

    thread = ThreadAuthenticator(context)
    thread.start()
    thread.configure_curve_callback(domain="*", credentials_provider=AdmittedKeys())
    return thread


def router(
    context: zmq.Context[zmq.Socket[bytes]], listen: str, server: KeyPair, address: str | None = None
) -> tuple[zmq.Socket[bytes], str]:
    """The collector's socket, bound to ``listen`` (``tcp://HOST:PORT``; port 0 picks one), and the address for the ranks.

    The latter is ``address`` if given, with the bound port in place of port 0.

    Raises:
        AddressError: an address is malformed, in use, not of this machine, or, without keys, not loopback.
    """
    host, port = _split(listen)
    public, public_port = _split(address) if address else ("", 0)
    if public == "*":
        raise AddressError(f"{address!r} is no address that ranks can connect to: give a name or number of this host")
    if server == NO_KEYS and not is_loopback(host):
        raise AddressError(f"cannot listen on {listen} in plain text: that is for loopback alone; leave --insecure out")
    if server == NO_KEYS and public and not is_loopback(public):
        raise AddressError(
            f"ranks cannot connect to {address} in plain text: that is for loopback alone; leave --insecure out"
        )
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER)
    socket.setsockopt(zmq.RCVHWM, RECEIVE_HIGH_WATER)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.BACKLOG, 4096)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_IDLE)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_INTERVAL)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, KEEPALIVE_PROBES)
    # While sent bytes are unacknowledged, TCP repeats them and does not probe: repeating ends after the same time.
    socket.setsockopt(zmq.TCP_MAXRT, 1000 * (KEEPALIVE_IDLE + KEEPALIVE_INTERVAL * KEEPALIVE_PROBES))
    if server != NO_KEYS:
        socket.curve_server = True
        socket.curve_secretkey = server.secret.encode()
        socket.curve_publickey = server.public.encode()
    try:
        socket.bind(f"tcp://{_resolve(host)}:{port or '*'}")
    except zmq.ZMQError as error:
        socket.close()
        raise AddressError(_bind_error(listen, error)) from None
    bound = socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
    reachable = public or (stdlib_socket.gethostname() if host in ("*", "0.0.0.0") else host)
    return socket, f"tcp://{reachable}:{public_port or bound}"


def watch_disconnections(socket: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    """A socket that becomes readable when a connection of ``socket`` ends; read it with ``next_disconnection``."""
    address = f"inproc://disconnections-{id(socket)}"
    socket.monitor(address, zmq.EVENT_DISCONNECTED)
    monitor: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR)
    # If an event finds no room, libzmq blocks: during a run all connections wait, and the close waits for ever.
    monitor.setsockopt(zmq.RCVHWM, 0)
    monitor.connect(address)
    return monitor


def next_disconnection(monitor: zmq.Socket[bytes]) -> int | None:
    """The file descriptor of the next connection that has ended; None if there is no further one."""
    try:
        return int(recv_monitor_message(monitor, zmq.NOBLOCK)["value"])
    except zmq.Again:
        return None


def _split(address: str) -> tuple[str, int]:
    host, colon, port = address.removeprefix("tcp://").rpartition(":")
    if not address.startswith("tcp://") or not colon or not host or not port.isdigit() or int(port) > 65535:
        raise AddressError(f"{address!r} is no address: expected tcp://HOST:PORT (port 0 picks a free one)")
    return host, int(port)


def _resolve(host: str) -> str:
    # ZeroMQ binds to interfaces and numeric addresses; getaddrinfo resolves names.
    if host == "*":
        return host
    try:
        return stdlib_socket.getaddrinfo(host, None, stdlib_socket.AF_INET)[0][4][0]  # type: ignore[return-value]
    except OSError:
        raise AddressError(f"cannot listen on {host}: the name does not resolve") from None


def _bind_error(listen: str, error: zmq.ZMQError) -> str:
    if error.errno == zmq.EADDRINUSE:
        return (
            f"cannot listen on {listen}: the address is in use; another collector? choose another port, or 0 for a free one"
        )
    if error.errno in (zmq.EADDRNOTAVAIL, errno.ENODEV):
        return f"cannot listen on {listen}: it is not an address of this machine"
    return f"cannot listen on {listen}: {error.strerror}"
