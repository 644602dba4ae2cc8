"""``watch``: a detector and its link to the collector, from the first hook to the last goodbye."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import nn

from . import connection as connections
from . import wire
from .abort import Deadline, say, write_error_file
from .config import Config, resolve
from .detector import Detector
from .errors import BatchLimitReached, OverflowDetected, TrainingAborted, UsageError
from .frame import BatchSummary, Frame, FrameTable, Position, Reading
from .identity import Identity, identify
from .link import Link
from .text import describe_culprit, describe_rank, describe_trip, format_dump, format_head, format_trace
from .trip import Policy, Trip, classify

log = logging.getLogger(__name__)

_open: list[Watch] = []
"""The watches of this process that are not closed."""


class Watch:
    """A watched model; made by ``watch``. A context manager: leaving it closes it."""

    _style: dict[str, bool] = {}

    def __init__(self, model: nn.Module, config: Config) -> None:
        if not isinstance(model, nn.Module):
            raise UsageError(f"watch() takes a torch.nn.Module, not {type(model).__name__}")
        self._identity = identify()
        self._pid = os.getpid()
        self._reason = ""
        """Why the collector told this rank to stop; empty while it has not."""
        self._trip_time = 0.0
        self._is_culprit = False
        self._closed = False
        self._detector = Detector(model, config, self, **self._style)
        if any(other._detector.root is self._detector.root for other in _open):
            self._detector.remove()
            raise UsageError("this model is watched already: close() the first watch before a second one")
        self._link: Link | None = None
        try:
            self._link = self._connect(config.connection, model)
        except BaseException:
            self._detector.remove()
            raise
        _remember(self)

    @property
    def is_connected(self) -> bool:
        """Whether the collector is in reach just now."""
        return self._link is not None and self._link.is_online

    def close(self) -> None:
        """Takes the hooks off the model and says goodbye to the collector. Closing twice does nothing."""
        self._finish("aborted" if self._reason else "finished")

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.close()
        else:
            self._end_by(error)

    # --- the detector's observer, in the training thread --------------------------------------------------------------

    def on_batch(self, table: FrameTable, summary: BatchSummary) -> None:
        if self._link is not None:
            self._link.send_batch(table, summary)

    def on_trace(self, frames: list[Frame]) -> None:
        _print(self._prefix() + format_trace(frames) + "\n")

    def on_trip(self, trip: Trip, tripping: list[Reading]) -> TrainingAborted:
        self._trip_time = trip.time
        if self._link is not None and self._link.send_trip(trip):
            return self._exception()
        self._report_alone(trip, tripping)
        culprit = describe_culprit(self._rank(), trip)
        write_error_file(culprit, trip.time, is_culprit=True)
        return OverflowDetected(culprit)

    def on_limit(self, batch: int) -> TrainingAborted:
        return BatchLimitReached(f"stopped after batch {batch}, as abort_after_batch_num={batch} asked for")

    def _report_alone(self, trip: Trip, tripping: list[Reading]) -> None:
        """What a person sees of a trip when there is no collector to print the report."""
        cause, evidence = classify(trip)
        why = "no collector in reach" if self._link is not None else "no collector configured"
        head = format_head(
            "first overflow of this process",
            [
                ("culprit", describe_trip(self._rank(), trip)),
                ("cause", f"{cause.value}: {evidence}"),
                ("certainty", f"this rank alone: {why}"),
            ],
        )
        _print(head + format_dump(trip.frames))

    # --- the link's thread --------------------------------------------------------------------------------------------

    def _on_abort(self, abort: wire.Abort) -> None:
        self._is_culprit = abort.rank == self._identity.rank
        self._reason = abort.reason
        self._trip_time = abort.time
        self._detector.abort = self._exception
        self._write_error_file()
        Deadline(f"{self._rank()}: {abort.reason}", abort.grace).start()

    # --- the end ------------------------------------------------------------------------------------------------------

    def _end_by(self, error: BaseException) -> None:
        """The training of this rank ends by an exception: says so, and why, before the traceback does."""
        if isinstance(error, BatchLimitReached):
            self._finish("limit", str(error))
        elif isinstance(error, SystemExit) and error.code in (None, 0):
            self.close()
        elif self._reason or isinstance(error, TrainingAborted):
            if self._reason and not isinstance(error, TrainingAborted):
                say(f"{self._rank()}: {self._reason}; the {type(error).__name__} here only follows from it")
            self._write_error_file()  # torch's own @record has put the exception there
            self._finish("aborted")
        else:
            self._finish("failed", f"{type(error).__name__}: {error}")

    def _finish(self, outcome: str, text: str = "") -> None:
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self._detector.remove()
        _forget(self)
        if self._link is not None:
            self._link.close(outcome, text)

    def _write_error_file(self) -> None:
        if self._reason:
            write_error_file(self._reason, self._trip_time, is_culprit=self._is_culprit)

    def _exception(self) -> TrainingAborted:
        return (OverflowDetected if self._is_culprit else TrainingAborted)(self._reason)

    # --- small things -------------------------------------------------------------------------------------------------

    def _connect(self, source: str | None, model: nn.Module) -> Link | None:
        if source is None:
            return None
        link = Link(
            connections.read(source),
            self._identity,
            progress=self._progress,
            on_abort=self._on_abort,
            device=_device(model),
            torch_version=torch.__version__,
        )
        if not link.start():
            log.warning(
                "%s: no collector answers at the connection given; training goes on, and the background keeps trying",
                self._rank(),
            )
        return link

    def _progress(self) -> tuple[Position, str]:
        return self._detector.progress, self._detector.phase

    def _rank(self) -> str:
        who: Identity = self._identity
        return describe_rank(who.rank, who.world_size, who.host, who.local_rank)

    def _prefix(self) -> str:
        return f"\n{self._rank()}:" if self._identity.world_size > 1 else ""


def watch(
    model: nn.Module,
    *,
    max_frames_to_save: int = 21,
    trace_batch_nums: Sequence[int] = (),
    abort_after_batch_num: int | None = None,
    policy: str | Policy = Policy.FIRST,
    ignore: Sequence[str] = (),
    connection: str | os.PathLike[str] | None = None,
) -> Watch:
    """Watches every forward of ``model`` for inf and nan, until the watch is closed.

    An argument left at its default is taken from the environment where ``RANKWATCH_<NAME>`` is set.

    Args:
        model: the model, plain or wrapped in DDP, FSDP, a compiled or a checkpoint wrapper.
        max_frames_to_save: how many of the last frames a report shows.
        trace_batch_nums: batches (from 0) of which every frame is printed, and recorded by the collector.
        abort_after_batch_num: stop every rank after this batch, before its backward.
        policy: ``first`` (outputs, own parameters, marked tensors trip), ``strict`` (inputs too), ``off`` (nothing does).
        ignore: shell patterns of ``module`` or ``module:label`` that never trip: ``["*.rotary", "*:output[1]"]``.
        connection: the collector's connection file; none: this process watches alone.

    Raises:
        UsageError: a bad option, a connection file that cannot be used, or a model that is watched already.
        ProtocolError: the collector refuses this rank.
    """
    return Watch(
        model,
        resolve(
            max_frames_to_save=max_frames_to_save,
            trace_batch_nums=trace_batch_nums,
            abort_after_batch_num=abort_after_batch_num,
            policy=policy,
            ignore=ignore,
            connection=connection,
        ),
    )


def detect_overflow(var: torch.Tensor, ctx: str) -> bool:
    """Says whether ``var`` holds an inf or nan, and prints which as ``<ctx> has infs``; usable anywhere.

    Inside a watched forward the tensor also becomes a frame named ``ctx``: it shows in traces and reports, and when it is not
    finite it trips, under every policy but ``off``, at the next module's hook.
    """
    from .measure import count_non_finite

    _, _, nans, infs = count_non_finite(var)
    for count, what in ((nans, "nans"), (infs, "infs")):
        if count:
            _print(f"{ctx} has {what}\n")
    for watching in _open:
        if watching._detector.is_inside():
            watching._detector.mark(var, ctx)
    return bool(nans or infs)


def _print(text: str) -> None:
    sys.stdout.write(text)  # in one write, so that the ranks' texts do not mix
    sys.stdout.flush()


def _device(model: nn.Module) -> str:
    parameter = next(model.parameters(), None)
    return "none" if parameter is None else str(parameter.device)


# --- watches that nobody closes: the process ends, well or by an exception --------------------------------------------

_previous_excepthook: Callable[..., Any] | None = None


def _remember(watching: Watch) -> None:
    global _previous_excepthook
    if _previous_excepthook is None:
        _previous_excepthook = sys.excepthook
        sys.excepthook = _excepthook
        atexit.register(_close_all)
    _open.append(watching)


def _forget(watching: Watch) -> None:
    if watching in _open:
        _open.remove(watching)


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    try:
        for watching in _open:
            watching._end_by(error)
    finally:
        (_previous_excepthook or sys.__excepthook__)(kind, error, trace)


def _close_all() -> None:
    for watching in _open:
        watching.close()
