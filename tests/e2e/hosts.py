"""Hosts on this machine: network namespaces, and a switch between them whose cables can be pulled, slow or lossy.

Linux, root and iproute2. The switch is a thread that passes frames between the namespaces' interfaces, so that nothing depends on
what the kernel's traffic control can do, and nothing is added to this machine's own network but interfaces without an address.
"""

from __future__ import annotations

import heapq
import itertools
import os
import random
import select
import shutil
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest

_SOL_PACKET, _ADD_MEMBERSHIP, _VNET_HDR, _IGNORE_OUTGOING, _PROMISCUOUS, _ALL_PROTOCOLS = 263, 1, 15, 23, 1, 3
"""From linux/if_packet.h and linux/if_ether.h; the standard library does not name them."""

_VNET_HEADER, _ETHERNET_HEADER, _IPV4 = 10, 14, b"\x08\x00"
_LARGEST_FRAME = 70_000
_BUFFER = 8 * 2**20
_numbers = itertools.count()


@dataclass
class Cable:
    """Between a host and the switch; the faults hold for both directions. ``delay`` is seconds, ``loss`` a share."""

    end: socket.socket
    is_cut: bool = False
    delay: float = 0.0
    loss: float = 0.0


class Packet(NamedTuple):
    """A TCP packet's ends: addresses and ports."""

    source: str
    target: str
    source_port: int
    target_port: int


@dataclass
class Hosts:
    """Some hosts and the switch between them; ``address`` of each is known to all."""

    names: list[str]
    address: dict[str, str] = field(default_factory=dict)
    cables: dict[str, Cable] = field(default_factory=dict)
    blocked: Callable[[Packet], bool] | None = None
    """The switch's firewall: packets that it says nothing of, and does not pass on."""

    def __post_init__(self) -> None:
        if reason := _what_is_missing():
            pytest.skip(reason)
        mark = f"rw{os.getpid()}-{next(_numbers)}"
        self.spaces = {name: f"{mark}-{name}" for name in self.names}
        self._stop_read, self._stop_write = os.pipe()
        self._switch = threading.Thread(target=self._pass_frames, name="switch", daemon=True)
        try:
            for number, name in enumerate(self.names, 1):
                self._add(name, number, f"rw{os.getpid() % 100_000}.{next(_numbers)}")
        except BaseException:
            self._delete()
            raise
        self._switch.start()

    def command(self, name: str) -> list[str]:
        """What to put before a command so that it runs on a host."""
        return ["ip", "netns", "exec", self.spaces[name]]

    def close(self) -> None:
        os.close(self._stop_write)
        self._switch.join()
        os.close(self._stop_read)
        self._delete()

    def _add(self, name: str, number: int, port: str) -> None:
        space, address = self.spaces[name], f"10.99.77.{number}"
        inside = f"ip netns exec {space} "
        for line in (
            f"ip netns add {space}",
            f"ip link add {port} type veth peer name eth0 netns {space}",
            f"{inside}ip addr add {address}/24 dev eth0",
            f"{inside}ip link set eth0 up",
            f"{inside}ip link set lo up",
            f"ip link set {port} up",
        ):
            subprocess.run(line.split(), check=True, capture_output=True, text=True)
        self.address[name] = address
        self.cables[name] = Cable(_port(port))

    def _delete(self) -> None:
        for cable in self.cables.values():
            cable.end.close()
        for space in self.spaces.values():  # its interface goes with it, and the other end with that
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)

    def _pass_frames(self) -> None:
        """The switch: what comes in on one cable goes out on all others, some time later, if it is not lost."""
        under_way: list[tuple[float, int, Cable, bytes]] = []
        order = itertools.count()
        by_end = {cable.end.fileno(): cable for cable in self.cables.values()}
        while True:
            wait = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
            ready, _, _ = select.select([*by_end, self._stop_read], [], [], wait)
            if self._stop_read in ready:
                return
            for descriptor in ready:
                source = by_end[descriptor]
                frame = source.end.recv(_LARGEST_FRAME)
                if self.blocked is not None and (packet := _packet(frame)) is not None and self.blocked(packet):
                    continue
                for target in self.cables.values():
                    if target is not source and not _is_lost(source) and not _is_lost(target):
                        due = time.monotonic() + source.delay + target.delay
                        heapq.heappush(under_way, (due, next(order), target, frame))
            while under_way and under_way[0][0] <= time.monotonic():
                _, _, target, frame = heapq.heappop(under_way)
                if not target.is_cut:
                    with suppress(OSError):  # no room, or no host any more: the frame is lost, as on a wire
                        target.end.send(frame)


def _packet(frame: bytes) -> Packet | None:
    """The TCP packet in a frame, behind its virtual header and Ethernet's; None if there is none."""
    ip = frame[_VNET_HEADER + _ETHERNET_HEADER :]
    if frame[_VNET_HEADER + _ETHERNET_HEADER - 2 :][:2] != _IPV4 or ip[9] != socket.IPPROTO_TCP:
        return None
    ports = struct.unpack_from("!HH", ip, 4 * (ip[0] & 15))
    return Packet(socket.inet_ntoa(ip[12:16]), socket.inet_ntoa(ip[16:20]), *ports)


def _is_lost(cable: Cable) -> bool:
    return cable.is_cut or random.random() < cable.loss


def _port(interface: str) -> socket.socket:
    """The switch's end of a cable. Frames keep the header that says which checksums the sender left to its card."""
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    end.setsockopt(_SOL_PACKET, _VNET_HDR, 1)
    end.setsockopt(_SOL_PACKET, _IGNORE_OUTGOING, 1)
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        end.setsockopt(socket.SOL_SOCKET, option, _BUFFER)
    end.bind((interface, _ALL_PROTOCOLS))
    promiscuous = struct.pack("iHH8s", socket.if_nametoindex(interface), _PROMISCUOUS, 0, b"")
    end.setsockopt(_SOL_PACKET, _ADD_MEMBERSHIP, promiscuous)
    return end


def _what_is_missing() -> str:
    if os.geteuid() != 0:
        return "hosts need root"
    if shutil.which("ip") is None:
        return "hosts need iproute2"
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, check=False)
    return f"hosts need network namespaces: {tried.stderr}" if tried.returncode else ""
