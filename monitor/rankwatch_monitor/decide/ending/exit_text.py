"""How a process ended, in words. Pure."""

from __future__ import annotations

import re
import signal

_BY_SOFTWARE = re.compile(r"its process ended with exit code|killed by (?!SIG(?:SEGV|BUS|ILL|FPE)\b)")


def describe_exit(status: int, oom: str = "") -> str:
    """``status``: an exit code, or minus a signal. ``oom``: what the kernel says of memory that ran out; empty: nothing."""
    if status >= 0:
        return f"its process ended with exit code {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:  # of real time, and so without a name
        name = f"signal {-status}"
    return f"killed by {name}" + (f"; the kernel: {oom}" if oom else "")


def is_by_software(how: str) -> bool:
    """Whether a process that ended in these words was ended by its program, by somebody, or for want of memory.

    A broken machine, too, makes an address or an instruction bad.
    """
    return _BY_SOFTWARE.match(how) is not None
