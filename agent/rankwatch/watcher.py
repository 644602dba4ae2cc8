"""``watch``: a detector and its link to the collector, from the first hook to the last goodbye."""

from __future__ import annotations

import logging
import os
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import torch
import torch.distributed
from torch import Tensor, nn

from .errors import BatchLimitReached, OverflowDetected, TrainingAborted, UsageError
from .hook.detector import Detector
from .hook.stage import PipelineStage, module_and_stage
from .judge.settler import BadReading
from .mark import emit
from .measure.modules import unwrap
from .registry import forget, open_watches, prepare, remember
from .shared import connection as connections
from .shared.cause import Trip, classify
from .shared.config import Config, Policy, is_disabled, resolve
from .shared.frame import NOWHERE, BatchSummary, Frame, FrameTable, Position
from .shared.identity import identify, unnamed_job
from .shared.notice import Notice
from .shared.scalars import LastBatch
from .shared.text import describe_culprit, describe_rank, describe_trip, format_dump, format_head, format_trace
from .shared.tuning import Check
from .tell.abort import Deadline, is_of_the_network, say, write_error_file

if TYPE_CHECKING:  # loaded with the first connection: who watches alone, or not at all, needs no zmq
    from .shared import messages
    from .tell.link import Link

log = logging.getLogger(__name__)


