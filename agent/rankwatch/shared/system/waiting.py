"""What another process is doing, as /proc tells, and where it is in Python, as ``py-spy`` tells where that is installed."""

from __future__ import annotations

import json
import os
import platform
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from .process import stat_of

_STATES = {"R": "runs", "D": "waits for a disk or a file system", "T": "is stopped", "t": "is stopped by a debugger"}
_CALLS = {
    "x86_64": {"reading": (0, 17, 19, 295), "writing": (1, 18, 20), "receiving from": (45, 47)},
    "aarch64": {"reading": (63, 65, 67, 69), "writing": (64, 66, 68), "receiving from": (207, 212)},
}
_FILE_CALLS = {number: how for how, numbers in _CALLS.get(platform.machine(), {}).items() for number in numbers}
"""Calls of the system, by their numbers, whose first argument is an open file."""

MOST_FILES = 2

INNERMOST = 8
"""Frames of a stack."""


class PythonFrame(NamedTuple):
    file: str
    line: int
    name: str


def doing(pid: int) -> str:
    """``sleeps in pipe_read, reading /data/part-7``, as far as /proc tells."""
    found = stat_of(pid)
    if found is None or found.state in "ZXx":
        return "has ended"
    where = _text(pid, "wchan")
    what = _STATES.get(found.state, "sleeps") + (f" in {where}" if where not in ("", "0") else "")
    return ", ".join(filter(None, (what, _open_file(pid))))


def python_stack(pid: int, within: float) -> list[PythonFrame]:
    """The frames of its main thread, the innermost first; empty: ``py-spy`` is not here, may not look, or is too slow.

    Args:
        within: seconds.
    """
    spy = shutil.which("py-spy") or shutil.which("py-spy", path=os.path.dirname(sys.executable))
    if spy is None:
        return []
    command = [spy, "dump", "--json", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=within, check=True)
        thread = next(one for one in json.loads(done.stdout) if one.get("os_thread_id", pid) == pid)
        return [PythonFrame(one["filename"], int(one["line"]), one["name"]) for one in thread["frames"][:INNERMOST]]
    except (OSError, subprocess.SubprocessError, ValueError, LookupError, TypeError, StopIteration):
        return []


def _text(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(encoding="ascii", errors="replace").strip()
    except OSError:  # not allowed, or the process has ended
        return ""


def _open_file(pid: int) -> str:
    """The file that it reads now; else those that it has opened itself."""
    call = _text(pid, "syscall").split()
    if len(call) > 1 and call[0].isdigit() and (how := _FILE_CALLS.get(int(call[0]))) is not None:
        return f"{how} {_target(pid, int(call[1], 16))}"
    own = set(_files(os.getpid()))
    files = [file for file in _files(pid) if file not in own][-MOST_FILES:]
    return f"has open {', '.join(files)}" if files else ""


def _target(pid: int, descriptor: int | str) -> str:
    try:
        return os.readlink(f"/proc/{pid}/fd/{descriptor}")
    except OSError:
        return f"descriptor {descriptor}"


def _files(pid: int) -> list[str]:
    """The regular files and FIFOs that a process has open."""
    found = []
    try:
        for number in sorted(map(int, os.listdir(f"/proc/{pid}/fd"))):
            path = _target(pid, number)
            if path.startswith("/") and not path.startswith(("/dev/", "/memfd:", "/proc/")):
                mode = os.stat(f"/proc/{pid}/fd/{number}").st_mode
                found += [path] if stat.S_ISREG(mode) or stat.S_ISFIFO(mode) else []
    except (OSError, ValueError):  # not allowed, or the process has ended
        pass
    return found
