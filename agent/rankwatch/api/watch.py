"""``watch``: a model and options in, a ``Watch`` out."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import wraps
from typing import ParamSpec, TypeVar

from torch import nn

from ..errors import TrainingAborted
from ..hook.stage import PipelineStage, module_and_stage
from ..measure.modules import unwrap
from ..shared.types.bad_step import ABORT, OnBadStep
from ..shared.types.config import Capsule, Config, OthersOptionsError, Policy, disable, is_disabled, resolve
from ..shared.types.tuning import Check
from .registry import leave, open_watches, prepare
from .watch_object import Watch

_given: ContextVar[frozenset[str]] = ContextVar("rankwatch_given", default=frozenset())

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _noting_what_is_given(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """An option that is given counts, also where it is given its default: the signature alone does not tell."""

    @wraps(function)
    def noting(*arguments: _P.args, **named: _P.kwargs) -> _R:
        before = _given.set(frozenset(named))
        try:
            return function(*arguments, **named)
        finally:
            _given.reset(before)

    return noting


@_noting_what_is_given
def watch(
    model: nn.Module | PipelineStage,
    *,
    max_frames_to_save: int = 21,
    trace_batch_nums: Sequence[int] = (),
    abort_after_batch_num: int | None = None,
    policy: str | Policy = Policy.FIRST,
    ignore: Sequence[str] = (),
    check: str | Check | None = None,
    every: int | None = None,
    budget: float = 0.02,
    modules: Sequence[str] = (),
    weights_every: int = 16,
    fingerprints: int = 16,
    gradients: bool = False,
    guard: bool = True,
    on_bad_step: str | OnBadStep = ABORT,
    loss_scale: Callable[[], float] | None = None,
    max_scale_shrinks: int = 10,
    first_batch: int = 0,
    closeup: float = 2.0,
    capsule: str | Capsule = Capsule.ON,
    capsule_mib: int = 2048,
    stop: Callable[[TrainingAborted], None] | None = None,
    connection: str | os.PathLike[str] | None = None,
) -> Watch:
    """Watches every forward of ``model`` for inf and nan, until the watch is closed.

    A model has one watch. A second call, as when a cell of a notebook is run again, takes the first watch off and goes on with
    its run: batches and optimizer steps are counted on.

    For an argument that is not given, the environment variable ``RANKWATCH_<NAME>`` is used if set, else the TOML file that
    ``RANKWATCH_CONFIG`` names. With ``RANKWATCH_MODE=disabled`` nothing is watched, and all methods do nothing.

    Args:
        model: the model, plain or wrapped in DDP, FSDP, a compiled or a checkpoint wrapper; or this rank's stage of a
            ``torch.distributed.pipelining`` pipeline, where each micro-batch is a batch.
        max_frames_to_save: how many of the last frames a report shows.
        trace_batch_nums: batches, counted from 0, whose frames are all printed, and stored by the collector.
        abort_after_batch_num: stop every rank after this batch, before its backward.
        policy: ``first``: outputs, own parameters, marked tensors and the loss trip; ``strict``: inputs trip, too; ``off``:
            nothing trips.
        ignore: shell patterns of ``module`` or ``module:label`` that never trip: ``["*.rotary", "*:output[1]"]``.
        check: when readings are judged. ``frame``: right after each module's forward (the default on CPU). ``batch`` (the
            default on other devices): before the root's forward returns; on a device with ``guard``, before the optimizer step
            at the latest, so that the host waits once for all. ``async``: without ever waiting for the device; before the next
            optimizer step if the numbers have come by then, at most one batch later.
        every: every ``every``-th batch, all modules are measured. Of the other batches, only the root's output, the loss and the
            gradients before a step are looked at; one that shows an inf or nan is run again with all modules measured. None:
            as ``budget`` says.
        budget: the share of a step's time that watching may take: after 20 batches, each rank knows what it costs, and
            all measure every K-th batch, 64 at most; after something odd, all of the next 50. 0: every batch is measured, as
            with ``policy="strict"``, ``gradients`` or ``trace_batch_nums``, and where the model communicates in its forward.
        modules: shell patterns of the modules to watch, ``["encoder.*"]``; none: all. The root is always watched.
        weights_every: batches between two measurements of a parameter, since only the optimizer changes it; for a report,
            parameters are measured anew. 0: every batch, as always with policy ``strict``.
        fingerprints: optimizer steps in which checksums of all parameters are sent once, so that the collector sees whether
            the replicas are one model. 1: all at every step; 0: none, and nothing is compared.
        gradients: also watch the backward: gradients of module outputs, inputs, and parameters.
        guard: look at the gradients before each optimizer step. If one is not finite, and no loss scaler deals with it, the
            step is not taken, and each rank runs its batch again to find where the gradient came from.
        on_bad_step: what a bad step does. ``abort``: it ends the run. ``skip``: all ranks leave the step out and train on, for
            at most 3 steps of the last 128; ``skip=1/1000``: for at most 1 of the last 1000. Else it ends the run.
        loss_scale: a function that returns the dynamic loss scale in use, of DeepSpeed for example;
            ``torch.amp.GradScaler`` needs none. While a scale is in use, non-finite gradients are measured, but do not trip.
        max_scale_shrinks: after the loss scale has shrunk this often in a row, from 65536 or less, non-finite gradients trip.
        first_batch: the number of the next batch, for a resumed training. See also ``Watch.optimizer_step``.
        closeup: seconds in which the rank of a trip runs the bad forward again, after it has told the collector: does it
            recur, and in which precision is it finite? 0: it does not.
        capsule: within the close-up, write what ``rankwatch replay`` needs: ``on``; ``no-inputs``: without the data that the
            module was given; ``off``. It lies in the run's folder, or in ``rankwatch-capsules``, and only its owner can read it.
        capsule_mib: the most that a capsule may hold, in MiB; the inputs come first.
        stop: called once with the exception, instead of raising it: for training loops that stop in a way of their own,
            within the collector's grace. From then on nothing is judged, and optimizer steps find no gradients, so that the
            weights do not change. (An optimizer with a closure computes its gradients later: raise there.)
        connection: the collector's connection file, or its content; none: this process is watched without a collector.

    Returns:
        The watch. As a context manager, it closes itself, and reports an exception that ends the training.

    Raises:
        UsageError: no module, or a bad option.
        ConnectionFileError: a connection file that cannot be used.
        ProtocolError: the collector refuses this rank.
    """
    options = {name: value for name, value in locals().items() if name in _given.get() - {"model"}}
    if is_disabled():
        return asleep()
    prepare()
    try:
        config = resolve(**options)
    except OthersOptionsError as error:
        disable(error)
        return asleep()
    return Watch(model, config)


def unwatch(model: nn.Module | PipelineStage) -> bool:
    """Takes the watch of ``model`` off: the model is as it was, and its run has finished. Returns whether there was a watch.

    Nothing watches the model again but ``watch``: neither does ``rankwatch run``, which finds models by itself.

    Args:
        model: the model, plain or in whatever wrapper; it need not be the object that ``watch`` was given.

    Raises:
        UsageError: no module.
    """
    root = unwrap(module_and_stage(model, "unwatch")[0])
    leave(root)
    found = [watch for watch in open_watches() if watch.root is root]
    for watch in found:
        watch.close()
    return bool(found)


def asleep() -> Watch:
    """A watch of nothing, for ``RANKWATCH_MODE=disabled``."""
    watch = Watch(nn.Module(), Config())
    watch.close()
    return watch
