"""The root forwards that are running, and the one thread that runs them."""

from __future__ import annotations

import sys
import threading

from . import backward


class RunningRoots:
    """The root forwards that are running now: more than one where the root calls itself, all of them in one thread.

    A root forward in another thread at the same time is not watched.
    """

    def __init__(self) -> None:
        self.depth = 0
        self._thread = 0
        self._lock = threading.Lock()
        self._raised_before: BaseException | None = None

    def enter(self) -> bool | None:
        """A root forward begins. Returns whether it is the outermost one; None if another thread's is running."""
        with self._lock:
            if self.is_elsewhere():
                return None
            self.depth += 1
        if self.depth > 1:
            return False
        self._raised_before = sys.exc_info()[1]
        return True

    def leave(self) -> bool:
        """A root forward ends. Returns whether it was the outermost one."""
        was_outermost = self.depth == 1
        self.depth = max(0, self.depth - 1)
        return was_outermost

    def is_here(self) -> bool:
        """Whether a root forward is running in the calling thread."""
        return bool(self.depth) and self._thread == threading.get_ident()

    def is_elsewhere(self) -> bool:
        """Whether a root forward is running in another thread. If not, the calling thread becomes the one that is watched."""
        current = threading.get_ident()
        if current == self._thread:
            return False
        if backward.is_running():  # in threads of torch's own, while the watched thread waits for them
            return False
        if self.depth:
            return True
        self._thread = current
        return False

    def is_recomputing(self) -> bool:
        """Whether a forward that runs now is a checkpoint's recomputation."""
        return not self.depth and backward.is_running()

    def is_raising(self) -> bool:
        """Whether an exception is under way that was not when the outermost forward began."""
        return sys.exc_info()[1] is not self._raised_before
