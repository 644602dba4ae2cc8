"""Jumps of the loss and of the root's inputs: one notice for each origin, and none in a healthy training."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch

from notebook import watching
from rankwatch.judge.leaps import LEAST, QUIET
from rankwatch.shared.types.notice import Notice, NoticeKind

Number = Callable[[int], float]


def train(batches: int, *, fed: Number = lambda batch: 1.0, loss: Number = lambda batch: 1.0) -> list[Notice]:
    """The jumps that are noticed while inputs and loss are multiplied by these factors."""
    model, _, notebook = watching()
    for batch in range(batches):
        (model(torch.ones(3, 4) * fed(batch)).abs().mean() * loss(batch)).backward()
    return [notice for notice in notebook.notices if notice.kind is NoticeKind.JUMP]


def at(batch: int, factor: float) -> Number:
    return lambda now: factor if now == batch else 1.0


def test_an_input_that_jumps_is_noticed_once_though_the_loss_jumps_with_it() -> None:
    (notice,) = train(30, fed=at(20, 1000.0))
    assert (notice.module, notice.label, notice.batch, notice.value) == ("", "input[0]", 20, 1000.0)
    assert notice.growth == pytest.approx(math.log2(1000.0))


def test_a_loss_that_jumps_is_noticed_and_what_follows_is_not() -> None:
    found = train(60, loss=lambda batch: 1e3 if batch == 20 else 1e6 if batch == 25 else 1.0)
    assert [(notice.label, notice.batch) for notice in found] == [("loss", 20)]


def test_a_later_jump_is_a_notice_of_its_own() -> None:
    later = 20 + QUIET + 8
    found = train(later + 1, fed=lambda batch: {20: 1e3, later: 1e7}.get(batch, 1.0))
    assert [notice.batch for notice in found] == [20, later]


def test_the_first_batches_are_compared_with_nothing() -> None:
    assert train(LEAST, fed=at(LEAST - 1, 1e6)) == []


@pytest.mark.parametrize(
    "loss",
    [
        lambda batch: 0.9**batch,
        lambda batch: 1.2**batch,
        lambda batch: 10.0 ** random.Random(batch).gauss(0.0, 1.0),
        lambda batch: math.sin(batch),
        lambda batch: 50.0 if batch % 10 == 0 else 1.0,
        lambda batch: 1e-12 if 40 < batch < 80 else 1.0,
        lambda batch: 0.0 if batch < 60 else 1.0,
    ],
    ids=["falling", "growing", "RL", "sign", "spikes", "tiny", "zero"],
)
def test_a_healthy_loss_has_none(loss: Number) -> None:
    assert train(120, loss=loss) == []
