"""Checks of this host that need no torch: shared memory, open files, name service, network interface."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from ...shared.link.connection import is_loopback
from ..result import CheckResult, fail, ok, skip, warn
from ..wording import count

MIB = 2**20
SHARED_MEMORY = Path("/dev/shm")
SHARED_MEMORY_PER_RANK = 64 * MIB
OPEN_FILES = 4096
CONNECT_TIMEOUT = 3.0
SLOW_LOOKUP = 1.0
_SIOCGIFADDR = 0x8915


def shared_memory(local_ranks: int, folder: Path = SHARED_MEMORY) -> CheckResult:
    """Checks that NCCL's and the data loaders' segments fit; writes a segment and reads it back."""
    sample = os.urandom(MIB)
    try:
        space = os.statvfs(folder)
        with tempfile.TemporaryFile(dir=folder) as segment:
            segment.write(sample)
            segment.seek(0)
            is_same = segment.read() == sample
    except OSError as error:
        return fail("shared memory", f"{folder}: {error.strerror}", f"mount a tmpfs on {folder}, or free room in it")
    if not is_same:
        return fail("shared memory", f"{folder} gives back other bytes than were written", "this host's memory is broken")
    free = space.f_bavail * space.f_frsize
    found = f"{folder} has {free // MIB} MiB free for {count(local_ranks, 'local rank')}"
    if free < local_ranks * SHARED_MEMORY_PER_RANK:
        advice = f"docker run --shm-size=8g (or --ipc=host); else remove leftovers: ls -l {folder}"
        return warn("shared memory", found, advice)
    return ok("shared memory", found)


def open_files(limit: int | None = None) -> CheckResult:
    try:
        import resource
    except ImportError:
        return skip("open files", "this Python has no module `resource` to ask for the limit")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = soft if limit is None else limit
    if soft == resource.RLIM_INFINITY:
        return ok("open files", "no limit")
    found = f"limit {soft}"
    if soft < OPEN_FILES:
        most = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
        return warn(
            "open files", f"{found}, under {OPEN_FILES}", f"ulimit -n 65536 before the job (the hard limit is {most})"
        )
    return ok("open files", found)


def name_service(
    master: tuple[str, int], limit: float = SLOW_LOOKUP, ask: Callable[..., object] = socket.getnameinfo
) -> CheckResult:
    """Measures how long it takes to resolve this host's address to a name: torch's store does so for each rank that connects."""
    with socket.create_connection(master, CONNECT_TIMEOUT) as connection:
        address = connection.getsockname()[0].removeprefix("::ffff:")
    # The store listens on IPv6, where an IPv4 client has this form.
    asked = address if ":" in address else f"::ffff:{address}"

    def look_up() -> None:
        with suppress(OSError):  # the address has no name, which does not matter: only the time does
            ask((asked, 0), 0)

    thread = threading.Thread(target=look_up, daemon=True)
    began = time.monotonic()
    thread.start()
    thread.join(limit)
    if thread.is_alive():
        return warn(
            "name service",
            f"no name for {address} within {limit:g} s; torch's store looks up the name of each rank that connects, "
            "and all ranks wait meanwhile",
            "put all nodes into /etc/hosts, or mend the name server of /etc/resolv.conf (for now: options timeout:1 attempts:1)",
        )
    return ok("name service", f"the name of {address} looked up in {time.monotonic() - began:.3f} s")


def interface(master: tuple[str, int], nodes: int, backend: str, env: Mapping[str, str]) -> CheckResult:
    """The interface by which this rank reaches the master, and the address at which gloo will listen for the others."""
    with socket.create_connection(master, CONNECT_TIMEOUT) as connection:
        mine = connection.getsockname()[0].removeprefix("::ffff:")
        addresses = _addresses(connection)
    route = f"to {master[0]} by {_with_interface(mine, addresses)}"
    variable = f"{backend.upper()}_SOCKET_IFNAME"
    wanted = env.get(variable, "")
    if backend != "gloo":
        return ok("interface", f"{route}; {variable} {wanted or 'not set'}")
    if wanted:
        return gloo_with_names(wanted.split(","), addresses, route, nodes)
    host, resolved = socket.gethostname(), list[str]()
    with suppress(OSError):
        resolved += [str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    return gloo_by_default(host, resolved, addresses, route, nodes)


def gloo_with_names(wanted: list[str], addresses: Mapping[str, str], route: str, nodes: int) -> CheckResult:
    """Where gloo listens when GLOO_SOCKET_IFNAME names interfaces."""
    missing = [name for name in wanted if name not in addresses]
    if missing:
        there = ", ".join(f"{name} ({address})" for name, address in addresses.items())
        return fail(
            "interface", f"GLOO_SOCKET_IFNAME={','.join(wanted)}: no {missing[0]} with an address here", f"there are {there}"
        )
    chosen = ", ".join(f"{name} ({addresses[name]})" for name in wanted)
    if nodes > 1 and all(is_loopback(addresses[name]) for name in wanted):
        return _loopback(f"GLOO_SOCKET_IFNAME={','.join(wanted)} is loopback", addresses)
    return ok("interface", f"gloo listens on {chosen}, as told; {route}")


def gloo_by_default(host: str, resolved: list[str], addresses: Mapping[str, str], route: str, nodes: int) -> CheckResult:
    """Where gloo listens by default: on the address of the host's name, or on loopback if that is no address of this host."""
    here = [address for address in resolved if is_loopback(address) or address in addresses.values()]
    chosen = here[0] if here else ""
    if chosen and not is_loopback(chosen):
        return ok("interface", f"gloo listens on {_with_interface(chosen, addresses)}, the address of {host}; {route}")
    meaning = f"{host} is {chosen}" if chosen else f"{host} is no address of this host"
    if nodes > 1:
        return _loopback(meaning, addresses)
    return ok("interface", f"gloo listens on loopback ({meaning}): fine on one node; {route}")


def _loopback(meaning: str, addresses: Mapping[str, str]) -> CheckResult:
    use = next((name for name, address in addresses.items() if not is_loopback(address)), "eth0")
    return warn(
        "interface",
        f"{meaning}: gloo will listen on loopback, where no other node reaches it",
        f"export GLOO_SOCKET_IFNAME={use}, or mend the host's name in /etc/hosts",
    )


def _with_interface(address: str, addresses: Mapping[str, str]) -> str:
    if is_loopback(address):
        return f"lo ({address})"
    return next((f"{name} ({address})" for name, own in addresses.items() if own == address), address)


def _addresses(connection: socket.socket) -> dict[str, str]:
    """The address of each interface that has one, IPv4 before IPv6."""
    found = {}
    for _, name in socket.if_nameindex():
        with suppress(OSError, ImportError):
            import fcntl

            request = struct.pack("256s", name.encode()[:15])
            found[name] = socket.inet_ntoa(fcntl.ioctl(connection.fileno(), _SIOCGIFADDR, request)[20:24])
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            found.setdefault(name, str(ipaddress.IPv6Address(int(digits, 16))))
    return found
