"""Digests and envelopes against a plain Python computation over the same readings."""

from __future__ import annotations

import math
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwatch.shared.types.frame import (
    DTYPE_MAX,
    NO_LOSS,
    NO_NORM,
    BatchSummary,
    FrameSpec,
    FrameTable,
    Kind,
    ReadingSpec,
    State,
    pack,
)
from rankwatch_monitor.record.numbers import digest
from rankwatch_monitor.record.numbers.digest import Columns, Envelope, RankSummary, summarise
from rankwatch_monitor.record.numbers.layout import DIGEST, NO_ROW, Array, pack_digests, unpack_digests

DTYPES = ["float32", "float16", "bfloat16", "float8_e4m3fn", "float64", "complex64", "int64", ""]
STATES = list(State)
NUMBERS = {State.FINITE, State.INF, State.NOT_FLOAT}
WEIGHT = {State.NAN: 3, State.INF: 2, State.FINITE: 1}


@st.composite
def batches(draw: st.DrawFn) -> tuple[FrameTable, list[RankSummary], list[list[tuple[float, float, State]]]]:
    """A frame table, parts of some ranks, and the same readings as plain numbers."""
    dtypes = draw(st.lists(st.sampled_from(DTYPES), min_size=0, max_size=6))
    kinds = [draw(st.sampled_from(Kind)) for _ in dtypes]
    rows_of = zip(kinds, dtypes, strict=True)
    specs = tuple(FrameSpec(f"layer{i}", "L", (ReadingSpec(kind, "x", d),)) for i, (kind, d) in enumerate(rows_of))
    table = FrameTable(specs)
    parts, readings = [], []
    for rank in draw(st.lists(st.integers(0, 50), min_size=1, max_size=7, unique=True)):
        rows = [draw(_reading(dtype, kind)) for dtype, kind in zip(dtypes, kinds, strict=True)]
        lows, highs = (pack(table.typecode, [row[index] for row in rows]) for index in (0, 1))
        states, memory = bytes(row[2] for row in rows), draw(st.integers(0, 2**60))
        summary = BatchSummary(7, 0, 3, 1.0, 2.0, False, table.id, lows, highs, states, draw(_NORMS), memory)
        parts.append(RankSummary(rank, 11, summary))
        readings.append(rows)
    return table, parts, readings


_NORMS = st.sampled_from([NO_NORM, 0.0, 2.5, 1e300, math.inf])


@st.composite
def _reading(draw: st.DrawFn, dtype: str, kind: Kind) -> tuple[float, float, State]:
    state = draw(st.sampled_from(STATES))
    if state is State.NAN:
        return math.nan, math.nan, state
    if state not in NUMBERS:
        return 0.0, 0.0, state
    most = min(DTYPE_MAX.get(dtype, 2.0**100), 2.0**120)
    floats = st.just(1.0) | st.floats(0, most, width=32)
    numbers = floats.filter(lambda number: number == 0 or number > 1e-30)  # see digest.SCALE
    low, high = sorted((draw(numbers), draw(numbers)))
    high = math.inf if state is State.INF else high
    if kind is Kind.LOSS:  # its first number has its sign
        return draw(st.sampled_from([high, -high] if math.isfinite(high) else [-high])), high, state
    return low, high, state


