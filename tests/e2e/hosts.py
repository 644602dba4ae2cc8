"""Hosts on this machine: namespaces with their own network, name and ``/etc/hosts``, and a switch between them. Its cables can be
cut, slow or lossy. Processes and all other files are shared with this machine.

Needs Linux, root and iproute2. The switch is a thread that passes frames between the namespaces' interfaces. So nothing depends
on the kernel's traffic control, and the machine's own network only gains interfaces without an address.
"""

from __future__ import annotations

import heapq
import itertools
import os
import random
import select
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pytest

_SOL_PACKET, _ADD_MEMBERSHIP, _VNET_HDR, _IGNORE_OUTGOING, _PROMISCUOUS, _ALL_PROTOCOLS = 263, 1, 15, 23, 1, 3
"""From linux/if_packet.h and linux/if_ether.h; the standard library has no names for them."""

_VNET_HEADER, _ETHERNET_HEADER, _IPV4 = 10, 14, b"\x08\x00"
_LARGEST_FRAME = 70_000
_BUFFER = 8 * 2**20
_numbers = itertools.count()

NODES = ["node0", "node1"]
"""The hosts of ranks; the collector is on ``head``."""

_BOOT = 'hostname "$1" && mount --bind "$2" /etc/hosts && ip link set lo up && echo up && exec sleep infinity'
_NAMESPACES = ("--net", "--uts", "--mount")


@dataclass
class Cable:
    """From a host to the switch; faults affect both directions. ``delay``: in seconds; ``loss``: a share of the frames."""

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
    """Hosts and the switch between them; each host knows the ``address`` of all."""

    names: list[str]
    address: dict[str, str] = field(init=False)
    cables: dict[str, Cable] = field(default_factory=dict)
    chance: random.Random = field(default_factory=random.Random)
    """Of the frames that are lost; a test seeds it by its name."""
    blocked: Callable[[Packet], bool] | None = None
    """The switch's firewall: it silently drops these packets."""

    def __post_init__(self) -> None:
        if reason := what_is_missing():
            pytest.skip(reason)
        self.address = {name: f"10.99.77.{number}" for number, name in enumerate(self.names, 1)}
        self._first: dict[str, subprocess.Popen[str]] = {}
        """The first process of each host: it holds the namespaces open."""
        self._folder = tempfile.TemporaryDirectory(prefix="rankwatch-hosts-")
        self._stop_read, self._stop_write = os.pipe()
        self._switch = threading.Thread(target=self._pass_frames, name="switch", daemon=True)
        known = {"localhost": "127.0.0.1", **self.address}
        (Path(self._folder.name) / "hosts").write_text("".join(f"{address} {name}\n" for name, address in known.items()))
        try:
            for name in self.names:
                self._add(name, f"rw{os.getpid() % 100_000}.{next(_numbers)}")
        except BaseException:
            self._delete()
            raise
        self._switch.start()

    def command(self, name: str, folder: str | os.PathLike[str] = ".") -> list[str]:
        """The command prefix that runs a command on a host, in ``folder``."""
        inside = ["nsenter", "--target", str(self._first[name].pid), *_NAMESPACES, "--"]
        return [*inside, "env", "--chdir", str(Path(folder).absolute())]

    def network(self, name: str) -> str:
        """The file of a host's network namespace, for a process that enters the namespace by itself."""
        return f"/proc/{self._first[name].pid}/ns/net"

    def running(self, name: str) -> list[str]:
        """The command lines of the processes on a host."""
        found = []
        for pid in _processes_of(self._first[name].pid):
            with suppress(OSError):  # it has ended
                found.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode())
        return found

    def crash(self, name: str) -> None:
        """Power failure: first cuts the cable, so that no peer receives a close, then kills every process."""
        self.cables[name].is_cut = True
        self.kill_all(name)

    def close(self) -> None:
        os.close(self._stop_write)
        self._switch.join()
        os.close(self._stop_read)
        self._delete()

    def _add(self, name: str, port: str) -> None:
        boot = ["sh", "-c", _BOOT, "boot", name, f"{self._folder.name}/hosts"]
        unshare = ["setpriv", "--pdeathsig", "KILL", "unshare", *_NAMESPACES, *boot]
        first = subprocess.Popen(unshare, stdout=subprocess.PIPE, text=True)
        self._first[name] = first
        assert first.stdout is not None
        assert first.stdout.readline() == "up\n"
        inside = f"nsenter --target {first.pid} --net "
        for line in (
            f"ip link add {port} type veth peer name eth0 netns {first.pid}",
            f"{inside}ip addr add {self.address[name]}/24 dev eth0",
            f"{inside}ip link set eth0 up",
            f"ip link set {port} up",
        ):
            subprocess.run(line.split(), check=True, capture_output=True, text=True)
        self.cables[name] = Cable(_port(port))

    def kill_all(self, name: str) -> None:
        """Kills the processes on the host until none is left, since they may start others; leaves the first process."""
        first = self._first[name].pid
        while pids := [pid for pid in _processes_of(first) if pid != first]:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _delete(self) -> None:
        for cable in self.cables.values():
            cable.end.close()
        # When a host ends, the kernel removes its network interface, and the switch's end with it.
        for name, first in self._first.items():
            self.kill_all(name)
            first.kill()
            first.communicate()
        self._folder.cleanup()

    def _pass_frames(self) -> None:
        """The switch: a frame from one cable goes out on all others, after a delay, unless it is lost."""
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
                    if target is not source and not any(_is_lost(end, self.chance) for end in (source, target)):
                        due = time.monotonic() + source.delay + target.delay
                        heapq.heappush(under_way, (due, next(order), target, frame))
            while under_way and under_way[0][0] <= time.monotonic():
                _, _, target, frame = heapq.heappop(under_way)
                if not target.is_cut:
                    with suppress(OSError):  # no room, or the host is gone: the frame is lost, as on a wire
                        target.end.send(frame)


