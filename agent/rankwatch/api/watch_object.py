"""A watch: a detector and its link to the collector, from the first hook to BYE. ``entry.py`` makes it."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import time
import traceback
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..errors import BatchLimitReached, OverflowDetected, TrainingAborted, UsageError
from ..hook.detector import Detector
from ..hook.ended import EndedDetector
from ..hook.stage import PipelineStage, module_and_stage
from ..judge.reporter import BadReading
from ..measure.modules import unwrap
from ..rerun.capsule.capsule import CapsuleRules
from ..shared.printable import cleaned
from ..shared.system.identity import identify
from ..shared.system.on_terminal import as_shown
from ..shared.types.closeup import CloseUp
from ..shared.types.config import Capsule, Config, is_disabled
from ..shared.types.fingerprint import Fingerprint, FingerprintTable
from ..shared.types.frame import NO_STAGE, BatchSummary, Frame, FrameTable, Moment
from ..shared.types.notice import Notice
from ..shared.types.trip import Cause, Trip
from ..shared.words.cause import advise, classify
from ..shared.words.closeup_text import fields_of, replay_fields
from ..shared.words.divergence import OwnLosses
from ..shared.words.scalars import LastBatch
from ..shared.words.text import describe_culprit, describe_rank, describe_trip, format_dump, format_head, format_trace
from ..tell import rank_process as seat
from ..tell.abort import is_of_the_network, say, words_of, write_error_file
from ..tell.deadline import Deadline
from .detect_overflow import emit
from .link_owner import Speaker, distributed_group, speaker_for
from .pattern_check import PatternCheck
from .registry import forget, is_process_ending, open_watches, remember, want

if TYPE_CHECKING:  # imported with the first connection: without a collector, no zmq is needed
    from ..shared.types import messages
    from ..tell.link import Link

log = logging.getLogger(__name__)


class Watch:
    """A watched model; made by ``watch``. As a context manager, it is closed at the end of the block.

    After a verdict, an exception is raised in the training at the next forward or optimizer step, for a bad loss in its
    backward: ``OverflowDetected`` on the culprit rank, ``TrainingAborted`` on the others.
    """

    _counts_all = False
    _judges_traced = True

    is_automatic = False
    """Whether ``finder`` made it: an explicit watch of the same model replaces it."""

    def __init__(self, model: nn.Module | PipelineStage, config: Config) -> None:
        model, self._stage = module_and_stage(model)
        if isinstance(unwrap(model), torch.jit.ScriptModule):
            raise UsageError("a scripted module takes no hooks: watch the model it was scripted from")
        self._identity = identify(group=distributed_group())
        self._parent = None if config.connection is None else seat.holder(self._identity)
        """The rank's own process, if this is a child of it."""
        if self._parent is not None:
            log.warning(
                "rankwatch: process %d was started by process %d, which is rank %d: it is no rank, and is watched alone",
                *(self._identity.pid, self._parent, self._identity.rank),
            )
            config = replace(config, connection=None)
        who = self._identity
        self._name = describe_rank(who.rank, who.world_size, who.host, who.local_rank, self._stage)
        self._closed = self._is_back = False
        self._abort: messages.Abort | None = None
        self._deadline: Deadline | None = None
        self._closeup: CloseUp | None = None
        self._closeup_seconds = config.closeup
        self._config = config
        self._last, self._losses = LastBatch(), OwnLosses()
        self._has_compared = self._has_reported = False
        first = self._take_over(unwrap(model))
        config = config if first is None else replace(config, first_batch=max(config.first_batch, first.batch + 1))
        self._patterns = PatternCheck(model, config, is_asked=who.rank == 0 and self._stage == NO_STAGE)
        self._speaker: Speaker | None = None
        try:
            self._detector: Detector | EndedDetector = Detector(
                model,
                config if config.connection is not None else replace(config, fingerprints=0),  # nobody would compare them
                self,
                count_all=self._counts_all,
                judge_traced=self._judges_traced,
                sends_at_once=self._stage != NO_STAGE,
            )
            if first is not None and first._speaker is not None:
                self._detector.optimizer_step = first.optimizer_step
                self._speaker, first._speaker = first._speaker, None
                self._speaker.speak_for(self)
            elif config.connection is not None:
                self._speaker = speaker_for(self, model, config.connection, self._identity, self._stage)
        except BaseException:
            if isinstance(detector := vars(self).get("_detector"), Detector):
                detector.remove()
            if first is not None and first._link is not None:
                first._link.close("finished")
            raise
        remember(self)

    @property
    def _link(self) -> Link | None:
        return None if self._speaker is None else self._speaker.link

    @property
    def model_number(self) -> int:
        """The number of the model among those that this process watches: a further model is a run of its own on all ranks."""
        return 0 if self._speaker is None else self._speaker.model

    @property
    def is_connected(self) -> bool:
        """Whether the collector answers now."""
        return self._link is not None and self._link.is_online

    @property
    def optimizer_step(self) -> int:
        """The number of the next optimizer step. Settable: a resumed training has its own count.

        The reports order ranks by it. Set it on all ranks alike; a number that is lower than the present one has no effect.
        """
        return self._detector.optimizer_step

    @optimizer_step.setter
    def optimizer_step(self, number: int) -> None:
        if not isinstance(number, int) or number < 0:
            raise UsageError(f"optimizer_step={number!r}: expected a whole number of at least 0")
        self._detector.optimizer_step = number

    @property
    def batch(self) -> int:
        """The number of the batch that runs, or ran last; before the first one, one less than its number."""
        return self._detector.position.batch

    def summaries(self) -> dict[str, float]:
        """This rank's readings of the last judged batch, for a logger: ``abs_max/MODULE/LABEL``, ``abs_min/MODULE/LABEL``.

        The names are those of ``rankwatch export``; inf and nan are included. The scalars are computed at the call, not
        before. With ``check="async"`` the batch may be the one before the last.
        """
        return self._last.scalars(self._detector.unsent())

    def close(self) -> None:
        """Removes the hooks from the model, and ends the connection to the collector. A second call does nothing."""
        self._finish("aborted" if self._reason else "finished", self._detector.fault)

    def end(self) -> None:
        """Closes when the process ends. Whether it failed is unknown: sys.exit(1) looks like a normal end from here."""
        self._finish("aborted" if self._reason else "ended", self._detector.fault)

    def mark(self, tensor: Tensor, label: str) -> None:
        """Records a tensor for ``detect_overflow``, if the calling thread is inside this watch's forward."""
        if self._detector.is_inside():
            self._detector.mark(tensor, label)

    def __repr__(self) -> str:
        run = f"run {self._link.run}" if self._link is not None and self._link.run else "no collector"
        states = {
            "tripped": self._has_tripped or self._has_reported,
            "aborted": self._reason and not self._has_tripped,
            "off": self._detector.fault,
            "closed": self._closed,
        }
        held = "".join(f", {name}" for name, holds in states.items() if holds)
        return f"<Watch of {type(self.root).__name__}, {self._name}, {run}{held}>"

    def __enter__(self) -> Watch:
        if self._closed and not is_disabled():
            raise UsageError("this watch is closed and sees nothing: call rankwatch.watch(model) for a new one")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.close()
        else:
            self.end_by(error)

    def end_by(self, error: BaseException) -> None:
        """Closes when an exception ends the training, and reports it before its traceback is printed."""
        error = _inner(error)
        error = self.look_back(error)
        if isinstance(error, BatchLimitReached):
            write_error_file(str(error), time.time(), is_culprit=True)
            self._finish("limit", str(error))
        elif isinstance(error, SystemExit) and error.code in (None, 0):
            self.close()
        elif self._reason or isinstance(error, TrainingAborted):
            if self._reason and not isinstance(error, TrainingAborted):
                say(f"the {type(error).__name__} of {self._name} only follows from this: {self._reason}")
            self._write_error_file()
            self._finish("aborted")
        else:
            if not is_of_the_network(error):
                write_error_file("".join(traceback.format_exception(error)), time.time(), is_culprit=True)
            self._finish("failed", f"{type(error).__name__}: {words_of(error)}".removesuffix(": "))

    def look_back(self, error: BaseException) -> BaseException:
        """An exception is ending the training. If it came upon a bad gradient, that is a trip; returns what ends the training."""
        follows = self._reason or isinstance(error, TrainingAborted) or is_of_the_network(error)
        if follows or self._is_forked or not isinstance(error, Exception):
            return error
        return self._detector.look_back(error) or error

    # --- the detector's observer, in the training thread --------------------------------------------------------------

    def on_batch(self, table: FrameTable, summary: BatchSummary) -> None:
        self._last.add(table, summary)
        self._losses.take(table, summary)
        self._patterns.take(table, summary)
        self._compare_ranks()
        if self._link is not None:
            self._link.send_batch(table, summary)

    def on_notice(self, notice: Notice) -> None:
        if self._link is not None:
            self._link.send_notice(notice)

    def on_fingerprint(self, table: FingerprintTable, fingerprint: Fingerprint) -> None:
        if self._link is not None:
            self._link.send_fingerprint(table, fingerprint)

    def on_trace(self, frames: list[Frame]) -> None:
        emit(self._heading() + format_trace(cleaned(frames)) + "\n")

    def on_found(self, trip: Trip) -> None:
        self._compare_ranks()
        if self._link is not None:
            self._link.send_trip(trip)

    def is_wanted(self) -> bool:
        """Whether the close-up may be shown: not when the verdict names another rank."""
        return not self._reason or self._is_culprit

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
        run = (self._link.run if self._link is not None else "") or f"process-{os.getpid()}"
        here = Path.cwd()
        return (here if os.access(here, os.W_OK) else Path(tempfile.gettempdir())) / "rankwatch-capsules" / run

    def _run_folder(self) -> Path | None:
        folder = self._link.folder if self._link is not None else ""
        is_open = any(Path(folder, f"run.db-{beside}").is_file() for beside in ("wal", "journal"))
        return Path(folder) if folder and is_open else None

    def on_closeup(self, closeup: CloseUp) -> None:
        machine = ", ".join(filter(None, (self._identity.host, closeup.machine)))
        folder = self._run_folder()
        capsule = closeup.capsule.removeprefix(f"{folder}/") if folder is not None else closeup.capsule
        self._closeup = replace(closeup, machine=machine, capsule=capsule)
        if self._link is not None:
            self._link.send_closeup(self._closeup)

    def on_trip(self, trip: Trip, bad_readings: list[BadReading]) -> TrainingAborted:
        if self._link is not None and self._link.wait_for_verdict():
            return self._exception()
        trip = cleaned(trip)  # the model chooses the names in it
        culprit = describe_culprit(self._name, trip)
        if self._has_reported:  # a loop that catches the exception may trip in each batch
            emit(f"rankwatch: tripped again: {culprit}\n")
        else:
            self._has_reported = True
            self._report_alone(trip, bad_readings)
        write_error_file(culprit, trip.time, is_culprit=True)
        cause, batch, module = self._explain(trip)[0].value, trip.position.batch, trip.frame.spec.module
        return OverflowDetected(culprit, rank=self._identity.rank, batch=batch, module=module, cause=cause)

    def on_limit(self, batch: int) -> TrainingAborted:
        return BatchLimitReached(f"stopped after batch {batch}, as abort_after_batch_num={batch} asked for")

    def on_fault(self, fault: str) -> None:
        if self._link is not None:
            self._link.send_fault(fault)

    def _report_alone(self, trip: Trip, bad_readings: list[BadReading]) -> None:
        """Prints a trip if there is no collector, which would print the report."""
        cause, evidence = self._explain(trip)
        closeup = cleaned(self._closeup)
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
        if self._link is None:
            return "no collector configured"
        return f"the collector refused it: {self._link.complaint}" if self._link.complaint else "no collector in reach"

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

    def _heading(self) -> str:
        return f"\n{self._name}:" if self._identity.world_size > 1 else ""

    # --- the link, and what its thread calls --------------------------------------------------------------------------

    def where(self) -> tuple[Moment, str]:
        """Where the training thread is: moment and phase. For any thread."""
        return self._detector.progress.in_stage(self._stage), self._detector.phase

    def on_stay(self, seconds: float) -> None:
        """Other ranks hold work, for which this one's end waits."""
        if self._deadline is not None:
            self._deadline.wait_for_others(seconds)

    def on_tune(self, tune: messages.Tune) -> None:
        """All changes of options in the run so far."""
        self._detector.tune(tune.tuning)

    def on_abort(self, abort: messages.Abort) -> None:
        """The collector stops the run."""
        if self._is_back:
            return
        self._abort = abort
        looks_closer = self._has_tripped and self._closeup is None
        grace = abort.grace + (self._closeup_seconds if looks_closer else 0.0)
        deadline = self._deadline = Deadline(f"{self._name}: {abort.reason}", grace, abort.hold_limit)
        self._detector.obey(lambda: None if deadline.is_held else self._exception())
        deadline.start()
        self._write_error_file()
        if self._is_back:  # meanwhile
            self._come_back()

    @property
    def _reason(self) -> str:
        """The reason in the collector's ABORT; empty before one came."""
        return self._abort.reason if self._abort is not None else ""

    @property
    def _is_culprit(self) -> bool:
        return self._abort is not None and self._abort.rank == self._identity.rank

    @property
    def _has_tripped(self) -> bool:
        """Whether this rank is the culprit by what it computed, and not by a weight in which replicas differ."""
        return self._is_culprit and self._abort is not None and self._abort.time > 0

    def _exception(self) -> TrainingAborted:
        kind, abort = OverflowDetected if self._has_tripped else TrainingAborted, self._abort
        report = (self._link.folder if self._link is not None else "") or None
        if abort is None or not abort.cause:
            return kind(self._reason, report=report)
        rank = abort.rank if abort.rank >= 0 else None
        return kind(self._reason, rank=rank, batch=abort.batch, module=abort.module, cause=abort.cause, report=report)

    def _write_error_file(self) -> None:
        if self._abort is not None:
            write_error_file(self._reason, self._abort.time, is_culprit=self._is_culprit)

    # --- the beginning and the end ------------------------------------------------------------------------------------

    def _take_over(self, root: nn.Module) -> Watch | None:
        """Takes off the watches of this model. Returns the one whose run goes on."""
        want(root)
        _mention_older(root)
        goes_on: Watch | None = None
        for other in (watch for watch in open_watches() if watch.root is root):
            if not (other.is_automatic or other._counts_all):  # the Trainer makes a drop-in for each train()
                log.warning("rankwatch: this %s was watched already: the new watch takes over", _kind(other))
            if goes_on is None and self._may_go_on_with(other):
                goes_on = other
                other._finish("", keeps_link=True)
            else:
                other.close()
        return goes_on

    def _may_go_on_with(self, other: Watch) -> bool:
        """Whether this watch can go on with the run of an earlier one of the same model."""
        ours, its = self._config, other._config
        is_alike = (self._identity, self._stage, ours.connection) == (other._identity, other._stage, its.connection)
        is_alike = is_alike and not (self._counts_all or other._counts_all)
        is_well = other._speaker is not None and not (other._reason or other._speaker.link.refusal or other._detector.fault)
        named = (ours.first_batch or None, ours.abort_after_batch_num, *ours.trace_batch_nums)
        return is_alike and is_well and all(batch is None or batch > other.batch for batch in named)

    @property
    def root(self) -> nn.Module:
        """The watched module, without its wrappers; an empty one if the watch is closed and the model is gone."""
        return self._detector.root

    @property
    def _is_forked(self) -> bool:
        """Whether this is a forked child, which has the object, but no thread."""
        return os.getpid() != self._identity.pid

    def _come_back(self) -> None:
        """The training is in the user's hands again: whatever it does now, no deadline ends it."""
        self._is_back = True
        if self._deadline is not None and not is_process_ending():
            self._deadline.cancel()

    def _finish(self, outcome: str, text: str = "", *, keeps_link: bool = False) -> None:
        if self._closed or self._is_forked:
            return
        self._closed = True
        if isinstance(self._detector, Detector):
            self._detector.remove()  # may hang: with the deadline
            self._detector = EndedDetector(self._detector)
        forget(self)
        self._come_back()
        if self._link is not None and not keeps_link:
            self._link.close(outcome, text)
            if not any(open_watches()):
                seat.leave()


def _kind(watch: Watch) -> str:
    return type(watch.root).__name__


def _mention_older(root: nn.Module) -> None:
    """At a Python prompt: a cell that is run again may have made its model anew, and the old model is still watched."""
    if hasattr(sys, "ps1") and any(type(other.root) is type(root) and other.root is not root for other in open_watches()):
        log.warning(
            "rankwatch: another %s is still watched: unwatch() a model before a cell makes it anew", type(root).__name__
        )


def _inner(error: BaseException) -> BaseException:
    """The TrainingAborted inside of another exception, if any: a pipeline's schedule wraps what a forward raises."""
    inner: BaseException | None = error
    while inner is not None and not isinstance(inner, TrainingAborted):
        inner = inner.__cause__
    return inner or error