@given(batches())
def test_a_digest_names_the_reading_that_is_nearest_to_its_limit_and_the_first_bad_one(
    batch: tuple[FrameTable, list[RankSummary], list[list[tuple[float, float, State]]]],
) -> None:
    table, parts, readings = batch
    columns = Columns(5, table)
    digests = summarise(parts, columns, Envelope(columns))
    # Masks are large on purpose, and are passed by keyword or in a buffer.
    dtypes = ["" if row.kind in (Kind.KEYWORD, Kind.BUFFER) else row.dtype for spec in table.specs for row in spec.readings]
    for part, rows, found in zip(parts, readings, digests, strict=True):
        assert (found["rank"], found["batch"], found["seq"], found["table"]) == (part.rank, 7, 11, 5)
        norm = part.summary.gradient_norm
        assert found["norm"] == (min(norm, float(np.finfo(np.float32).max)) if math.isfinite(norm) else norm)
        assert found["memory"] == min(-(-part.summary.memory // 2**20), 2**32 - 1)
        bad = [index for index, row in enumerate(rows) if row[2] in (State.INF, State.NAN)]
        assert (found["bad"], found["bad_row"]) == (len(bad), bad[0] if bad else NO_ROW)
        limits = {"complex64": DTYPE_MAX["float32"], **DTYPE_MAX}
        headroom = [
            math.log2(limits[dtype]) - math.log2(high) if state is State.FINITE and high and dtype in limits else math.inf
            for (_, high, state), dtype in zip(rows, dtypes, strict=True)
        ]
        least = min(headroom, default=math.inf)
        if 190 < least < math.inf:  # below this, value / float32's largest number is not a normal float32
            assert found["headroom"] > 189
            continue
        assert found["headroom"] == pytest.approx(least, abs=1e-3)
        assert least == math.inf or headroom[found["row"]] == pytest.approx(least, abs=1e-3)


@given(batches(), st.integers(1, 3))
def test_an_envelope_has_each_rows_extremes_and_who_has_them(
    batch: tuple[FrameTable, list[RankSummary], list[list[tuple[float, float, State]]]], stacked: int
) -> None:
    table, parts, readings = batch
    columns = Columns(1, table)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digest, "STACKED", stacked)  # merged pieces give the same result
        envelope = Envelope(columns)
        summarise(parts[:1], columns, envelope)
        envelope = Envelope.unpack(envelope.ranks, envelope.pack(), columns)
        summarise(parts[1:], columns, envelope)
    assert envelope.ranks == len(parts)
    of_rank = dict(zip((part.rank for part in parts), readings, strict=True))
    for row in range(table.rows):
        numbers = {rank: rows[row] for rank, rows in of_rank.items() if rows[row][2] in NUMBERS}
        if numbers:
            assert envelope.low[row] == min(low for low, _, _ in numbers.values()) == numbers[envelope.low_rank[row]][0]
            assert envelope.high[row] == max(high for _, high, _ in numbers.values()) == numbers[envelope.high_rank[row]][1]
        else:
            assert (envelope.low[row], envelope.high[row]) == (math.inf, -1)
            assert (envelope.low_rank[row], envelope.high_rank[row]) == (NO_ROW, NO_ROW)
        states = {rank: rows[row][2] for rank, rows in of_rank.items()}
        assert states[envelope.state_rank[row]] == envelope.state[row]
        assert WEIGHT.get(State(envelope.state[row]), 0) == max(WEIGHT.get(state, 0) for state in states.values())


@st.composite
def digests(draw: st.DrawFn) -> Array:
    rows = draw(st.integers(0, 8))
    made = np.zeros(rows, DIGEST)
    for name in DIGEST.names or ():
        dtype = DIGEST[name]
        if dtype.kind == "f":
            numbers = st.floats(width=32) if dtype.itemsize == 4 else st.floats() | st.floats(1.7e9, 1.8e9)
        else:
            bounds = np.iinfo(dtype)
            numbers = st.integers(int(bounds.min), int(bounds.max)) | st.integers(0, 300)
        made[name] = draw(st.lists(numbers, min_size=rows, max_size=rows))
    return made


@given(digests())
def test_packed_digests_are_the_same_unpacked_whole_or_in_part(made: Array) -> None:
    body = pack_digests(made)
    told = unpack_digests(body)
    for name in DIGEST.names or ():
        exact = name not in ("started", "ended") or not np.all(np.abs(made[name]) < 4e12)
        np.testing.assert_allclose(told[name], made[name], rtol=0, atol=0 if exact else 1e-3, equal_nan=True)
    some = unpack_digests(body, ("batch", "headroom"))
    assert some.dtype.names == ("batch", "headroom")
    np.testing.assert_array_equal(some["batch"], made["batch"])
    np.testing.assert_array_equal(some["headroom"], made["headroom"])


@pytest.mark.slow
@given(digests(), st.data())
def test_damaged_digests_are_refused_or_read_but_never_crash(made: Array, data: st.DataObject) -> None:
    body = bytearray(pack_digests(made))
    for _ in range(3):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    with suppress(ValueError):
        unpack_digests(bytes(body[: data.draw(st.integers(0, len(body)))]))


def test_a_damaged_count_of_equal_digests_is_refused_before_memory_is_allocated() -> None:
    body = pack_digests(np.zeros(1, DIGEST))
    with pytest.raises(ValueError, match="are no 16777217"):
        unpack_digests(body[:3] + b"\x01" + body[4:])


@pytest.mark.parametrize("count", [1, 5])
def test_digests_with_a_byte_too_many_are_refused(count: int) -> None:
    made = np.zeros(count, DIGEST)
    made["batch"] = np.arange(count)
    with pytest.raises(ValueError, match=r"instead of \d+"):
        unpack_digests(pack_digests(made) + b"\x00")


def test_packed_digests_are_small() -> None:
    made = np.zeros(4096, DIGEST)
    made["rank"], made["batch"] = np.arange(4096) % 1024, 1000 + np.arange(4096) // 1024
    made["seq"], made["headroom"] = made["batch"] + 1, np.linspace(1, 90, 4096)
    made["started"] = made["ended"] = 1.7e9 + np.arange(4096) / 1024
    assert len(pack_digests(made)) < 22 * 4096


def test_truncated_digests_and_envelopes_are_refused() -> None:
    table = FrameTable((FrameSpec("a", "A", (ReadingSpec(Kind.OUTPUT, "output", "float32"),)),))
    with pytest.raises(ValueError, match="digests of 7 bytes"):
        unpack_digests(bytes(7))
    with pytest.raises(ValueError, match=r"an envelope of 22 bytes instead of 21|buffer"):
        Envelope.unpack(1, bytes(22), Columns(1, table))


@given(batches())
def test_a_digest_has_the_largest_loss_as_the_collector_reads_it(
    batch: tuple[FrameTable, list[RankSummary], list[list[tuple[float, float, State]]]],
) -> None:
    table, parts, readings = batch
    columns = Columns(5, table)
    digests = summarise(parts, columns, Envelope(columns))
    for part, rows, found in zip(parts, readings, digests, strict=True):
        losses = [rows[row][0] for row in table.losses if rows[row][2] in (State.FINITE, State.INF, State.NAN)]
        expected = math.nan if any(map(math.isnan, losses)) else max(losses, default=NO_LOSS)
        assert part.summary.loss(table) == pytest.approx(expected, nan_ok=True)
        assert found["loss"] == pytest.approx(expected, nan_ok=True)
        assert (found["loss"] == NO_LOSS) == (part.summary.loss(table) == NO_LOSS) == (not losses)
