"""Where a trip came from, by a record in which most batches have readings of the root alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import records
from makers import NAN, frame, reading, trip
from rankwatch.shared.types import messages
from rankwatch.shared.types.frame import Frame
from rankwatch_monitor.decide.core.journal import NO_RANK, Entry, JobEnded
from rankwatch_monitor.decide.trip.began import TripOrigin
from rankwatch_monitor.record import replay

JUMPED, TRIPPED = 323, 337


def batch_of(number: int, every: int) -> list[Frame]:
    """The layer's output is a million times larger and more from ``JUMPED`` on. The root's never is."""
    high = (1.0 + number % 7 / 50) * (1e30 if number >= JUMPED else 1.0)
    layer, root = frame(reading("output", high), at=(number, 0, 0)), frame(reading("output"), at=(number, 0, 1), module="")
    return [layer, root] if number % every == 0 else [root]


def origin(folder: Path, every: int) -> TripOrigin:
    parts = [records.part(0, *batch_of(number, every), step=number, seq=number + 1) for number in range(TRIPPED)]
    bad = batch_of(TRIPPED, 1)[0], frame(reading("output", NAN), at=(TRIPPED, 0, 1), module="")
    found = replace(trip(reading("output", NAN), at=(TRIPPED, 0, 1)), frames=bad, optimizer_step=TRIPPED)
    run = records.write(folder, world_size=1)
    records.add(run, *parts, Entry(2.0, 0, messages.Tripped(TRIPPED + 1, found)), Entry(9.0, NO_RANK, JobEnded(1)))
    report = records.read(run / "run.db", lambda record: replay.take(record).report)
    assert report.origin is not None
    return report.origin


@pytest.mark.parametrize("every", [1, 2, 8, 16, 64])
def test_it_began_in_the_next_full_batch(tmp_path: Path, every: int) -> None:
    began = origin(tmp_path / "run", every).began
    assert began is not None
    assert (began.rank, began.module, began.label) == (0, "layer", "output")
    assert began.batch == min(TRIPPED, -(-JUMPED // every) * every)
    assert began.factor == pytest.approx(1e30, rel=0.2)
