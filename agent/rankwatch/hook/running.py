"""Which thread runs the root's forward, and how deep the root's calls are nested."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from ..rerun.careful import is_run_again, stop_again
from . import backward


class RunningRoots:
    """The root forwards that are running now, all in one thread: more than one if the root calls itself.

    A root forward in a second thread at the same time is not watched.
    """

    def __init__(self, root: nn.Module) -> None:
        self.depth = 0
        self._root = root
        self._unwatched: set[int] = set()
        """The threads whose root forward is not watched."""
        self._thread = 0
        self._is_judging = False
        """Whether the outermost one has returned, and its batch is being judged."""
        self._lock = threading.Lock()
        self._raised_before: BaseException | None = None

    def enter(self) -> bool | None:
        """A root forward begins. Returns whether it is the outermost one; None if another thread's is running."""
        with self._lock:
            self._unwatched.discard(threading.get_ident())
            if self._is_taken():
                self._unwatched.add(threading.get_ident())
                return None
            self._take()
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

    @contextmanager
    def leaving(self) -> Iterator[bool]:
        """A root forward ends; yields whether it was the outermost one. Until its batch is judged, no other thread is watched."""
        self._is_judging = self.depth == 1  # before the depth falls: another thread may look at any moment
        try:
            yield self.leave()
        finally:
            self._is_judging = False

    def leave_unwatched(self) -> bool:
        """A root forward ends. Returns whether it is one that was not watched."""
        was_unwatched = threading.get_ident() in self._unwatched
        self._unwatched.discard(threading.get_ident())
        return was_unwatched

    def is_here(self) -> bool:
        """Whether a root forward is running in the calling thread."""
        return bool(self.depth) and self._thread == threading.get_ident()

    def is_watched(self) -> bool:
        """Whether the calling thread is the watched one, or runs a backward."""
        return self._thread == threading.get_ident() or backward.is_running()

    def is_elsewhere(self) -> bool:
        """Whether a root forward is running in another thread. If not, the calling thread becomes the watched one."""
        if threading.get_ident() in self._unwatched:
            return True
        if self._is_taken():
            stop_again(self._root)  # no mode sees this thread
            return True
        self._take()
        return False

    def _is_taken(self) -> bool:
        """Whether a root forward is running in another thread, is judged there, or is run again after a trip."""
        if threading.get_ident() == self._thread or backward.is_running():
            return False  # a backward runs in a thread of torch's, while the watched thread waits for it
        return self.depth > 0 or self._is_judging or is_run_again(self._root)

    def _take(self) -> None:
        if not backward.is_running():
            self._thread = threading.get_ident()

    def is_recomputing(self) -> bool:
        """Whether a forward that runs now is a checkpoint's recomputation."""
        return not self.depth and backward.is_running()

    def is_raising(self) -> bool:
        """Whether an exception is being handled that came after the outermost forward began."""
        return sys.exc_info()[1] is not self._raised_before
