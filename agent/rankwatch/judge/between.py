"""Batches between those that are measured in full (``every=K``): once one of them shows something bad, it is run again, measured.

Of such a batch only the root's output, the loss and the gradients before a step are looked at. When its forward runs again,
what the root was given is at hand, and the weights are those of the batch: each module shows what it would have shown.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import NamedTuple

from torch import nn

from ..measure.modules import Modules
from ..measure.recorder import Call, PendingFrame, Recorder
from ..measure.sweep import Sweep
from ..measure.tape import Tape
from ..rerun.careful import Careful
from ..rerun.engine import Rerun
from ..rerun.forward import Forward, RootEntry
from ..rerun.limit import Limit
from ..shared.types.frame import Kind, Phase, Position
from ..touch.parts import buffers_in
from ..touch.torch_private import without_modes
from .batch import BatchInProgress
from .policy import Judge
from .steps.held import is_measure, is_trained
from .steps.optimizer_steps import OptimizerSteps

log = logging.getLogger(__name__)

MAX_SECONDS = 30.0
"""Within which a forward is run again. The other ranks may wait for this one in a collective meanwhile."""


class RunAgain(NamedTuple):
    """The frames of a forward that was run again: up to the first one that trips if it ``is_bad``, else all. ``call`` is that of
    the last one. ``measure``: the same up to the first measure that trips, where a later frame does so too."""

    frames: list[PendingFrame]
    call: Call
    is_bad: bool
    measure: RunAgain | None = None


class UnmeasuredBatchRerun:
    """Runs forwards again of which only the root was measured."""

    def __init__(self, recorder: Recorder, tape: Tape, sweep: Sweep, steps: OptimizerSteps, model: Modules) -> None:
        self._recorder = recorder
        self._tape = tape
        self._sweep = sweep
        self._steps = steps
        self._model = model

    def measure(self, batch: BatchInProgress, entry: RootEntry | None, judge: Judge) -> RunAgain | None:
        """Runs the forward of a batch again. None: there is no need, it was before, it cannot be, or was not to its end."""
        if batch.is_full or batch.is_run_again or entry is None:
            return None
        batch.is_run_again = True
        try:
            return self._look(batch, entry, judge)
        except Exception:
            log.exception("rankwatch: an error of its own as it ran a batch again; the trip is reported at the root")
            return None

    def _look(self, batch: BatchInProgress, entry: RootEntry, judge: Judge) -> RunAgain | None:
        args, kwargs = batch.root_call or (entry.args, entry.kwargs)
        forward = Forward(entry.module, args, kwargs, "output", entry=entry)
        if why := forward.refusal:
            log.debug("the forward of batch %d is not run again: %s", batch.began.batch, why)
            return None
        self._sweep.look(batch.began.batch, self._steps.done)  # weights that have gone bad are measured anew
        limit = Limit(time.monotonic() + MAX_SECONDS)
        found = self._run(forward, batch.began, judge, limit, grad=entry.has_gradients)
        if found is None and entry.has_gradients:  # there may be no memory for a second graph
            found = self._run(forward, batch.began, judge, limit, grad=False)
        return found

    def _run(self, forward: Forward, began: Position, judge: Judge, limit: Limit, *, grad: bool) -> RunAgain | None:
        named = {id(one.module): one for one in self._model.awake()}
        if id(forward.module) not in named:
            return None
        mode = Careful([*buffers_in(forward.module)], limit)
        frames: list[PendingFrame] = []
        last: Call = (), {}, None
        is_bad = False
        measure: RunAgain | None = None

        def watch(key: nn.Module | str, call: Call) -> None:
            nonlocal last, is_bad, measure
            if mode.stopped:  # and the user's code has caught that
                return
            with without_modes():
                at = began._replace(frame=began.frame + len(frames))
                if isinstance(key, str):
                    frame = self._recorder.values(at, self._model.running(), [(Kind.MARKED, key, call[-1])])
                elif id(key) in named:
                    frame = self._recorder.call(at, named[id(key)], Phase.FORWARD, *call)
                else:
                    return
                frames.append(frame)
                self._tape.read()
            last, tripping = call, judge.tripping(frame.spec, frame.states)
            if tripping and is_measure(frame, tripping) and is_trained(frames, at):
                measure = measure or RunAgain([*frames], call, True)
            elif tripping:
                is_bad = True
                mode.stop("it has come to where it is bad")

        self._recorder.forget()
        ran = Rerun(forward, mode, watch).forward(grad=grad)
        # Of a rerun that failed nothing is used: the trip is told all the same, of the root alone.
        if measure is not None and not is_bad:
            return measure
        return RunAgain(frames, last, is_bad, measure) if is_bad or ran.values is not None else None


def not_again(frame: PendingFrame, again: PendingFrame) -> PendingFrame:
    """The root's frame of the second run, with the output's readings of the first. If these are others: the first run's frame."""
    made = [row for row in frame.spec.readings if row.kind is Kind.OUTPUT]
    if made != [row for row in again.spec.readings if row.kind is Kind.OUTPUT]:
        frame.position = again.position
        return frame
    first = len(again.cells) - len(made)  # the outputs come last
    return replace(again, cells=again.cells[:first] + frame.cells[len(frame.cells) - len(made) :])
