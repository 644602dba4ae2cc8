"""When a trip is the end of a divergence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import makers
from rankwatch.shared.types.frame import BatchSummary, FrameTable, Kind, Reading, State, pack
from rankwatch.shared.types.trip import Cause, GrownWeight
from rankwatch.shared.words.cause import advise
from rankwatch.shared.words.divergence import KEPT, Divergence, LossHistory, LossRows, describe_divergence, find_divergence

STEADY = [2.3, 2.1, 2.4, 2.0, 2.2, 1.9, 2.1, 1.8] * 3


def table(*labels: str) -> FrameTable:
    kinds = {"loss": Kind.LOSS, "output.loss": Kind.OUTPUT, "output.logits": Kind.OUTPUT}
    readings = [makers.reading(label, kind=kinds.get(label)) for label in labels]
    return FrameTable((makers.frame(*readings, module="", module_class="Net").spec,))


ROWS = table("input[0]", "loss")


def history(losses: Sequence[float], inputs: float | Sequence[float] = 1.0, of: FrameTable = ROWS) -> LossHistory:
    made, rows = LossHistory(), LossRows(of)
    for batch, loss in enumerate(losses):
        fed = inputs if isinstance(inputs, float) else inputs[batch]
        column = pack(of.typecode, [fed, *[loss] * (of.rows - 1)])
        made.take(replace_columns(batch, column, of), rows)
    return made


def replace_columns(batch: int, column: bytes, of: FrameTable) -> BatchSummary:
    return makers.summary(batch, of=of)._replace(abs_max=column)


def found(*losses: Sequence[float], inputs: float | Sequence[float] = 1.0) -> Divergence | None:
    first, *others = [history(of, inputs) for of in losses]
    return find_divergence(first, others, [first, *others], max(map(len, losses)))


def growing(factor: float, batches: int, start: float = 2.0) -> list[float]:
    return [start * factor**n for n in range(1, batches + 1)]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "losses",
    [
        [4.2, 3e2, 4e3, 2.6e4, 5e5, 4e6],
        [1.0, 1e4, 1e9, 1e17, 1e33],
        [1.0, 1e30],
        [*STEADY, *growing(3.0, 12)],
        [*STEADY, *growing(1.5, 30)],
        growing(3.0, 20),
        [4.2, 3e2, math.inf, math.nan],
        [*STEADY, 3.5, 9.4, 9.8, 24.0, 1.4e11],
    ],
)
def test_a_loss_that_left_on_all_ranks_is_a_divergence(losses: list[float], ranks: int) -> None:
    one = found(*[[loss * (1 + rank / 10) for loss in losses] for rank in range(ranks)])
    assert one is not None
    assert one.ranks == ranks
    assert "learning rate" in describe_divergence(one)
    if losses[:24] == STEADY:
        assert 24 <= one.batch <= 36
    if losses[0] != 6.0:
        assert one.batch == 1 or len(losses) > 6


@pytest.mark.parametrize(
    "losses",
    [
        STEADY,
        [2.3],
        [],
        [*STEADY, 1e6, 2.0, 2.1],
        [2.3 * 0.97**n for n in range(60)],
        growing(1.02, 60),
        [0.69, 2.0, 5.0, 9.0, 8.0, 10.0, 9.0],
        [*STEADY, 1e9],
        [*STEADY, 1e9, 1e12, 1e20],
        [abs(math.sin(1 + 7 * n)) * 10 ** -(n % 4) for n in range(50)],
    ],
    ids=["steady", "one", "none", "spike", "falling", "warm-up", "GAN", "last", "abrupt", "RL"],
)
def test_anything_else_is_none(losses: list[float]) -> None:
    assert found(losses) is None
    assert found(losses, losses) is None


def test_one_rank_that_left_first_is_none() -> None:
    steady = [*STEADY, 2.0, *growing(3.0, 10)]
    assert found([*STEADY, 400.0, *growing(3.0, 10, 400.0)], steady) is None
    assert found(steady, [*STEADY, 400.0, *growing(3.0, 10, 400.0)]) is None
    assert found([*STEADY, *growing(3.0, 11)], [*STEADY, *STEADY[:11]]) is None


def test_a_rank_whose_last_batches_are_still_under_way_does_not_matter() -> None:
    losses = [*STEADY, *growing(3.0, 12)]
    one = found(losses, losses[:-2])
    assert one is not None
    assert one.ranks == 2


def test_an_input_that_jumped_did_it() -> None:
    losses = [*STEADY, *growing(4.0, 10)]
    leaves = found(losses)
    assert leaves is not None
    fed = [100.0 if batch == leaves.batch - 1 else 1.0 for batch in range(len(losses))]
    assert found(losses, inputs=fed) is None


def test_without_a_loss_the_outputs_of_the_root_are_looked_at() -> None:
    of = table("input[0]", "output[0]", "output[1]")
    one = find_divergence(history([*STEADY, *growing(3.0, 12)], of=of), [], [], 60)
    assert one is not None
    assert not one.is_loss
    assert describe_divergence(one).startswith("the output[0] of the root (the loss is not known) left its range")


def test_a_loss_that_is_known_later_replaces_the_outputs() -> None:
    made = history([*STEADY, *growing(3.0, 12)], of=table("input[0]", "output"))
    made.take(replace_columns(60, pack("f", [1.0, 2.0]), ROWS), LossRows(ROWS))
    assert find_divergence(made, [], [], 61) is None
    assert [entry.batch for entry in made.before(61)] == [60]


def test_a_model_that_returns_its_loss_needs_no_other() -> None:
    rows = LossRows(table("input[0]", "output.loss", "output.logits"))
    assert rows.label == "output.loss"
    assert rows.is_loss


def test_a_part_of_a_backward_has_no_loss() -> None:
    assert not LossRows(table("grad_output[0]"))
    made = LossHistory()
    made.take(makers.summary(of=table("grad_output[0]")), LossRows(table("grad_output[0]")))
    assert made.before(1) == []


def test_the_history_is_bounded() -> None:
    assert len(history([1.0] * (3 * KEPT)).before(3 * KEPT)) == KEPT


def test_a_reading_that_is_no_number_is_no_loss() -> None:
    spec = makers.frame(Reading("output", Kind.OUTPUT, "int64", 0.0, 1.0, State.NOT_FLOAT), module="").spec
    assert not LossRows(FrameTable((spec,)))


@given(st.lists(st.one_of(st.floats(0.0, 1e38), st.just(math.inf), st.just(math.nan)), max_size=80), st.integers(0, 80))
def test_no_losses_make_it_fail(losses: list[float], batch: int) -> None:
    one = find_divergence(history(losses), [history(losses[:5])], [], batch)
    if one is not None:
        assert 0 < one.batch <= one.last_batch < batch
        assert describe_divergence(one)


@pytest.mark.parametrize(
    ("now", "reach", "is_by_other_code"),
    [(8.0, 0.01, True), (8.0, 0.0, True), (8.0, 1.0, False), (4.05, 0.01, False), (8.0, -1.0, False)],
)
def test_weights_that_grow_by_more_than_the_optimizer_can_are_written_by_other_code(
    now: float, reach: float, is_by_other_code: bool
) -> None:
    """In three batches from 4 on, of a largest step of ``reach``."""
    one = found([*STEADY, *growing(3.0, 12)])
    assert one is not None
    grown = GrownWeight("0", "Linear", "weight", 4.0, now, 17, 4.0)
    trip = replace(makers.trip(at=(20, 0, 0)), grown=grown, reach=reach, rates=(0.1,))
    said, advice = describe_divergence(one, trip), advise(Cause.DIVERGENCE, trip, None)
    assert ("other code writes to the weights" in said) is is_by_other_code
    assert ("learning rate (0.1)" in said) is ("learning rate" in advice) is not is_by_other_code
