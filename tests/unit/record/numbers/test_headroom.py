"""The headroom of modules, from the envelopes of a record and from arrays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import makers
from rankwatch.shared.types.frame import FrameTable, Kind, Phase, State
from rankwatch_monitor.record.numbers.digest import Envelope
from rankwatch_monitor.record.numbers.headroom import Headroom, Readings, choose, last_batches, merge, pace_of, recent_of
from rankwatch_monitor.record.numbers.layout import DIGEST
from rankwatch_monitor.record.numbers.rows import EnvelopeKey

FRAMES = (
    makers.frame(makers.reading("weight", dtype="float16"), makers.reading("output", dtype="float16"), module="a"),
    makers.frame(
        makers.reading("input[mask]", dtype="float16", kind=Kind.KEYWORD),
        makers.reading("weight.grad zeros", kind=Kind.GRADIENT),
        makers.reading("output", dtype="float16"),
        module="b",
    ),
    makers.frame(makers.reading("output", dtype="int64"), module="c"),
    makers.frame(makers.reading("output", dtype="float16"), module="a", phase=Phase.RECOMPUTE),
)
READINGS = Readings(1, FrameTable(tuple(frame.spec for frame in FRAMES)))


def envelope(*highs: float, states: bytes = bytes(7), rank: int = 3) -> Envelope:
    made = Envelope(READINGS.columns)
    columns = np.array([highs], made.high.dtype)
    made.add(np.array([rank], np.uint32), columns, columns, np.frombuffer(states, np.uint8).reshape(1, -1))
    return made


def test_each_module_has_its_output_with_the_least_headroom() -> None:
    now = envelope(2.0, 655.04, 65504.0, 1.0, 6.5504, 9e9, 60000.0)
    a, b = READINGS.nearest(7, now, None, 10)
    assert (a.module, a.label, a.rank, a.batch, a.growth) == ("a", "output", 3, 7, None)
    assert a.times == pytest.approx(100.0, rel=1e-3)
    assert (b.module, b.label) == ("b", "output")
    assert b.times == pytest.approx(10_000, rel=1e-3)
    assert [one.module for one in READINGS.nearest(7, now, None, 1)] == ["a"]


def test_growth_from_batch_to_batch() -> None:
    now, before = envelope(1, 8, 0, 0, 1, 0, 0), envelope(1, 1, 0, 0, 1, 0, 0)
    a, b = READINGS.nearest(9, now, (6, before), 10)
    assert a.growth == pytest.approx(2.0)
    assert b.growth == pytest.approx(1.0)


@given(st.integers(1, 64), st.floats(0.9, 1.1), st.integers(130, 400))
def test_growth_is_by_the_batch_where_few_are_measured(every: int, growth: float, last: int) -> None:
    """The forecast is that of a training whose batches are all measured, also beside parts of the root alone."""
    highs = [1e-2 * growth ** (batch - last) for batch in range(last + 1)]
    keys = [EnvelopeKey(batch, 0, 2, 4) for batch in range(last + 1)]
    keys += [EnvelopeKey(batch, 0, 1, 4) for batch in range(0, last + 1, every)]
    chosen = {now.table: (now, before) for now, before in choose(sorted(keys, reverse=True)[:512])}
    now, before = chosen[1]
    assert before is not None
    assert now.batch == last // every * every
    high, earlier = (envelope(0, highs[one.batch], 0, 0, 0, 0, 0) for one in (now, before))
    (found,) = READINGS.nearest(now.batch, high, (before.batch, earlier), 10)
    assert found.growth == pytest.approx(growth, rel=1e-4)


def test_an_inf_comes_first() -> None:
    states = bytes([0, 0, 0, 0, State.INF, 0, 0])
    first, second = READINGS.nearest(1, envelope(1, 8, 0, 0, makers.INF, 0, 0, states=states, rank=5), None, 10)
    assert (first.module, first.times, first.state, first.rank) == ("b", 0.0, State.INF, 5)
    assert second.module == "a"


def test_the_chosen_batch_was_reported_by_all_ranks() -> None:
    places = [EnvelopeKey(batch, 0, 1, 2 if batch == 40 else 8) for batch in range(40, -1, -1)]
    root = [EnvelopeKey(40, 0, 2, 8)]
    assert choose([*root, *places]) == [(root[0], None), (EnvelopeKey(39, 0, 1, 8), EnvelopeKey(23, 0, 1, 8))]
    assert choose([]) == []


def test_of_a_module_in_many_tables_the_newest_counts() -> None:
    one = Headroom(5, "a", "Linear", Phase.FORWARD, "output", "float16", 1.0, 0, State.FINITE, 10.0, None)
    newer, other = one._replace(batch=6, times=20.0), one._replace(module="b", times=12.0)
    assert merge([one, newer, other], 5) == [other, newer]
    assert merge([newer, one, other], 1) == [other]


def test_the_pace_comes_from_the_furthest_rank() -> None:
    digests = np.zeros(44, DIGEST)
    digests["rank"] = [0, 1] * 22
    digests["batch"] = np.arange(44) // 2 - (digests["rank"] == 1)
    digests["ended"] = 1e9 + digests["batch"] * 0.5 + 7000.0 * digests["rank"]  # clocks of different hosts are not compared
    assert pace_of(digests) == pytest.approx(2.0)
    assert last_batches(digests[:20]) == {0: 9, 1: 8}
    digests["first_frame"] = np.where(digests["batch"] % 10, 13, 0)  # of most batches, only the root was measured
    assert pace_of(digests) == pytest.approx(2.0)
    assert pace_of(digests[:1]) is None
    assert pace_of(digests[:0]) is None


OF_DTYPES = [
    makers.frame(makers.reading("output", dtype=dtype), module=module).spec
    for module, dtype in (("a", "bfloat16"), ("b", "float32"), ("c", "float16"))
]
WIDE = Readings(1, FrameTable(tuple(OF_DTYPES)))


def test_where_a_dtype_ends_far_away_the_change_counts() -> None:
    def seen(*highs: float) -> Envelope:
        made, columns = Envelope(WIDE.columns), np.array([highs], np.float32)
        made.add(np.array([0], np.uint32), columns, columns, np.zeros((1, 3), np.uint8))
        return made

    recent = [seen(1.0, 1000.0, 10.0), seen(2.0, 0.0, 10.0), seen(4.0, 1000.0, 10.0)]
    b, a, c = WIDE.nearest(9, seen(4.0, 64000.0, 20.0), None, 10, recent)
    assert [one.module for one in (a, b, c)] == ["a", "b", "c"]
    assert [one.change for one in (a, b, c)] == pytest.approx([1.0, 6.0, 1.0])
    assert [one.is_narrow for one in (a, b, c)] == [False, False, True]
    c, *_ = WIDE.nearest(9, seen(4.0, 64000.0, 30000.0), None, 10, recent)
    assert c.module == "c"
    assert c.times == pytest.approx(65504 / 30000)
    assert [one.change for one in WIDE.nearest(9, seen(1.0, 1.0, 1.0), None, 10)] == [None] * 3


def test_what_is_usual_comes_from_the_batches_right_before() -> None:
    keys = [EnvelopeKey(batch, 0, 1, 4 if batch == 38 else 8) for batch in range(40, -1, -1)]
    other = [EnvelopeKey(39, 0, 2, 8)]
    assert [key.batch for key in recent_of([*other, *keys], keys[1])] == [37, 36, 35, 34, 33, 32, 31, 30]
    assert recent_of(keys, keys[-1]) == []


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_what_has_no_limit_may_be_inf() -> None:
    """A row of integers has none: numpy's warning on inf / inf would stand between the lines of a report."""
    nearest = READINGS.nearest(7, envelope(1.0, 1.0, np.inf, 0.0, 1.0, np.inf, 1.0), None, 10)
    assert [one.module for one in nearest] == ["a", "b"]
