"""The most memory that a process has had.

Not ``ru_maxrss``: a process inherits it from its parent, and here that is often the larger one.
"""

from __future__ import annotations

from pathlib import Path


def peak_bytes(process: int | str = "self") -> int:
    """What was resident at most since the process has run its program."""
    status = Path(f"/proc/{process}/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])
