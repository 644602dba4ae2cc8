"""Processes of this machine, from /proc. A number is used again for another process; a number with its start is not."""

from __future__ import annotations

import os
import time
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

ENDED = frozenset("ZXx")
"""States of a process that has ended and still has its number."""


class Stat(NamedTuple):
    """``started_at``: in clock ticks since the machine's start."""

    state: str
    started_at: int


def stat_of(pid: int) -> Stat | None:
    """None: there is no such process, or it is hidden."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().decode(errors="replace").rpartition(")")[2].split()
        return Stat(fields[0], int(fields[19]))
    except (OSError, ValueError, IndexError):
        return None


def started_at(pid: int) -> int | None:
    """When a process started, in clock ticks since the machine's; None: no such process runs."""
    stat = stat_of(pid)
    return None if stat is None or stat.state in ENDED else stat.started_at


def age() -> float:
    """Seconds since this process started; an exec does not start a process. 0 where it is unknown."""
    ticks = started_at(os.getpid())
    if ticks is None:
        return 0.0
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


def resident() -> int:
    """Bytes of memory that this process takes; 0 where it is unknown."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


@lru_cache(maxsize=1)
def boot_id() -> str:
    """What tells this start of this machine from any other; empty where it is unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


@lru_cache(maxsize=1)
def machine() -> str:
    """The running kernel and the space of process numbers; empty where it is unknown."""
    try:
        return f"{boot_id()} {os.readlink('/proc/self/ns/pid')}" if boot_id() else ""
    except OSError:
        return ""
