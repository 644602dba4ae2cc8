"""Frames, tables and summaries."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import makers
from rankwatch.shared.types.frame import BatchSummary, FrameTable, Phase, Position, State, pack, state_of, unpack


def test_positions_are_ordered_by_batch_then_eval_then_frame() -> None:
    assert Position(1, 0, 9) < Position(1, 1, 0) < Position(2, 0, 0)
    assert Position(-1, 3, 5) < Position(0, 0, 0)


@given(st.lists(st.floats(width=32)), st.sampled_from("fd"))
def test_columns_round_trip(values: list[float], typecode: str) -> None:
    assert str(list(unpack(typecode, pack(typecode, values)))) == str(values)


def test_half_an_item_is_refused() -> None:
    with pytest.raises(ValueError, match="whole 'f' items"):
        unpack("f", b"12345")


def test_a_tables_name_depends_on_its_content() -> None:
    one = makers.frame(module="a.b").spec
    other = makers.frame(module="a").spec
    assert FrameTable((one,)).id == FrameTable((makers.frame(module="a.b").spec,)).id
    assert len({FrameTable(specs).id for specs in ((one,), (other,), (one, other), (other, one), ())}) == 5


def test_float64_anywhere_widens_the_whole_table() -> None:
    narrow, wide = makers.frame(makers.reading("output")).spec, makers.frame(makers.reading("output", dtype="float64")).spec
    assert FrameTable((narrow, narrow)).typecode == "f"
    assert FrameTable((narrow, wide)).typecode == "d"


def test_a_summary_gives_its_frames_back() -> None:
    table = FrameTable((makers.frame(makers.reading("weight"), makers.reading("output")).spec, makers.frame().spec))
    summary = BatchSummary(
        7, 0, 3, 0.0, 1.0, False, table.id, pack("f", [1, 2, 3]), pack("f", [4, 5, makers.INF]), bytes([0, 0, State.INF])
    )
    first, second = summary.frames(table)
    assert (first.position, second.position) == (Position(7, 0, 0), Position(7, 0, 1))
    found = [(r.label, r.abs_min, r.abs_max, r.state) for r in (*first.readings, *second.readings)]
    finite = [("weight", 1, 4, State.FINITE), ("output", 2, 5, State.FINITE)]
    assert found == [*finite, ("output", 3, makers.INF, State.INF)]


def test_the_frames_of_a_later_part_continue_the_count() -> None:
    assert [frame.position for frame in makers.summary(7, first=40).frames(makers.table())] == [(7, 0, 40), (7, 0, 41)]


def test_the_phase_is_part_of_a_tables_name() -> None:
    tables = {FrameTable((makers.frame(phase=phase).spec,)).id for phase in Phase}
    assert len(tables) == len(Phase)


def test_a_summary_that_does_not_fit_its_table_is_refused() -> None:
    with pytest.raises(ValueError, match="against 1 rows"):
        list(makers.summary().frames(FrameTable((makers.frame().spec,))))


def test_states() -> None:
    assert state_of(0.0, 1.0) is State.FINITE
    assert state_of(0.0, makers.INF) is State.INF
    assert state_of(makers.NAN, makers.NAN) is State.NAN
