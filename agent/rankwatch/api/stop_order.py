"""The order to stop, as it came from the collector: what this rank raises, and until when it may take."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import OverflowDetected, TrainingAborted
from ..tell.abort import write_error_file
from ..tell.deadline import Deadline
from .registry import is_process_ending

if TYPE_CHECKING:  # imported with the first connection: without a collector, no zmq is needed
    from ..shared.types.messages import Abort


class StopOrder:
    """Whether and why the collector stops this rank. Its methods are for any thread.

    Args:
        name: the rank's name, for what is printed.
    """

    def __init__(self, name: str, rank: int) -> None:
        self.abort: Abort | None = None
        self.is_raised = False
        """Whether the training thread was given the exception."""
        self._name = name
        self._rank = rank
        self._deadline: Deadline | None = None
        self._is_lifted = False

    def take(self, abort: Abort, looks_closer: float) -> bool:
        """The collector stops the run. Returns whether this rank is to stop: not once the training is over.

        ``looks_closer``: seconds that the close-up of this rank's trip may still take.
        """
        if self._is_lifted:
            return False
        self.abort = abort
        grace = abort.grace + (looks_closer if self.has_tripped else 0.0)
        self._deadline = Deadline(f"{self._name}: {abort.reason}", grace, abort.hold_limit)
        return True

    def start(self) -> None:
        """The hooks know: from now on the time runs."""
        if self._deadline is not None:
            self._deadline.start()
        self.write_error_file()
        if self._is_lifted:  # meanwhile
            self.lift()

    def wait_for_others(self, seconds: float) -> None:
        """Other ranks hold work, or have yet to close, for which this one's end waits."""
        if self._deadline is not None:
            self._deadline.wait_for_others(seconds, is_news=not self._is_lifted)

    def lift(self) -> None:
        """The training is in the user's hands again: whatever it does now, no deadline ends it."""
        self._is_lifted = True
        if self._deadline is not None and not is_process_ending():
            self._deadline.cancel()

    @property
    def is_held(self) -> bool:
        """Whether the user's code holds the end of the training up."""
        return self._deadline is not None and self._deadline.is_held

    @property
    def reason(self) -> str:
        """The reason in the collector's ABORT; empty before one came."""
        return self.abort.reason if self.abort is not None else ""

    @property
    def is_culprit(self) -> bool:
        return self.abort is not None and self.abort.rank == self._rank

    @property
    def has_tripped(self) -> bool:
        """Whether this rank is the culprit by what it computed, and not by a weight in which replicas differ."""
        return self.is_culprit and self.abort is not None and self.abort.time > 0

    def exception(self, report: str) -> TrainingAborted:
        """What this rank raises. ``report``: the folder of the run's report; empty: it is not known."""
        self.is_raised = True
        kind, abort = OverflowDetected if self.has_tripped else TrainingAborted, self.abort
        if abort is None or not abort.cause:
            return kind(self.reason, report=report or None)
        rank = abort.rank if abort.rank >= 0 else None
        return kind(self.reason, rank=rank, batch=abort.batch, module=abort.module, cause=abort.cause, report=report or None)

    def write_error_file(self) -> None:
        if self.abort is not None:
            write_error_file(self.reason, self.abort.time, is_culprit=self.is_culprit)