class Watch:
    """A watched model; made by ``watch``. A context manager: leaving it closes it.

    The training hears of a verdict by an exception, at the next forward or optimizer step: ``OverflowDetected`` on the rank
    that is the culprit, ``TrainingAborted`` on the others.
    """

    _counts_all = False
    _judges_traced = True

    is_automatic = False
    """Whether nobody asked for it by name: an explicit watch of the same model takes over."""

    def __init__(self, model: nn.Module | PipelineStage, config: Config) -> None:
        model, self._stage = module_and_stage(model)
        if isinstance(unwrap(model), torch.jit.ScriptModule):
            raise UsageError("a scripted module takes no hooks: watch the model it was scripted from")
        self._identity = identify(group=_group())
        self._name = describe_rank(
            self._identity.rank, self._identity.world_size, self._identity.host, self._identity.local_rank, self._stage
        )
        self._closed = False
        self._reason = ""
        """Why the collector told this rank to stop; empty while it has not."""
        self._culprit_time = 0.0
        self._is_culprit = False
        self._last = LastBatch()
        self._has_compared = False
        self._take_over(unwrap(model))
        self._link: Link | None = None
        self._detector = Detector(model, config, self, count_all=self._counts_all, judge_traced=self._judges_traced)
        try:
            self._link = self._connect(config.connection, model)
        except BaseException:
            self._detector.remove()
            raise
        remember(self)

    @property
    def is_connected(self) -> bool:
        """Whether the collector is in reach just now."""
        return self._link is not None and self._link.is_online

    @property
    def optimizer_step(self) -> int:
        """The number of the optimizer step that comes next. Settable, where the training has its own: of a resumed one, say."""
        return self._detector.optimizer_step

    @optimizer_step.setter
    def optimizer_step(self, number: int) -> None:
        if not isinstance(number, int) or number < 0:
            raise UsageError(f"optimizer_step={number!r}: expected a whole number of at least 0")
        self._detector.optimizer_step = number

    def summaries(self) -> dict[str, float]:
        """The readings of the last batch that was judged, for a logger: ``abs_max/MODULE/LABEL`` and ``abs_min/MODULE/LABEL``.

        This rank's, with the names that ``rankwatch export`` gives them; inf and nan as they are. Nothing is worked out before
        it is asked for; with ``check="async"`` the batch may be the one before the last.
        """
        return self._last.scalars()

    def close(self) -> None:
        """Takes the hooks off the model and says goodbye to the collector. Closing twice does nothing."""
        self._finish("aborted" if self._reason else "finished", self._detector.fault)

    def end(self) -> None:
        """Closes, as the process ends without a word of how: sys.exit(1) looks no different from here than the last line."""
        self._finish("aborted" if self._reason else "ended", self._detector.fault)

    def mark(self, tensor: Tensor, label: str) -> None:
        """Records a tensor as ``detect_overflow`` does, if the calling thread is inside this watch's forward."""
        if self._detector.is_inside():
            self._detector.mark(tensor, label)

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
        """Closes, as the training ends by this exception: says so, and why, before the traceback is printed."""
        error = _inner(error)
        if isinstance(error, BatchLimitReached):
            write_error_file(str(error), time.time(), is_culprit=True)
            self._finish("limit", str(error))
        elif isinstance(error, SystemExit) and error.code in (None, 0):
            self.close()
        elif self._reason or isinstance(error, TrainingAborted):
            if self._reason and not isinstance(error, TrainingAborted):
                say(f"{self._name}: {self._reason}; the {type(error).__name__} here only follows from it")
            self._write_error_file()
            self._finish("aborted")
        else:
            if not is_of_the_network(error):
                write_error_file("".join(traceback.format_exception(error)), time.time(), is_culprit=True)
            self._finish("failed", f"{type(error).__name__}: {error}".removesuffix(": "))

    # --- the detector's observer, in the training thread --------------------------------------------------------------

    def on_batch(self, table: FrameTable, summary: BatchSummary) -> None:
        self._last.add(table, summary)
        self._compare_ranks()
        if self._link is not None:
            self._link.send_batch(table, summary)

    def on_notice(self, notice: Notice) -> None:
        if self._link is not None:
            self._link.send_notice(notice)

    def on_trace(self, frames: list[Frame]) -> None:
        emit(self._heading() + format_trace(frames) + "\n")

    def on_found(self, trip: Trip) -> None:
        self._compare_ranks()
        if self._link is not None:
            self._link.send_trip(trip)

    def on_trip(self, trip: Trip, bad_readings: list[BadReading]) -> TrainingAborted:
        if self._link is not None and self._link.wait_for_verdict():
            return self._exception()
        self._report_alone(trip, bad_readings)
        culprit = describe_culprit(self._name, trip)
        write_error_file(culprit, trip.time, is_culprit=True)
        return OverflowDetected(culprit)

    def on_limit(self, batch: int) -> TrainingAborted:
        return BatchLimitReached(f"stopped after batch {batch}, as abort_after_batch_num={batch} asked for")

    def _report_alone(self, trip: Trip, bad_readings: list[BadReading]) -> None:
        """What a person sees of a trip when there is no collector to print the report."""
        cause, evidence = classify(trip)
        why = "no collector in reach" if self._link is not None else "no collector configured"
        fields = [
            ("culprit", describe_trip(self._name, trip)),
            ("cause", f"{cause.value}: {evidence}"),
            ("certainty", f"this rank alone: {why}"),
        ]
        emit(format_head("first overflow of this process", fields) + format_dump(trip.frames))

    def _compare_ranks(self) -> None:
        """Warns, once, of a process group that came after the watch, which has told the collector who this is."""
        if self._has_compared:
            return
        self._has_compared = True
        rank, world_size = _group() or (0, 1)
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

    def _connect(self, source: str | None, model: nn.Module) -> Link | None:
        if source is None:
            return None
        from .tell.link import Link

        me = weakref.ref(self)  # the thread must not keep a model alive that nobody trains any more

        def progress() -> tuple[Position, str]:
            watch = me()
            return (watch._detector.progress, watch._detector.phase) if watch is not None else (NOWHERE, "idle")

        def on_abort(abort: messages.Abort) -> None:
            watch = me()
            if watch is not None:
                watch._on_abort(abort)

        def on_tune(tune: messages.Tune) -> None:
            watch = me()
            if watch is not None:
                watch._detector.tune(tune.tuning)

        parameter = next(model.parameters(), None)
        connection = connections.read(source)
        fixed = connection.job if connection.for_job_alone else ""
        job = fixed or self._identity.job or connection.job or unnamed_job(self._identity)
        # A further model of the same process is a run beside the first, on all ranks alike.
        nth = 1 + sum(1 for _ in open_watches())
        link = Link(
            connection,
            self._identity,
            job=job if nth == 1 else f"{job}.{nth}",
            progress=progress,
            on_abort=on_abort,
            on_tune=on_tune,
            device="none" if parameter is None else str(parameter.device),
            torch_version=torch.__version__,
            stage=self._stage,
        )
        weakref.finalize(self, link.release).atexit = False
        if not link.start():
            log.warning(
                "rankwatch: %s: no collector answers at %s; training goes on, and the background keeps trying. Is it running, "
                "of this same release, and the connection file its own? `rankwatch doctor` looks into it",
                self._name,
                connection.address,
            )
        return link

    def _on_abort(self, abort: messages.Abort) -> None:
        self._is_culprit = abort.rank == self._identity.rank
        self._culprit_time = abort.time
        self._reason = abort.reason
        self._detector.abort = self._exception
        self._write_error_file()
        Deadline(f"{self._name}: {abort.reason}", abort.grace).start()

    def _exception(self) -> TrainingAborted:
        return (OverflowDetected if self._is_culprit else TrainingAborted)(self._reason)

    def _write_error_file(self) -> None:
        if self._reason:
            write_error_file(self._reason, self._culprit_time, is_culprit=self._is_culprit)

    # --- the beginning and the end ------------------------------------------------------------------------------------

    def _take_over(self, root: nn.Module) -> None:
        """Makes sure that nobody else watches this model."""
        for other in open_watches():
            if other.root is root and other.is_automatic:
                log.info("rankwatch: watch() takes over the model that was found without it")
                other.close()
        if any(other.root is root for other in open_watches()):
            raise UsageError("this model is watched already: close() the first watch before a second one")

    @property
    def root(self) -> nn.Module:
        """The watched module, out of its wrappers."""
        return self._detector.root

    def _finish(self, outcome: str, text: str = "") -> None:
        if self._closed or os.getpid() != self._identity.pid:  # a forked child has the object, but neither thread nor say
            return
        self._closed = True
        self._detector.remove()
        forget(self)
        if self._link is not None:
            self._link.close(outcome, text)


