"""How a process ended, in words. Pure."""

from __future__ import annotations

import signal


def describe_exit(status: int, oom: str = "") -> str:
    """``status``: an exit code, or minus a signal. ``oom``: what the kernel says of memory that ran out; empty: nothing."""
    if status >= 0:
        return f"its process ended with exit code {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:  # of real time, and so without a name
        name = f"signal {-status}"
    return f"killed by {name}" + (f"; the kernel: {oom}" if oom else "")
