"""What torch and the user's code call: an error of ours switches it off, and never stops a healthy training."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from functools import wraps
from threading import get_ident
from typing import Any

from torch import nn

from ..errors import TrainingAborted
from ..judge.lifecycle import Life
from ..judge.pace.hook_time import Laps
from ..judge.reporter import Reporter
from ..rerun.careful import is_run_again
from ..touch.stack import outwards

log = logging.getLogger(__name__)

MAX_WAIT = 1.0
"""Seconds for which a hook waits for another thread's to end. Then it does nothing."""


class FailsOpen:
    """Makes the hooks of a detector.

    Args:
        stop: see ``watch``.
        reporter: is told of the first error.
        life: the batches, of which one runs.
        root: the watched module. A thread that runs its forward again may wait for other threads; it changes no batch.
    """

    def __init__(
        self,
        stop: Callable[[TrainingAborted], None] | None,
        reporter: Reporter,
        life: Life,
        root: nn.Module,
    ) -> None:
        self.abort: Callable[[], TrainingAborted | None] | None = None
        """Stops the training: the next hook for which it returns an exception raises that."""
        self.fault = ""
        """The internal error that switched the detector off."""
        self.is_off = False
        self.laps: Laps | None = None
        """Takes the time in hooks; None: nobody wants to know it."""
        self.is_stopping = False
        """Whether the training was asked to stop by its own means."""
        self._stop = stop
        self._reporter = reporter
        self._life = life
        self._root = root
        self._inside = get_ident()
        """The thread that runs a hook; before the first one, the thread that makes the detector, until all of it is there."""

    def open(self) -> None:
        """All of the detector is there: any thread may run hooks."""
        self._inside = 0

    def close(self) -> None:
        """The watch ends: hooks do nothing any more, and a trip that is found now is raised."""
        self.is_off, self._stop = True, None

    def hook(self, body: Callable[..., Any]) -> Callable[..., Any]:
        """``body`` as a hook: it raises a pending abort first, and does nothing once the detector is off."""
        return self.guarded(body, obeys=True)

    def guarded(self, body: Callable[..., Any], obeys: bool = False) -> Callable[..., Any]:
        """``body``, but an error in it only switches the detector off. ``obeys``: as ``hook``; one call less per frame.

        Another thread may call the model at any moment: in all hooks there is one thread at a time. This is no lock, which an
        interruption could leave locked; between the last look at ``_inside`` and its change, no other thread gets its turn.
        """

        @wraps(body)
        def hook(*args: Any) -> Any:
            here, laps = get_ident(), self.laps
            while (before := self._inside) and before != here and not is_run_again(self._root):
                if not self._await_turn():
                    return None
            try:
                self._inside = here
                if laps is not None and not before:
                    laps.enter()
                if obeys:
                    if self.abort is not None and (aborted := self.abort()) is not None:
                        raise aborted
                    if self.is_off:
                        return None
                return body(*args)
            except TrainingAborted as error:
                if self._stop is None:
                    raise
                self._ask_to_stop(self._stop, error)
            except Exception as error:
                log.exception("rankwatch: %s", self._switch_off(error))
            finally:
                if laps is not None and not before:
                    laps.leave()
                self._inside = before
            return None

        return hook

    def _await_turn(self) -> bool:
        """Waits until no other thread runs a hook; returns False if that may take long. It polls: see ``guarded``."""
        until = time.monotonic() + MAX_WAIT
        while (inside := self._inside) and not is_run_again(self._root):
            if time.monotonic() <= until:
                time.sleep(0.0001)
            elif _runs_hook(inside):
                return False
            else:  # an interruption, or a fork, has ended it before it could say so
                self._inside = 0
        return True

    def _switch_off(self, error: Exception) -> str:
        """Returns what happened, in words; the collector is told of the first error."""
        self.is_off, is_first = True, not self.fault
        self.fault = f"switched itself off in batch {self._life.position.batch} by an error of its own: {error!r}"
        if is_first:
            self._reporter.on_fault(self.fault)
        return self.fault

    def _ask_to_stop(self, stop: Callable[[TrainingAborted], None], error: TrainingAborted) -> None:
        """Asks the training to stop by its own means. That may take until its step ends; nothing is judged till then."""
        if not self.is_stopping:
            self.is_off = self.is_stopping = True
            stop(error)


def _runs_hook(thread: int) -> bool:
    frames = outwards(sys._current_frames().get(thread))
    return any((frame.f_code.co_name, frame.f_code.co_filename) == ("hook", __file__) for frame in frames)