def _inner(error: BaseException) -> BaseException:
    """Our own exception, where there is one inside of another: a pipeline's schedule wraps what a forward raises."""
    inner: BaseException | None = error
    while inner is not None and not isinstance(inner, TrainingAborted):
        inner = inner.__cause__
    return inner or error


def watch(
    model: nn.Module | PipelineStage,
    *,
    max_frames_to_save: int = 21,
    trace_batch_nums: Sequence[int] = (),
    abort_after_batch_num: int | None = None,
    policy: str | Policy = Policy.FIRST,
    ignore: Sequence[str] = (),
    check: str | Check | None = None,
    every: int = 1,
    modules: Sequence[str] = (),
    weights_every: int = 16,
    gradients: bool = False,
    loss_scale: Callable[[], float] | None = None,
    max_scale_shrinks: int = 10,
    first_batch: int = 0,
    stop: Callable[[TrainingAborted], None] | None = None,
    connection: str | os.PathLike[str] | None = None,
) -> Watch:
    """Watches every forward of ``model`` for inf and nan, until the watch is closed.

    An argument left at its default is taken from the environment where ``RANKWATCH_<NAME>`` is set, or from the TOML file
    that ``RANKWATCH_CONFIG`` names. With ``RANKWATCH_MODE=disabled`` nothing is watched, and all methods do nothing.

    Args:
        model: the model, plain or wrapped in DDP, FSDP, a compiled or a checkpoint wrapper; or this rank's stage of a
            ``torch.distributed.pipelining`` pipeline, whose every micro-batch is a batch.
        max_frames_to_save: how many of the last frames a report shows.
        trace_batch_nums: batches, counted from 0, of which every frame is printed, and recorded by the collector.
        abort_after_batch_num: stop every rank after this batch, before its backward.
        policy: ``first`` (outputs, own parameters, marked tensors trip), ``strict`` (inputs too), ``off`` (nothing does).
        ignore: shell patterns of ``module`` or ``module:label`` that never trip: ``["*.rotary", "*:output[1]"]``.
        check: when readings are judged. ``frame``: right after each module's forward (the default on CPU); ``batch``: before
            the root's forward returns, so before backward (the default elsewhere, since it stops the device once a batch);
            ``async``: without ever waiting for the device, before the next optimizer step where the numbers have come by
            then, one batch later at most.
        every: all modules are measured in every ``every``-th batch, the root's output alone in the others.
        modules: shell patterns of the modules to watch, ``["encoder.*"]``; none: all. The root is always watched.
        weights_every: batches from one measurement of a parameter to the next, since only the optimizer changes it; those
            in a report are measured as it is made. 0: every batch, as policy ``strict`` does in any case.
        gradients: watch the backward too: gradients of module outputs, inputs, and parameters.
        loss_scale: a function that returns the dynamic loss scale in use, of DeepSpeed for one. ``torch.amp.GradScaler`` is
            noticed without. While a scale is in use, gradients that are not finite are recorded and do not trip.
        max_scale_shrinks: how often in a row the loss scale may shrink, until a gradient that is not finite trips after all.
        first_batch: the number of the next batch: a resumed training goes on counting. See also ``Watch.optimizer_step``.
        stop: called once, with the exception, in the place of raising it: for loops with a way of their own to stop, which
            have the collector's grace for it. From then on nothing is judged, and optimizer steps find no gradients, so that
            the weights stay as they are (one with a closure computes its gradients later: there, raise).
        connection: the collector's connection file, or its content; none: this process watches alone.

    Returns:
        The watch. ``with`` closes it, and tells the collector of an exception that ends the training.

    Raises:
        UsageError: no module, a bad option, or a model that is watched already.
        ConnectionFileError: a connection file that cannot be used.
        ProtocolError: the collector refuses this rank.
    """
    if is_disabled():
        return asleep()
    prepare()
    return Watch(
        model,
        resolve(
            max_frames_to_save=max_frames_to_save,
            trace_batch_nums=trace_batch_nums,
            abort_after_batch_num=abort_after_batch_num,
            policy=policy,
            ignore=ignore,
            check=check,
            every=every,
            modules=modules,
            weights_every=weights_every,
            gradients=gradients,
            loss_scale=loss_scale,
            max_scale_shrinks=max_scale_shrinks,
            first_batch=first_batch,
            stop=stop,
            connection=connection,
        ),
    )


def asleep() -> Watch:
    """A watch of nothing, for ``RANKWATCH_MODE=disabled``."""
    watch = Watch(nn.Module(), Config())
    watch.close()
    return watch


def _group() -> tuple[int, int] | None:
    """Rank and world size in torch.distributed, once its process group is there."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()
