"""Which thread runs the root's forward, how deep the root's calls are nested, and whether one was interrupted."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch
from torch import nn

from ..errors import TrainingAborted
from ..judge.events import Feed, Interrupted, RootsOver
from ..rerun.careful import is_run_again, stop_again
from . import backward

log = logging.getLogger(__name__)

CALL = "_call_impl"
"""The function of ``nn.Module`` that calls hooks and the forward: it is on the stack while the forward runs."""

LOOKED_AT = 256
"""After this many calls of modules, it is looked whether the forward still runs: no further one may ever begin."""

_AT_ONCE = (
    "a forward of the model runs while another thread's runs: such forwards are not watched. Call the model in one thread at a "
    "time, or watch a model for each thread"
)
_CAPTURED = "a forward of the model is captured into a CUDA graph: the graph is not watched"


def is_capturing() -> bool:
    """Whether the calling thread captures a CUDA graph: it must not wait for the device, and our work must not be in it."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class RunningRoots:
    """The root forwards that are running now, all in one thread: more than one if the root calls itself.

    A root forward in a second thread at the same time is not watched, which is said once.

    Args:
        feed: tells ``RootsOver`` when the outermost forward has ended, before anything else; ``Interrupted`` when a forward has
            ended without a call of its last hook. torch calls no hook after a KeyboardInterrupt, a SystemExit and the like,
            so only the stack shows this.
    """

    def __init__(self, root: nn.Module, feed: Feed) -> None:
        self.depth = 0
        self.has_device = False
        """Whether CUDA was in use as a root forward began."""
        self._holds_steps = self._is_in_step = False
        """Whether an optimizer of the model has stepped inside of a call of the root, and whether such a call runs."""
        self._root = root
        self._feed = feed
        self._is_on_stack = False
        """Whether the stack showed the outermost one as it began: not in a compiled graph."""
        self._unwatched: set[int] = set()
        """The threads whose root forward is not watched."""
        self._said: set[str] = set()
        self._thread = 0
        self._seen = 0
        self._is_judging = False
        """Whether the outermost one has returned, and its batch is being judged."""
        self._lock = threading.Lock()
        self._raised_before: BaseException | None = None

    def enter(self, *, is_compiled: bool = False) -> bool | None:
        """A root forward begins. Returns whether it is the outermost one; None if another thread's is running.

        ``is_compiled``: a compiled graph begins it.
        """
        if self.depth or self._is_judging:
            self.recover(begun=not is_compiled)
        self.has_device = torch.cuda.is_initialized()
        with self._lock:
            self._unwatched.discard(threading.get_ident())
            is_captured = is_capturing()
            if is_taken := is_captured or self._is_taken():
                self._unwatched.add(threading.get_ident())
            else:
                self._take()
                self.depth += 1
        if is_taken:
            self._say(_CAPTURED if is_captured else _AT_ONCE)
            return None
        if self.depth > 1:
            return False
        self._is_on_stack = next(self._calls(sys._getframe(1)), None) is not None
        self._raised_before = sys.exc_info()[1]
        return True

    def leave(self) -> bool:
        """A root forward ends. Returns whether it was the outermost one."""
        was_outermost = self.depth == 1
        self.depth = max(0, self.depth - 1)
        if was_outermost:
            self._raised_before = None  # it has the frames of what raised it, and their tensors
            self._feed.tell(RootsOver())
        return was_outermost

    def enter_step(self) -> bool:
        """A call of the root begins. Returns whether it is a step of the training: forwards, backward and optimizer are in it."""
        is_step = self._holds_steps and not self.depth and not self._is_in_step
        self._is_in_step |= is_step
        return is_step

    def leave_step(self) -> bool:
        """A call of the root ends. Returns whether it is such a step."""
        was_step = self._is_in_step and not self.depth
        self._is_in_step &= not was_step
        return was_step

    def find_step(self, *, is_sure: bool) -> None:
        """A backward begins, or an optimizer of the model steps, which ``is_sure``: a call of the root that runs is a step."""
        if self.is_here():
            self._is_in_step = True
            self._end()
        self._holds_steps |= self._is_in_step and is_sure

    def recover(self, *, begun: bool = False) -> None:
        """Ends a forward that was interrupted. ``begun``: a further forward of the root has begun in the calling thread."""
        with self._lock:
            if not (self.depth or self._is_judging) or not self._was_interrupted(begun):
                return
            self._thread = threading.get_ident()
        self._end()

    def _end(self) -> None:
        self.depth, self._is_judging, self._raised_before = 0, True, None
        try:
            self._feed.tell(RootsOver())
            self._feed.tell(Interrupted())
        finally:
            self._is_judging = False

    def is_captured(self) -> bool:
        """Whether the calling thread captures a part of the model, which is said once."""
        is_captured = is_capturing()
        if is_captured:
            self._say(_CAPTURED)
        return is_captured

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

    def is_own(self) -> bool:
        """Whether the calling thread is the watched one: no other may read gradients, which a backward in C++ may replace."""
        return self._thread == threading.get_ident()

    def is_elsewhere(self) -> bool:
        """Whether a root forward is running in another thread. If not, the calling thread becomes the watched one."""
        self._seen += 1
        if self.depth and self._seen % LOOKED_AT == 0:
            self.recover()
        here = threading.get_ident()
        if here == self._thread and not self._unwatched:
            return False
        if here in self._unwatched:
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

    def _was_interrupted(self, begun: bool) -> bool:
        """Whether the thread that ran the outermost forward runs it no more."""
        if self._thread == threading.get_ident():
            calls = self._calls(sys._getframe(1))
            if begun:  # if the stack does not show what has begun, it tells nothing
                return next(calls, None) is not None and next(calls, None) is None
        elif (frame := sys._current_frames().get(self._thread)) is None:  # the thread has ended
            return True
        else:
            calls = self._calls(frame)
        return self._is_on_stack and next(calls, None) is None

    def _calls(self, frame: FrameType | None) -> Iterator[nn.Module]:
        """The calls of the root, or of a copy of it by ``DataParallel``, on a stack; the innermost one first."""
        while frame is not None:
            if frame.f_code.co_name == CALL:
                module = frame.f_locals.get("self")
                if module is self._root or (type(module) is type(self._root) and getattr(module, "_is_replica", False)):
                    yield module
            frame = frame.f_back

    def _say(self, what: str) -> None:
        if what not in self._said:
            self._said.add(what)
            log.warning("rankwatch: in %s, %s", threading.current_thread().name, what)

    def is_recomputing(self) -> bool:
        """Whether a forward that runs now is a checkpoint's recomputation."""
        return not self.depth and backward.is_running()

    def is_raising(self) -> bool:
        """Whether an exception is being handled that came after the outermost forward began."""
        return sys.exc_info()[1] is not self._raised_before

    @staticmethod
    def may_follow() -> bool:
        """Whether an exception is being handled that may follow from an inf or nan."""
        error = sys.exc_info()[1]
        others = TrainingAborted, MemoryError, torch.cuda.OutOfMemoryError
        return isinstance(error, Exception) and not isinstance(error, others)
