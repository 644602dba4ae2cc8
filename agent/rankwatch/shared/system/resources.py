"""Whether this process has the descriptors, memory and threads that ZeroMQ needs: without them its library ends the process."""

from __future__ import annotations

import mmap
import os
import threading
from contextlib import suppress

DESCRIPTORS = 24
"""Of a context, a socket with its monitor, and a new connection beside an old one."""

MEMORY = 256 << 20
"""Bytes of address space: of the stacks and heaps of the threads, and of the modules that are imported."""

THREADS = 16
"""Of a collector, or a link, and of ZeroMQ."""


def lack(descriptors: int = DESCRIPTORS) -> str:
    """What this process lacks, in words; empty: nothing."""
    opened: list[int] = []
    try:
        for _ in range(descriptors):
            opened.append(os.open("/", os.O_RDONLY | os.O_CLOEXEC))  # noqa: PERF401  those opened so far must be closed
    except OSError as error:
        return f"fewer than {descriptors} file descriptors are left ({error.strerror}; see `ulimit -n`)"
    finally:
        for descriptor in opened:
            with suppress(OSError):
                os.close(descriptor)
    try:
        mmap.mmap(-1, MEMORY).close()
    except (OSError, MemoryError, ValueError) as error:
        return f"less than {MEMORY >> 20} MiB of memory is left ({error}; see `ulimit -v`)"
    is_over = threading.Event()
    started: list[threading.Thread] = []
    try:
        for _ in range(THREADS):
            thread = threading.Thread(target=is_over.wait, name="rankwatch-room", daemon=True)
            thread.start()
            started.append(thread)
    except (RuntimeError, MemoryError) as error:
        return f"fewer than {THREADS} threads can be started ({error}; see `ulimit -u`)"
    finally:
        is_over.set()
        for thread in started:
            thread.join()
    return ""
