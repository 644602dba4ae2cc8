"""Whether the kernel killed a process for want of memory: from the kernel's log, or from a count of its control group.

Many a host lets only root read that log, and a container has other process numbers than it. The count is for anybody.
"""

from __future__ import annotations

import ctypes
import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from rankwatch.shared.printable import printable

KERNEL_LOG = Path("/dev/kmsg")

GROUPS = Path("/sys/fs/cgroup")

RECENT = 60.0
"""Seconds: a line that is older speaks of another process, which had the number before."""

LONGEST = 200
"""Characters of the line."""

_READ_ALL, _BUFFER = 3, 1 << 19
"""``SYSLOG_ACTION_READ_ALL``, and how much of the log's end is read."""

_KILLED = re.compile(r"(?:<\d+>)?(?:\[ *(\d+\.\d+)\] *|\d+,\d+,(\d+),[^;]*;)?(.*?[Kk]illed process (\d+) \(.*)")


def kernel_line(pid: int) -> str:
    """The line in the kernel's log by which it killed this process just now; empty where there is none, or none may be read."""
    for read in (_by_call, _by_file):
        with suppress(OSError, AttributeError):
            return find_killed(read(), pid, time.clock_gettime(time.CLOCK_MONOTONIC))
    return ""


def find_killed(log: str, pid: int, now: float) -> str:
    """The last line of a log, as of ``dmesg`` or ``/dev/kmsg``, by which this process was killed. ``now``: since the boot."""
    for line in reversed(log.splitlines()):
        found = _KILLED.match(line)
        if found is None or int(found[4]) != pid:
            continue
        at = float(found[1]) if found[1] else int(found[2]) / 1e6 if found[2] else now
        return printable(found[3].partition(", UID:")[0], LONGEST) if now - at <= RECENT else ""
    return ""


class OomCounter:
    """The processes of a process's control group that the kernel killed for want of memory, from now on."""

    def __init__(self, pid: int) -> None:
        self._file: Path | None
        self._file, self._group = next(_files(pid), (None, ""))
        self._before = self._count()

    def look(self) -> str:
        """What to say of it; empty: the kernel killed none."""
        return f"its control group {self._group} ran out of memory" if self._count() > self._before else ""

    def _count(self) -> int:
        with suppress(OSError):
            if self._file is not None and (found := re.search(r"^oom_kill (\d+)$", self._file.read_text(), re.MULTILINE)):
                return int(found[1])
        return 0


def _files(pid: int) -> Iterator[tuple[Path, str]]:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            version = {"": ("", "unified"), "memory": ("memory",)}.get(controllers, ())
            name = "memory.oom_control" if controllers else "memory.events"
            for folder in version:
                file = GROUPS / folder / group.lstrip("/") / name
                if file.is_file():
                    yield file, printable(group)


def _by_call() -> str:
    """As ``dmesg`` does by default."""
    library = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(_BUFFER)
    size = library.klogctl(_READ_ALL, buffer, _BUFFER)
    if size < 0:
        raise OSError(ctypes.get_errno(), "no kernel log")
    return buffer.raw[:size].decode(errors="replace")


def _by_file() -> str:
    lines = []
    descriptor = os.open(KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK)
    try:
        while True:
            lines.append(os.read(descriptor, 1 << 13).decode(errors="replace").partition("\n")[0])
    except BlockingIOError:
        return "\n".join(lines)
    finally:
        os.close(descriptor)
