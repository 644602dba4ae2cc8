"""Two batches side by side."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

import makers
import records
from makers import INF, NAN, frame, reading
from rankwatch.errors import UsageError
from rankwatch.shared.types.frame import DTYPE_MAX, BatchSummary, Frame, FrameTable, Kind, Phase, State, pack
from rankwatch_monitor.decide.core.journal import NO_RANK, Entry, Opened, Trained, Waited
from rankwatch_monitor.record.reader import RunRecord
from rankwatch_monitor.record.schema import FILE
from rankwatch_monitor.record.store import Limits, Store
from rankwatch_monitor.views.batches import diff
from rankwatch_monitor.views.batches.compare import Difference, compare
from rankwatch_monitor.views.batches.diff import NothingToCompare, Side


def batch(*values: float, phase: Phase = Phase.FORWARD) -> list[Frame]:
    """One frame for each value (its abs max), in modules a, b, c, ..."""
    return [
        frame(reading("output", value), at=(0, 0, index), module="abcdefgh"[index], phase=phase)
        for index, value in enumerate(values)
    ]


def test_the_first_difference_is_the_first_in_order_and_the_largest_comes_next() -> None:
    found = compare(batch(1.0, 1.2, 2.0, 9.0), batch(1.0, 1.0, 4.0, 1.0))
    assert found.first is not None
    assert (found.first.spec.module, found.first.ratio) == ("c", 2.0)
    assert [(pair.spec.module, pair.ratio) for pair in found.largest(8)] == [("d", 9.0), ("c", 2.0)]
    assert [pair.spec.module for pair in found.largest(1)] == ["d"]


@pytest.mark.parametrize(
    ("left", "right", "ratio"),
    [(1.0, INF, math.inf), (NAN, INF, math.inf), (NAN, NAN, 1.0), (INF, INF, 1.0), (0.0, 0.0, 1.0), (0.0, 1e-30, math.inf)],
)
def test_ratios_with_inf_nan_and_zero(left: float, right: float, ratio: float) -> None:
    (pair,) = compare(batch(left), batch(right)).pairs
    assert pair.ratio == ratio


def test_frames_are_aligned_by_module_phase_and_call() -> None:
    twice = [frame(reading("output", value), at=(0, 0, n), module="shared") for n, value in enumerate((1.0, 4.0))]
    found = compare(twice, [*twice[:1], *batch(7.0, phase=Phase.BACKWARD)])
    assert (found.left_frames, found.right_frames, found.only_left, found.only_right) == (2, 2, 1, 1)
    pairs = [(pair.spec.module, pair.call, pair.ratio) for pair in found.pairs]
    assert pairs == [("shared", 0, 1.0), ("shared", 1, 1.0), ("a", 0, 1.0)]
    assert found.first is None


def test_a_reading_that_one_side_lacks_is_not_a_difference_of_numbers() -> None:
    found = compare([frame(reading("output"), reading("bias", 5.0))], [frame(reading("output"))])
    pairs = [(pair.label, pair.right is None, pair.ratio) for pair in found.pairs]
    assert pairs == [("output", False, 1.0), ("bias", True, 1.0)]


GRADIENT, OUTPUT, FINITE = Kind.GRADIENT, Kind.OUTPUT, State.FINITE
ONE, FOUR = (OUTPUT, FINITE, 1.0), (OUTPUT, FINITE, 4.0)


def of_kind(kind: Kind, *values: float, dtype: str = "float32", label: str = "x") -> list[Frame]:
    return [
        frame(reading(label, value, kind=kind, dtype=dtype), at=(0, 0, at), module="abcdefgh"[at])
        for at, value in enumerate(values)
    ]


def of_states(*readings: tuple[Kind, State, float]) -> list[Frame]:
    """One frame for each reading in this state, in modules a, b, c, ..."""
    return [
        frame(records.odd("x", state, kind=kind, number=number, dtype="float32"), at=(0, 0, at), module="abcdefgh"[at])
        for at, (kind, state, number) in enumerate(readings)
    ]


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (of_kind(GRADIENT, 0.0, 1.0, 1.0), of_kind(GRADIENT, 1e-3, 1.0, 4.0)),  # a gradient of zeros
        (of_kind(GRADIENT, 1e-3, 1.0, 1.0), of_kind(GRADIENT, 0.0, 1.0, 4.0)),
        (of_kind(GRADIENT, 1e-30, 1.0, 1.0), of_kind(GRADIENT, 1e-3, 1.0, 4.0)),  # as good as zero
        (of_kind(OUTPUT, 0.0, 1.0, 1.0), of_kind(OUTPUT, 2.0, 1.0, 4.0)),
        (of_states((OUTPUT, State.EMPTY, 0.0), ONE), of_kind(OUTPUT, 2.0, 4.0)),  # no token came
        (of_states((OUTPUT, State.NONE, 0.0), ONE), of_kind(OUTPUT, 2.0, 4.0)),
        (of_states((OUTPUT, State.UNMATERIALISED, 0.0), ONE), of_kind(OUTPUT, 2.0, 4.0)),
        # the ids of tokens
        (of_states((Kind.INPUT, State.NOT_FLOAT, 3.0), ONE), of_states((Kind.INPUT, State.NOT_FLOAT, 5e4), FOUR)),
        # a mask, and one of -inf
        (of_states((Kind.KEYWORD, FINITE, 1.0), ONE), of_states((Kind.KEYWORD, FINITE, DTYPE_MAX["float32"]), FOUR)),
        (of_states((Kind.INPUT, FINITE, 0.0), ONE), of_states((Kind.INPUT, State.INF, INF), FOUR)),
        (of_kind(OUTPUT, NAN, 1.0), of_kind(OUTPUT, INF, 4.0)),
        (
            [*of_kind(GRADIENT, 1e-4, label="weight.grad zeros"), frame(reading("x"), at=(0, 0, 1), module="b")],  # a share
            [*of_kind(GRADIENT, 0.5, label="weight.grad zeros"), frame(reading("x", 4.0), at=(0, 0, 1), module="b")],
        ),
    ],
)
def test_what_makes_a_ratio_infinite_or_meaningless_does_not_stand_first(left: list[Frame], right: list[Frame]) -> None:
    for one, other in ((left, right), (right, left)):
        found = compare(one, other)
        assert found.first is not None
        assert found.first.ratio == 4.0
        meaningless, *_ = (pair for pair in found.largest(8) if pair.ratio != 4.0)
        assert found.largest(8)[0].ratio == 4.0
        assert meaningless.difference > Difference.NUMBERS
        text = diff.render(found, "x", "y")
        assert f"a (Linear), {meaningless.label} (" in text  # it is said, below
        assert text.index("x4 ") < text.index("a (Linear), ")


def test_what_went_bad_stands_before_every_ratio_in_the_order_in_which_it_ran() -> None:
    found = compare(batch(1.0, 1.0, 1.0, 1.0), batch(1e9, INF, NAN, 2.0))
    assert [pair.spec.module for pair in found.largest(8)] == ["b", "c", "a", "d"]
    gone = compare(of_states((GRADIENT, State.NONE, 0.0)), of_kind(GRADIENT, NAN))
    assert [pair.difference for pair in gone.largest(8)] == [Difference.WENT_BAD]


def test_a_whole_side_that_is_small_is_compared_as_any_other() -> None:
    found = compare(of_kind(GRADIENT, 1e-20, 1e-20), of_kind(GRADIENT, 1e-20, 1.0))
    (pair,) = found.largest(8)
    assert pair.ratio == pytest.approx(1e20)
    assert pair.difference is Difference.NUMBERS


def test_where_nothing_else_differs_zeros_are_still_said() -> None:
    found = compare(of_kind(GRADIENT, 0.0, 1.0), of_kind(GRADIENT, 2.0, 1.0))
    assert found.first is not None
    text = diff.render(found, "x", "y")
    assert "first      frame 0, a (Linear), x: 0.00e+00 and 2.00e+00" in text
    assert "zero, or next to it, on one side: a (Linear), x (0.00e+00 and 2.00e+00)\n" in text
    assert "ratio" not in text


def test_as_text() -> None:
    found = compare(batch(1.0, 2.0, 3.0), batch(1.0, 6.0, INF))
    text = diff.render(found, "rank 0", "rank 1", lines=1)
    assert "first      frame 1, b (Linear), output: 2.00e+00 and 6.00e+00" in text
    assert text.endswith("      inf  3.00e+00       inf  c (Linear), output\nand 1 more that differ: --frames 2\n")
    alike = diff.render(compare(batch(1.0), batch(1.0)), "x", "y")
    assert alike.startswith("rankwatch: no reading differs by more than half\n")


def test_the_json_is_strict() -> None:
    body = json.loads(diff.to_json(compare(batch(1.0), batch(NAN)), "x", "y"), parse_constant=pytest.fail)
    assert body["first"]["right"] == {"abs_min": None, "abs_max": None, "state": "nan"}
    assert body["first"]["ratio"] is None


# --- which two ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two ranks; rank 0 has batches 0 to 3, its last one in two parts, and rank 1 has 0 to 2."""
    folder = tmp_path / "train-0"
    folder.mkdir()
    table, later = FrameTable((frame().spec,)), FrameTable((frame(module="layer", phase=Phase.BACKWARD).spec,))
    entries = [Entry(0.0, NO_RANK, Opened("train", 0, 2))]
    for rank, batches in ((0, 4), (1, 3)):
        entries += [Entry(0.0, rank, Trained(n + 1, _summary(n, 1.0 + rank + n, table), table)) for n in range(batches)]
    entries.append(Entry(0.0, 0, Trained(9, _summary(3, 9.0, later, first=1), later)))
    records.add(folder, *entries, at=0.0)
    return folder


