"""A verdict that is the end of a divergence, over a fake clock; the replay of its journal gives the same verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

import makers
from desk import Desk, connected
from rankwatch.shared.types import messages
from rankwatch.shared.types.frame import FrameTable
from rankwatch.shared.types.trip import Cause
from rankwatch_monitor.decide.core.journal import NO_RANK, Diverged
from rankwatch_monitor.record import facts

TABLE = FrameTable((makers.ROOT_LOSS,))


def train(losses: Sequence[Sequence[float]], fed: Sequence[float] = ()) -> Desk:
    """Each rank has these losses, and then trips."""
    desk = connected(len(losses))
    for rank, of in enumerate(losses):
        desk.receive(rank, messages.Table(TABLE))
        for number, loss in enumerate(of):
            desk.receive(rank, makers.loss_batch(number, loss, fed[number] if fed else 1.0))
    for rank, of in enumerate(losses):
        desk.receive(rank, messages.Tripped(len(of) + 1, makers.trip(at=(len(of), 0, 1), step=len(of))))
    desk.check_records()
    return desk


def test_losses_that_left_alike_have_no_culprit() -> None:
    desk = train([[4.2, 3e2, 2.6e4, 4e6], [4.1, 4e2, 3.6e4, 2e6]])
    verdict, report = desk.decided, desk.run.report()
    assert (verdict.rank, verdict.tripped, verdict.cause) == (None, 0, Cause.DIVERGENCE)
    for words in ("the loss left its range in batch 1 on all 2 ranks", "learning rate", "; at the end ("):
        assert words in verdict.evidence
    assert report.origin is not None
    began = report.origin.began
    assert began is not None
    assert (began.rank, began.batch, began.label, began.alone) == (None, 1, "loss", False)
    assert began.factor == pytest.approx(3e2 / 4.2)
    (abort, *_) = desk.sent(1, messages.Abort)
    assert abort.rank == NO_RANK
    assert "divergence" in abort.reason


def test_a_single_rank_that_left_first_is_the_culprit() -> None:
    steady, jumped = [2.0] * 20, [*[2.0] * 10, 300.0, *[3e3 * 10.0**n for n in range(9)]]
    desk = train([[*steady[:11], *[3e3 * 10.0**n for n in range(9)]], jumped])
    assert desk.decided.rank == 0
    assert desk.decided.divergence is None


def test_what_jumped_in_the_data_is_no_divergence() -> None:
    losses = [4.2, 3e2, 2.6e4, 4e6]
    desk = train([losses, losses], fed=[1.0, 1e3, 1.0, 1.0])
    assert desk.decided.rank == 0


def test_bad_data_is_named_even_where_the_loss_had_left() -> None:
    desk = connected(1)
    desk.receive(0, messages.Table(TABLE), *(makers.loss_batch(number, 4.0 * 100**number) for number in range(4)))
    bad = makers.reading("input[0]", makers.NAN)
    trip = makers.trip(bad, makers.reading("output", makers.NAN), root_inputs=(bad,), at=(4, 0, 0))
    desk.receive(0, messages.Tripped(9, trip))
    assert desk.decided.cause is Cause.DATA


@given(st.lists(st.floats(1e-3, 1e38) | st.just(math.inf), max_size=70), st.integers(1, 3))
def test_every_history_is_replayed(losses: list[float], ranks: int) -> None:
    train([losses] * ranks)


def test_the_fact_is_stored_with_all_its_numbers() -> None:
    desk = train([[4.2, 3e2, math.inf]])
    (fact,) = [entry.fact for entry in desk.records["train-0"] if isinstance(entry.fact, Diverged)]
    assert fact.found.last == math.inf
    assert facts.decode(*facts.encode(fact)) == fact
