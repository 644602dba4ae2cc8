"""Weights on trial: code that is no optimizer writes weights, looks at what comes of them, and takes them back.

A line search rejects a step that overflows, an evolution its worst member, a sampler a proposal. What such weights made bad in a
forward without gradients harms nothing, unless the next forward has them as well: the trip waits for that.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from ...measure.modules import Modules
from ...measure.recorder import PendingFrame, Recorder
from ...measure.tape import Cell, Tape
from ...shared.types.frame import SHARD, Kind, Moment, Phase, State
from ...shared.types.notice import Notice, NoticeKind
from ..batch import BatchPart, BatchState
from ..reporter import FoundTrip
from .cadence import REPEATED
from .optimizer_steps import OptimizerSteps

FAR, NEAR = 1.5, 1.02
"""A weight is another one if its abs max is so many times what it was in the last good forward, or so much less: an optimizer's
step hardly ever does that. NEAR: where none has stepped since. Weights are not measured in each forward, so that they may have
been others there."""

_Weights = list[tuple[str, str, int]]
"""Of each parameter, abs min and abs max, as text, in which an inf is like another one, and what shows that it was written."""


class OnTrial(NamedTuple):
    """A trip that waits; ``weights``: those that made it."""

    found: FoundTrip
    part: BatchPart
    weights: _Weights

    @property
    def moment(self) -> Moment:
        return Moment(self.found.trip.optimizer_step, *self.found.trip.position)


class Trials:
    """``current``: the trial that is not decided yet."""

    def __init__(self, recorder: Recorder, tape: Tape, model: Modules, steps: OptimizerSteps) -> None:
        self.current: OnTrial | None = None
        self._recorder = recorder
        self._tape = tape
        self._model = model
        self._steps = steps
        self._good: BatchPart | None = None
        """The last forward in which nothing was bad, ``_before``: with its weights, if these were asked for."""
        self._before: dict[tuple[int, str], Cell] = {}
        self._now: _Weights = []
        self._count = 0
        self._first, self._told = -1, -REPEATED

    def learn(self, part: BatchPart) -> None:
        """Nothing is bad in a part."""
        if part.batch.is_full and part.loss_of is None and part.frames and part.frames[0].spec.phase is Phase.FORWARD:
            self._good, self._before = part, {}

    def may_be(self, frame: PendingFrame, part: BatchPart) -> bool:
        """Whether the weights of a bad forward are on trial, so that its trip waits. Asked before these are measured anew."""
        good = self._good
        if good is None or part.batch.state is not BatchState.EVAL:
            return False
        cells = self._cells()
        self._now = self._as_text(cells)
        self._before = self._before or _cells_of(good)
        found = [(before, now) for key, before in self._before.items() if (now := cells.get(key)) is not None]
        far = FAR if good.frames[0].step != self._steps.done else NEAR
        # Code that averages weights, and makes nan of them, is a fault.
        is_nan = any(now.state is State.NAN for _, now in found)
        return not is_nan and any(_is_other(before, now, far) for before, now in found)

    def begin(self, found: FoundTrip, part: BatchPart) -> None:
        self.current = OnTrial(found, part, self._now)

    def end(self) -> tuple[OnTrial, bool]:
        """The trial is decided; whether the weights are still those that were tried."""
        trial, self.current = self.current, None
        assert trial is not None
        is_same = self._as_text(self._cells()) == trial.weights
        if not is_same:
            self._recorder.expire_all()
        return trial, is_same

    def notice(self, trial: OnTrial) -> Notice | None:
        """What is told of a trial that was taken back: at most once in ``REPEATED`` batches."""
        trip = trial.found.trip
        batch, spec, row = max(trip.position.batch, 0), trip.frame.spec, trip.culprit
        self._count += 1
        if batch < self._told + REPEATED:
            return None
        self._told, self._first = batch, batch if self._first < 0 else self._first
        about = spec.module, spec.module_class, row.label, row.dtype
        return Notice(NoticeKind.TRIAL, *about, self._first, batch, float(self._count), 0.0, row.state.word)

    def _cells(self) -> dict[tuple[int, str], Cell]:
        """The weights as they are."""
        self._recorder.forget()  # what x.data changes has the version it had
        found = {key: self._recorder.cell(value) for key, value in self._parameters()}
        self._tape.read()
        self._recorder.forget()
        return found

    def _as_text(self, cells: dict[tuple[int, str], Cell]) -> _Weights:
        return [(str(cells[key].low), str(cells[key].high), value._version) for key, value in self._parameters()]

    def _parameters(self) -> Iterator[tuple[tuple[int, str], Tensor]]:
        for named in self._model.modules:
            for name, value in named.module._parameters.items():
                if value is not None:
                    yield (named.number, name), value


def _cells_of(part: BatchPart) -> dict[tuple[int, str], Cell]:
    return {
        (frame.named.number, row.label.partition(SHARD)[0]): cell
        for frame in part.frames
        for row, cell in zip(frame.spec.readings[: frame.weights], frame.cells, strict=False)
        if row.kind is Kind.PARAMETER and cell.state is State.FINITE
    }


def _is_other(before: Cell, now: Cell, far: float) -> bool:
    if not before.high > 0:  # it may just begin to learn
        return False
    return now.is_bad or (now.state is State.FINITE and not before.high / far <= now.high <= before.high * far)