def _packet(frame: bytes) -> Packet | None:
    """The TCP packet in a frame, after its virtual header and its Ethernet header; None if there is none."""
    ip = frame[_VNET_HEADER + _ETHERNET_HEADER :]
    if frame[_VNET_HEADER + _ETHERNET_HEADER - 2 :][:2] != _IPV4 or ip[9] != socket.IPPROTO_TCP:
        return None
    ports = struct.unpack_from("!HH", ip, 4 * (ip[0] & 15))
    return Packet(socket.inet_ntoa(ip[12:16]), socket.inet_ntoa(ip[16:20]), *ports)


def _is_lost(cable: Cable, chance: random.Random) -> bool:
    return cable.is_cut or chance.random() < cable.loss


def _port(interface: str) -> socket.socket:
    """The switch's end of a cable. Frames keep the header that says which checksums the sender left to its network card."""
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    end.setsockopt(_SOL_PACKET, _VNET_HDR, 1)
    end.setsockopt(_SOL_PACKET, _IGNORE_OUTGOING, 1)
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        end.setsockopt(socket.SOL_SOCKET, option, _BUFFER)
    end.bind((interface, _ALL_PROTOCOLS))
    promiscuous = struct.pack("iHH8s", socket.if_nametoindex(interface), _PROMISCUOUS, 0, b"")
    end.setsockopt(_SOL_PACKET, _ADD_MEMBERSHIP, promiscuous)
    return end


def _processes_of(first: int) -> list[int]:
    """The processes, except zombies, in the same host name namespace."""
    found, space = [], os.readlink(f"/proc/{first}/ns/uts")
    for entry in Path("/proc").iterdir():
        with suppress(OSError):  # it has ended
            if entry.name.isdigit() and os.readlink(entry / "ns" / "uts") == space:
                found.append(int(entry.name))
    return found


def what_is_missing() -> str:
    """Why this machine cannot have hosts; empty where it can."""
    if os.geteuid() != 0:
        return "hosts need root"
    if missing := [tool for tool in ("ip", "nsenter", "unshare", "setpriv", "hostname") if shutil.which(tool) is None]:
        return f"hosts need {', '.join(missing)}: apt-get install iproute2 util-linux hostname"
    tried = subprocess.run(["unshare", *_NAMESPACES, "true"], capture_output=True, text=True, check=False)
    return f"hosts need namespaces: {tried.stderr}" if tried.returncode else ""
