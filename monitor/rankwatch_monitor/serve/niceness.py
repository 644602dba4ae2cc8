"""Which of the collector's threads runs first where they share a core: the decoder and the writer come after the others.

The steps are small. A thread that is put off may hold the interpreter, and then the deciding thread waits with it: with five
busy processes a core, at niceness 2, 4 and 6 (the deciding thread's, the decoder's, the writer's) an abort took twice as long.
"""

from __future__ import annotations

import os
from contextlib import suppress

DECODING, RECORDING = 1, 2
"""The niceness of these threads, on top of that of all others."""

SWITCH_INTERVAL = 0.0005
"""Seconds after which a waiting thread demands the interpreter: the deciding thread from the writer, when a message has come."""


def yield_to_others(niceness: int) -> None:
    """Adds to the niceness of the calling thread (on Linux; elsewhere of the process). Does nothing where that is forbidden."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) + niceness)
