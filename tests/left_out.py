"""Ranks that leave out bad steps: what they send, and the record of such a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import makers
from desk import Desk, connected
from rankwatch.shared.types import messages
from rankwatch.shared.types.frame import FrameTable, Kind, Moment, Phase
from rankwatch.shared.types.trip import LeftOut, Operator, Source, Trip
from rankwatch_monitor.record.schema import FILE
from rankwatch_monitor.record.store import Store

FRAMES = 4
"""Of a batch's forward and backward; each step has one batch."""

GRADIENT = makers.reading("weight.grad", makers.NAN, kind=Kind.GRADIENT)

LEFT_OUT = LeftOut(restored=("bn.running_mean",), budget_left=2, most=3, of=128)
REFUSED = LeftOut("3 of the last 128 steps were left out", most=3, of=128)

TOLD = "2 steps were left out: batch 4 (rank 1, layer: invalid), batch 9 (rank 0, layer: invalid)"
"""Of the run that ``trained`` has."""


def guilty(step: int, frame: int = 1, left_out: LeftOut | None = LEFT_OUT, within: float = 0.0, line: int = 41) -> Trip:
    """In the forward of this step a division made nan, at this line."""
    operator = Operator(
        "aten.div.Tensor", (), makers.reading("output", makers.NAN), source=Source("train.py", line, "f", "")
    )
    trip = makers.trip(makers.reading("output", makers.NAN), at=(step, 0, frame), step=step)
    trip = replace(trip, operator=operator, closeup_within=within)
    return replace(trip, left_out=left_out, first_of_step=step, looked_at=end_of(step))


def innocent(step: int, left_out: LeftOut | None = LEFT_OUT) -> Trip:
    """The nan came to this rank by the reduction of the gradients."""
    trip = makers.trip(GRADIENT, at=(step, 0, FRAMES - 1), step=step, phase=Phase.BACKWARD)
    trip = replace(trip, guarded=True, unfound="run again, this rank's own gradient was finite", received="all_reduce")
    return replace(trip, left_out=left_out, first_of_step=step, looked_at=end_of(step))


def end_of(step: int) -> Moment:
    return Moment(step, step, 0, FRAMES)


def passes(step: int) -> messages.Beat:
    """A rank is in the step after this one."""
    at = Moment(step + 1, step + 1, 0, 1)
    return messages.Beat(at, "forward", 0, 0, 1000.0, first_of_step=step + 1, settled=at)


def trained(steps: int = 12, *, ends: bool = True) -> Desk:
    """Two ranks that have left out steps 4 and 9, of which rank 1 and rank 0 were guilty, and that went on."""
    desk = connected(2)
    bad = {4: 1, 9: 0}
    desk.receive((0, 1), messages.Table(FrameTable((makers.ROOT_LOSS,))))
    for step in range(steps):
        for rank in (0, 1):
            desk.receive(rank, replace(makers.loss_batch(step, 2.0 / (step + 1)), seq=10 * step + 1))
        if step in bad:
            culprit = bad[step]
            desk.receive(culprit, messages.Tripped(10 * step + 2, guilty(step, within=5.0, line=step)))
            desk.receive(1 - culprit, messages.Tripped(10 * step + 2, innocent(step)))
            desk.receive(culprit, messages.LookedCloser(10 * step + 3, makers.closeup(operator=None)))
    if ends:
        desk.receive((0, 1), messages.Bye(10 * steps, "finished", "", end_of(steps - 1)))
    return desk


def write(folder: Path, *, ends: bool = True) -> Path:
    """Writes the record of this run into a folder ``train-0``, which it returns."""
    run = folder / "train-0"
    run.mkdir(parents=True)
    store = Store(run / FILE)
    store.write(trained(ends=ends).records["train-0"], 1000.0)
    store.close()
    return run
