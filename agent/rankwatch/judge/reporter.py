"""What a watch reports: parts of batches, notices, and a trip with its close-up."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from torch import nn

from ..errors import TrainingAborted
from ..measure.modules import NamedModule
from ..rerun.capsule.capsule import CapsuleRules, CapsuleWritten, write
from ..rerun.close_up_runs import Subject, look_closer
from ..rerun.forward import Forward
from ..shared.types.closeup import CloseUp
from ..shared.types.fingerprint import Fingerprint, FingerprintTable
from ..shared.types.frame import BatchSummary, Frame, FrameTable
from ..shared.types.messages import Counts
from ..shared.types.notice import Notice
from ..shared.types.trip import Trip
from .batch import BatchPart, PartState, Tables
from .health import Health
from .pace.full_batches import FullBatches


class BadReading(NamedTuple):
    """A reading that trips, with its numbers of nans and infs (0 and 0: the tensor no longer existed)."""

    label: str
    nans: int
    infs: int


class Reporter(Protocol):
    """Receives batches, notices and trips, in the training thread, and reports them.

    For a trip, ``on_found`` is called first, before anything that shows this rank at a later position; ``on_closeup`` when
    the close-up is done, which ends early if it is not ``is_wanted`` any more, and writes a capsule by ``capsule_rules``.
    Then ``on_trip`` returns the exception that is raised in the training. Of a step that was left out, ``on_left_out`` is called
    in its place. ``on_limit`` returns the one that ends it after
    ``abort_after_batch_num``. ``calls``: what it has to tell of the collectives of this process, as they are now, with the batch
    whose part ends. ``on_fault`` is told of the error of ours that switched the detector off.
    """

    def calls(self) -> Counts: ...
    def on_batch(self, table: FrameTable, summary: BatchSummary, calls: Counts) -> None: ...
    def on_notice(self, notice: Notice) -> None: ...
    def on_trace(self, frames: list[Frame]) -> None: ...
    def on_found(self, trip: Trip) -> None: ...
    def is_wanted(self) -> bool: ...
    def capsule_rules(self) -> CapsuleRules | None: ...
    def on_closeup(self, closeup: CloseUp) -> None: ...
    def on_left_out(self, trip: Trip) -> None: ...
    def on_trip(self, trip: Trip, bad_readings: list[BadReading]) -> TrainingAborted: ...
    def on_fingerprint(self, table: FingerprintTable, fingerprint: Fingerprint) -> None: ...
    def on_limit(self, batch: int) -> TrainingAborted: ...
    def on_fault(self, fault: str) -> None: ...


class Sender:
    """Gives the parts of batches to the reporter, with what is noticed of them."""

    def __init__(self, reporter: Reporter, full: FullBatches) -> None:
        self._reporter = reporter
        self._full = full
        self._tables = Tables()
        self._health = Health()

    def table_of(self, part: BatchPart) -> tuple[FrameTable, BatchSummary]:
        return part.finish(self._tables)

    def trace(self, part: BatchPart) -> None:
        """Prints a part that is complete: its forward's with the loss."""
        if part.batch.traced and part.frames and part.loss_of is None:
            self._reporter.on_trace([frame.measured() for frame in part.frames])

    def send(self, part: BatchPart) -> None:
        if part.state is PartState.JUDGED:
            self.trace(part)
        part.move(PartState.SENT)
        if part.frames and part.batch.is_streamed and not part.is_cut:
            self._reporter.on_batch(*self.table_of(part), part.calls)
            for notice in self._health.look(part):
                self._full.notice(notice)
                self._reporter.on_notice(notice)


class FoundTrip(NamedTuple):
    trip: Trip
    bad_readings: list[BadReading]
    subject: Subject
    """What the close-up looks at."""


def closeup_of(found: FoundTrip, reporter: Reporter, modules: Iterable[NamedModule]) -> CloseUp | None:
    """Runs what tripped again. None: no close-up was announced."""
    if not found.trip.has_closeup:
        return None
    names = {id(named.module): named.names[0] for named in modules}
    rules, subject = reporter.capsule_rules(), found.subject

    def name(module: nn.Module) -> str:
        return names.get(id(module), "")

    def keep(forward: Forward, until: float) -> CapsuleWritten:
        assert rules is not None
        return write(
            rules,
            forward,
            found.trip,
            name=name(forward.module),
            output=subject.output,
            gradients=subject.again.gradients if subject.again is not None else (),
            until=until,
        )

    within = found.trip.closeup_within
    return look_closer(subject, within, reporter.is_wanted, name, keep if rules is not None else None)