def sides(runs: Sequence[Path], ranks: Sequence[int], batches: Sequence[int]) -> tuple[Side, Side]:
    with ExitStack() as stack:
        return diff.sides([stack.enter_context(RunRecord(run / FILE)) for run in runs], ranks, batches)


def _summary(number: int, high: float, table: FrameTable, first: int = 0) -> BatchSummary:
    return makers.summary(number, first=first, of=table)._replace(abs_max=pack("f", [high]))


def test_two_ranks_are_compared_in_the_last_batch_that_both_have(run: Path) -> None:
    left, right = sides([run], [0, 1], [])
    assert (left.name, right.name) == ("rank 0, batch 2 of train-0", "rank 1, batch 2 of train-0")
    assert [side.frames[0].abs_max for side in (left, right)] == [(3.0,), (4.0,)]


def test_two_batches_and_two_runs(run: Path) -> None:
    left, right = sides([run], [0], [1, 3])
    assert [[f.abs_max[0] for f in side.frames] for side in (left, right)] == [[2.0], [4.0, 9.0]]
    assert [f.position.frame for f in right.frames] == [0, 1]
    left, right = sides([run, run], [1], [])
    assert left == right


@pytest.mark.parametrize(
    ("ranks", "batches", "complaint"),
    [
        ([7], [], "there is nothing to compare: no batch of rank 7 is stored as it sent it"),
        ([0, 1, 1], [], "a comparison has two sides"),
        ([0, 1], [3], "batch 3 of rank 1 is not kept whole in .*train-0: kept are 0-2"),
        ([0, 7], [1], "batch 1 of rank 7 is not kept whole in .*train-0: none of this rank is"),
        ([0, 7], [], "no batch is kept whole of both rank 0 of .* and rank 7"),
    ],
)
def test_an_impossible_comparison_is_refused(run: Path, ranks: list[int], batches: list[int], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        sides([run], ranks, batches)


def test_a_batch_that_is_dropped_meanwhile_is_still_compared_whole(run: Path) -> None:
    with RunRecord(run / FILE) as record:
        assert record.sent_batches(0) == [0, 1, 2, 3]
        # The collector drops summaries between the listing and the reading.
        Store(run / FILE, Limits(summaries=0)).write([], 1.0)
        left, right = diff.sides([record], [0, 1], [])
    assert [side.frames[0].abs_max for side in (left, right)] == [(3.0,), (4.0,)]
    with pytest.raises(UsageError, match="no batch is kept whole of both"):
        sides([run], [0, 1], [])


def test_alone_a_run_shows_the_culprits_batch_beside_the_last_good_one(tmp_path: Path) -> None:
    def tripped(rank: int, batch: int) -> Entry:
        last = makers.frame(makers.reading("output", INF), at=(batch, 0, 1), module="mask")
        return records.tripped(rank, makers.frame(makers.reading("output", 9.0), at=(batch, 0, 0), module="embed"), last)

    parts = [records.part(rank, *records.frames(batch)) for batch in range(3) for rank in range(2)]
    run = records.write(tmp_path / "train-1", *parts, tripped(1, 3))
    left, right = sides([run], [], [])
    assert (left.name, right.name) == ("rank 1, batch 2 of train-1", "rank 1, batch 3 of train-1")
    assert [frame.spec.module for frame in right.frames] == ["embed", "mask"]
    assert sides([run], [0], [])[0].name == "rank 0, batch 1 of train-1"
    assert sides([run], [], [2])[0].name == "rank 1, batch 1 of train-1"
    early = records.write(tmp_path / "early-1", records.part(0, *records.frames(0)), tripped(1, 0), job="early")
    left, right = sides([early], [], [])
    assert (left.name, right.name) == ("rank 0, batch 0 of early-1", "rank 1, batch 0 of early-1")


def test_a_trip_in_the_first_batch_has_nothing_beside_it(tmp_path: Path) -> None:
    """The page shows the sentence too, so it names no options."""
    bad = makers.frame(makers.reading("output", INF), at=(0, 0, 0))
    run = records.write(tmp_path / "train-1", records.tripped(1, bad), Entry(9.0, NO_RANK, Waited()))
    with pytest.raises(NothingToCompare) as refused:
        sides([run], [], [])
    assert str(refused.value) == (
        "there is nothing to compare batch 0 of rank 1 with: no earlier batch of this rank is stored, nor this batch of "
        "another rank"
    )


def test_the_phase_is_named_once() -> None:
    text = diff.render(compare(batch(1.0, phase=Phase.BACKWARD), batch(9.0, phase=Phase.BACKWARD)), "x", "y")
    assert "frame 0, a (Linear, backward), output: 1.00e+00 and 9.00e+00\n" in text
