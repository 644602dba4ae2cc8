"""A watch: a detector and its link to the collector, from the first hook to BYE. ``watch.py`` makes it."""

from __future__ import annotations

import logging
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..errors import BatchLimitReached, TrainingAborted, UsageError
from ..hook.detector import Detector
from ..hook.ended import EndedDetector
from ..hook.stage import PipelineStage, module_and_stage
from ..measure.modules import unwrap
from ..shared.system.identity import identify
from ..shared.types.config import Config, is_disabled
from ..shared.types.frame import NO_STAGE, Whereabouts
from ..shared.words.text import describe_rank
from ..tell import rank_process as seat
from ..tell.abort import is_of_the_network, say, words_of, write_error_file
from .link_owner import Speaker, distributed_group, speaker_for
from .pattern_check import PatternCheck
from .registry import OUTSIDE, forget, open_watches, remember, want
from .reports import Reports
from .stop_order import StopOrder

if TYPE_CHECKING:  # imported with the first connection: without a collector, no zmq is needed
    from ..judge.lifecycle import Use
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
    _Reports: type[Reports] = Reports

    is_automatic = False
    """Whether ``finder`` made it: an explicit watch of the same model replaces it."""

    def __init__(self, model: nn.Module | PipelineStage, config: Config) -> None:
        model, self._stage = module_and_stage(model)
        if isinstance(unwrap(model), torch.jit.ScriptModule):
            raise UsageError("a scripted module takes no hooks: watch the model it was scripted from")
        who = self._identity = identify(group=distributed_group())
        parent = None if config.connection is None else seat.holder(who)
        if parent is not None:
            log.warning(
                "rankwatch: process %d was started by process %d, which is rank %d: it is no rank, and is watched alone",
                *(who.pid, parent, who.rank),
            )
            config = replace(config, connection=None)
        self._name = describe_rank(who.rank, who.world_size, who.host, who.local_rank, self._stage)
        self._closed = False
        self._config = config
        self._order = StopOrder(self._name, who.rank)
        first = self._take_over(unwrap(model))
        config = config if first is None else replace(config, first_batch=max(config.first_batch, first.batch + 1))
        patterns = PatternCheck(model, config, is_asked=who.rank == 0 and self._stage == NO_STAGE)
        self._reports = self._Reports(self._config, who, self._name, parent, patterns, self._order)
        self._speaker: Speaker | None = None
        try:
            self._detector: Detector | EndedDetector = Detector(
                model,
                config if config.connection is not None else replace(config, fingerprints=0),  # nobody would compare them
                self._reports,
                count_all=self._counts_all,
                judge_traced=self._judges_traced,
                sends_at_once=self._stage != NO_STAGE,
                outside=OUTSIDE,
            )
            if first is not None and first._speaker is not None:
                self._detector.optimizer_step = first.optimizer_step
                speaker = first._speaker
                first._speak_by(None)
                self._speak_by(speaker)
                speaker.speak_for(self)
            elif config.connection is not None:
                self._speak_by(speaker_for(self, model, config, who, self._stage))
        except BaseException:
            if isinstance(detector := vars(self).get("_detector"), Detector):
                detector.remove()
            if first is not None and first._link is not None:
                first._link.close("finished")
            raise
        self._reports.watch = self
        remember(self)

    def _speak_by(self, speaker: Speaker | None) -> None:
        self._speaker = speaker
        self._reports.link = self._link
        if self._link is not None:
            self._link.is_unused = lambda: False  # that of an automatic watch may go on with this one

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

    def be_automatic(self, does_any_train: Callable[[], bool]) -> Use:
        """``finder`` has made it, at the first forward of a model that may be trained.

        If it never is, while ``does_any_train``, its run is dropped: the script has called it, no more.
        """
        self.is_automatic, use = True, self._detector.use
        if isinstance(self._detector, Detector):
            self._detector.await_training()
        if self._link is not None:
            self._link.is_unused = lambda: not use.has_trained and does_any_train()
        return use

    @property
    def has_trained(self) -> bool:
        """Whether the model has had a backward."""
        return self._detector.use.has_trained

    @property
    def root(self) -> nn.Module:
        """The watched module, without its wrappers; an empty one if the watch is closed and the model is gone."""
        return self._detector.root

    def summaries(self) -> dict[str, float]:
        """This rank's readings of the last judged batch, for a logger: ``abs_max/MODULE/LABEL``, ``abs_min/MODULE/LABEL``.

        The names are those of ``rankwatch export``; inf and nan are included. The scalars are computed at the call, not
        before. With ``check="async"`` the batch may be the one before the last.
        """
        return self._reports.last.scalars(self._detector.unsent())

    def close(self) -> None:
        """Removes the hooks from the model, and ends the connection to the collector. A second call does nothing."""
        self._finish("aborted" if self._order.reason else "finished", self._detector.fault)

    def give_way(self) -> None:
        """Closes as the watch of the model that contains this one takes its place. Its run is dropped if it never trained."""
        self._finish("finished" if self.has_trained else "unused")

    def end(self) -> None:
        """Closes when the process ends. Whether it failed is unknown: sys.exit(1) looks like a normal end from here."""
        self._finish("aborted" if self._order.reason else "ended", self._detector.fault)

    def mark(self, tensor: Tensor, label: str) -> None:
        """Records a tensor for ``detect_overflow``, if the calling thread is inside this watch's forward."""
        if self._detector.is_inside():
            self._detector.mark(tensor, label)

    def __repr__(self) -> str:
        run = f"run {self._link.run}" if self._link is not None and self._link.run else "no collector"
        states = {
            "tripped": self._order.has_tripped or self._reports.has_reported,
            "aborted": self._order.reason and not self._order.has_tripped,
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
        error = self.look_back(_inner(error))
        reason = self._order.reason
        if isinstance(error, BatchLimitReached):
            write_error_file(str(error), time.time(), is_culprit=True)
            self._finish("limit", str(error))
        elif isinstance(error, SystemExit) and error.code in (None, 0):
            self.close()
        elif reason or isinstance(error, TrainingAborted):
            if reason and not isinstance(error, TrainingAborted):
                say(f"the {type(error).__name__} of {self._name} only follows from this: {reason}")
            self._order.write_error_file()
            self._finish("aborted")
        else:
            if not is_of_the_network(error):
                write_error_file("".join(traceback.format_exception(error)), time.time(), is_culprit=True)
            self._finish("failed", f"{type(error).__name__}: {words_of(error)}".removesuffix(": "), error)

    def look_back(self, error: BaseException) -> BaseException:
        """An exception is ending the training. If it came upon a bad gradient, that is a trip; returns what ends the training."""
        follows = self._order.reason or isinstance(error, TrainingAborted) or is_of_the_network(error)
        is_failure = isinstance(error, Exception) or (isinstance(error, SystemExit) and error.code not in (None, 0))
        if follows or self._is_forked or not is_failure:
            return error
        return self._detector.look_back(error) or error

    # --- what the link's thread calls ---------------------------------------------------------------------------------

    def where(self) -> Whereabouts:
        """Where the training thread is. For any thread."""
        return self._detector.whereabouts.in_stage(self._stage)

    def on_stay(self, seconds: float) -> None:
        """Other ranks hold work, or have yet to close their watch: this one's end waits."""
        self._order.wait_for_others(seconds)

    def has_raised(self) -> bool:
        """Whether the training was given the exception of the ABORT."""
        return self._order.is_raised

    def on_tune(self, tune: messages.Tune) -> None:
        """All changes of options in the run so far."""
        self._detector.tune(tune.tuning)

    def on_abort(self, abort: messages.Abort) -> None:
        """The collector stops the run."""
        order, reports = self._order, self._reports
        if order.take(abort, self._config.closeup if reports.closeup is None else 0.0):
            self._detector.obey(lambda: None if order.is_held else order.exception(reports.folder))
            order.start()

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
        is_stopped = bool(other._order.reason or other._detector.fault)
        is_well = other._speaker is not None and not (is_stopped or other._speaker.link.refusal)
        named = (ours.first_batch or None, ours.abort_after_batch_num, *ours.trace_batch_nums)
        return is_alike and is_well and all(batch is None or batch > other.batch for batch in named)

    @property
    def _is_forked(self) -> bool:
        """Whether this is a forked child, which has the object, but no thread."""
        return os.getpid() != self._identity.pid

    def _finish(self, outcome: str, text: str = "", error: BaseException | None = None, *, keeps_link: bool = False) -> None:
        if self._closed or self._is_forked:
            return
        self._closed = True
        if isinstance(self._detector, Detector):
            self._detector.remove()  # may hang: with the deadline
            self._detector = EndedDetector(self._detector)
        forget(self)
        self._order.lift()
        if self._link is not None and not keeps_link:
            self._link.close(outcome, text, error)
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
