"""The readings of a batch's parts as named scalars."""

from __future__ import annotations

import math

from makers import INF, NAN, frame, reading
from rankwatch.shared.types.frame import BatchSummary, Frame, FrameTable, Phase, State, pack
from rankwatch.shared.words.scalars import LastBatch, name_rows


def part(*frames: Frame, batch: int = 3, first: int = 0) -> tuple[FrameTable, BatchSummary]:
    table = FrameTable(tuple(one.spec for one in frames))
    low, high = [x for one in frames for x in one.abs_min], [x for one in frames for x in one.abs_max]
    states = b"".join(one.states for one in frames)
    columns = pack(table.typecode, low), pack(table.typecode, high), states
    return table, BatchSummary(batch, first, 0, 0.0, 0.0, False, table.id, *columns)


def test_each_measured_reading_has_its_extremes() -> None:
    last = LastBatch()
    unmeasured = reading("input[1]")._replace(state=State.NONE)
    last.add(*part(frame(reading("output", 2.0), unmeasured, module=""), frame(reading("output", INF), module="up.0")))
    assert last.scalars() == {
        "abs_max/(root)/output": 2.0, "abs_min/(root)/output": 0.5,
        "abs_max/up.0/output": INF, "abs_min/up.0/output": 0.5,
    }  # fmt: skip
    last.add(*part(frame(reading("output", NAN), module="up.0"), batch=4))
    found = last.scalars()
    assert found.keys() == {"abs_max/up.0/output", "abs_min/up.0/output"}
    assert math.isnan(found["abs_max/up.0/output"])


def test_the_backward_joins_only_its_own_forward() -> None:
    last = LastBatch()
    assert last.scalars() == {}
    last.add(*part(frame(reading("output", 1.0)), batch=3))
    last.add(*part(frame(reading("output", 2.0)), batch=4))
    last.add(*part(frame(reading("grad_output", 9.0), phase=Phase.BACKWARD), batch=3, first=1))
    last.add(*part(frame(reading("grad_output", 8.0), phase=Phase.BACKWARD), batch=4, first=1))
    assert {name: value for name, value in last.scalars().items() if name.startswith("abs_max")} == {
        "abs_max/layer/output": 2.0,
        "abs_max/layer/grad_output": 8.0,
    }


def test_calls_and_recomputations_are_distinguished() -> None:
    one, again = frame(reading("output")).spec, frame(reading("output"), phase=Phase.RECOMPUTE).spec
    assert name_rows([one, one, again]) == ["layer/output", "layer (call 2)/output", "layer (recomputed)/output"]
