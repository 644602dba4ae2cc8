"""What a watch reports of its detector: to the collector, or, without one, on the terminal."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import BatchLimitReached, OverflowDetected, TrainingAborted
from ..judge.reporter import BadReading
from ..rerun.capsule.capsule import CapsuleRules
from ..shared.printable import cleaned
from ..shared.system.identity import Identity
from ..shared.system.on_terminal import as_shown
from ..shared.types.closeup import CloseUp
from ..shared.types.config import Capsule, Config
from ..shared.types.fingerprint import Fingerprint, FingerprintTable
from ..shared.types.frame import BatchSummary, Frame, FrameTable
from ..shared.types.messages import Counts
from ..shared.types.notice import Notice
from ..shared.types.trip import Cause, Trip
from ..shared.words.cause import advise, classify
from ..shared.words.closeup_text import fields_of, replay_fields
from ..shared.words.divergence import OwnLosses
from ..shared.words.scalars import LastBatch
from ..shared.words.text import describe_culprit, describe_trip, format_dump, format_head, format_trace
from ..tell.abort import write_error_file
from .detect_overflow import emit
from .link_owner import distributed_group
from .pattern_check import PatternCheck
from .stop_order import StopOrder

if TYPE_CHECKING:  # imported with the first connection: without a collector, no zmq is needed
    from ..tell.link import Link

log = logging.getLogger(__name__)


class Reports:
    """The ``Reporter`` of a watch. ``link`` leads to the collector; None: there is none.

    Args:
        name: the rank's name, for what is printed.
        parent: the process id of the rank, if this is a child of it.
    """

    link: Link | None = None
    watch: object = None
    """The watch itself. The hooks of the model lead here: so it lives as long as its model, if nobody else holds it."""

    def __init__(
        self, config: Config, identity: Identity, name: str, parent: int | None, patterns: PatternCheck, order: StopOrder
    ) -> None:
        self.last = LastBatch()
        self.closeup: CloseUp | None = None
        self.has_reported = False
        self._config = config
        self._identity = identity
        self._name = name
        self._parent = parent
        self._patterns = patterns
        self._order = order
        self._losses = OwnLosses()
        self._has_compared = False

    @property
    def folder(self) -> str:
        """The run's folder on the collector's host; empty: it is not known."""
        return self.link.folder if self.link is not None else ""

    def calls(self) -> Counts:
        return self.link.calls.news() if self.link is not None else ()

    def on_batch(self, table: FrameTable, summary: BatchSummary, calls: Counts) -> None:
        self.last.add(table, summary)
        self._losses.take(table, summary)
        self._patterns.take(table, summary)
        self._compare_ranks()
        if self.link is not None:
            self.link.send_batch(table, summary, calls)

    def on_notice(self, notice: Notice) -> None:
        if self.link is not None:
            self.link.send_notice(notice)

    def on_fingerprint(self, table: FingerprintTable, fingerprint: Fingerprint) -> None:
        if self.link is not None:
            self.link.send_fingerprint(table, fingerprint)

    def on_trace(self, frames: list[Frame]) -> None:
        emit(self.heading() + format_trace(cleaned(frames)) + "\n")

    def on_found(self, trip: Trip) -> None:
        self._compare_ranks()
        if self.link is not None:
            self.link.send_trip(trip)

    def is_wanted(self) -> bool:
        """Whether the close-up may be shown: not when the verdict names another rank."""
        return not self._order.reason or self._order.is_culprit

    def capsule_rules(self) -> CapsuleRules | None:
        config = self._config
        if config.capsule is Capsule.OFF:
            return None
        return CapsuleRules(
            self._capsule_folder(), self._identity.rank, config.capsule is Capsule.ON, limit=config.capsule_mib << 20
        )

    def _capsule_folder(self) -> Path:
        """In the run's folder, if this host sees it: the collector has its record open there. Else in a folder of our own."""
        folder = self._run_folder()
        if folder is not None:
            return folder / "capsule"
        run = (self.link.run if self.link is not None else "") or f"process-{os.getpid()}"
        here = Path.cwd()
        return (here if os.access(here, os.W_OK) else Path(tempfile.gettempdir())) / "rankwatch-capsules" / run

    def _run_folder(self) -> Path | None:
        is_open = any(Path(self.folder, f"run.db-{beside}").is_file() for beside in ("wal", "journal"))
        return Path(self.folder) if self.folder and is_open else None

    def on_closeup(self, closeup: CloseUp) -> None:
        machine = ", ".join(filter(None, (self._identity.host, closeup.machine)))
        folder = self._run_folder()
        capsule = closeup.capsule.removeprefix(f"{folder}/") if folder is not None else closeup.capsule
        self.closeup = replace(closeup, machine=machine, capsule=capsule)
        if self.link is not None:
            self.link.send_closeup(self.closeup)

    def on_left_out(self, trip: Trip) -> None:
        if self.link is None:  # else the collector tells of it, over all ranks
            trip = cleaned(trip)
            cause, evidence = self._explain(trip)
            log.warning(
                "rankwatch: step %d was left out: %s (%s: %s)",
                *(trip.optimizer_step, describe_culprit(self._name, trip), cause.value, evidence),
            )

    def on_trip(self, trip: Trip, bad_readings: list[BadReading]) -> TrainingAborted:
        if self.link is not None and self.link.wait_for_verdict():
            return self._order.exception(self.folder)
        trip = cleaned(trip)  # the model chooses the names in it
        culprit = describe_culprit(self._name, trip)
        if self.has_reported:  # a loop that catches the exception may trip in each batch
            emit(f"rankwatch: tripped again: {culprit}\n")
        else:
            self.has_reported = True
            self.report_alone(trip, bad_readings)
        write_error_file(culprit, trip.time, is_culprit=True)
        cause, batch, module = self._explain(trip)[0].value, trip.position.batch, trip.frame.spec.module
        return OverflowDetected(culprit, rank=self._identity.rank, batch=batch, module=module, cause=cause)

    def on_limit(self, batch: int) -> TrainingAborted:
        return BatchLimitReached(f"stopped after batch {batch}, as abort_after_batch_num={batch} asked for")

    def on_fault(self, fault: str) -> None:
        if self.link is not None:
            self.link.send_fault(fault)

    def report_alone(self, trip: Trip, bad_readings: list[BadReading]) -> None:
        """Prints a trip if there is no collector, which would print the report."""
        cause, evidence = self._explain(trip)
        closeup = cleaned(self.closeup)
        fields = [
            ("culprit", describe_trip(self._name, trip)),
            *fields_of(f"{cause.value}: {evidence}", trip, closeup),
            ("certainty", f"this rank alone: {self._why_alone()}"),
            ("try", advise(cause, trip, closeup)),
            *replay_fields(closeup),
        ]
        head = format_head(f"first {trip.culprit.state.name.lower()} of this process", fields)
        emit(as_shown(f"{format_dump(trip.frames).rstrip()}\n\n{head}", sys.stdout))

    def _explain(self, trip: Trip) -> tuple[Cause, str]:
        """Of several ranks, one cannot know whether all of them diverged."""
        return self._losses.explain(trip) if self._identity.world_size == 1 else classify(trip)

    def _why_alone(self) -> str:
        if self._parent is not None:
            return f"this is a child of process {self._parent}, which is the rank"
        if self.link is None:
            return "no collector configured"
        return f"the collector refused it: {self.link.complaint}" if self.link.complaint else "no collector in reach"

    def _compare_ranks(self) -> None:
        """Warns, once, if the process group was made after the watch, which sent its rank to the collector before."""
        if self._has_compared:
            return
        self._has_compared = True
        rank, world_size = distributed_group() or (0, 1)
        if world_size > self._identity.world_size == 1:
            log.warning(
                "rankwatch: this is rank %d of %d, and is watched as rank 0 of 1: watch() was called before "
                "init_process_group(), with no RANK in the environment. Call it afterwards, or start the training with torchrun",
                rank,
                world_size,
            )

    def heading(self) -> str:
        return f"\n{self._name}:" if self._identity.world_size > 1 else ""
