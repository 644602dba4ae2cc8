"""Which of the collector's threads goes first where they share a core: ZeroMQ's, then the decisions, then the disk.

What waits in a socket may be a trip. The steps are small: on a busy node a collector is to be hardly worse off than others.
"""

from __future__ import annotations

import os
from contextlib import suppress

DECIDING, RECORDING = 2, 6
"""How much nicer these threads are than ZeroMQ's."""

SWITCH_INTERVAL = 0.0005
"""Seconds after which the thread that holds the interpreter is asked for it: the recorder, when a message has come."""


def yield_to_others(niceness: int) -> None:
    """Makes the calling thread, on Linux it alone, so much nicer. Where that is forbidden nothing changes."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) + niceness)
