"""Which of the collector's threads runs first where they share a core: ZeroMQ's, the deciding one, the decoder's, the disk's.

A message that waits in a socket may be a trip. The steps are small: on a busy node the collector must not fall behind the other
processes.
"""

from __future__ import annotations

import os
from contextlib import suppress

DECIDING, DECODING, RECORDING = 2, 4, 6
"""The niceness of these threads, on top of that of ZeroMQ's thread."""

SWITCH_INTERVAL = 0.0005
"""Seconds after which a waiting thread demands the interpreter: the deciding thread from the writer, when a message has come."""


def yield_to_others(niceness: int) -> None:
    """Adds to the niceness of the calling thread (on Linux; elsewhere of the process). Does nothing where that is forbidden."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) + niceness)
