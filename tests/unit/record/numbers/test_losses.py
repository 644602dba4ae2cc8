"""Losses that take turns are told apart by the labels of their frame tables."""

from __future__ import annotations

import numpy as np
import pytest

import makers
from rankwatch.shared.types.frame import LOSS_OF_SOME, NO_LOSS, FrameTable
from rankwatch_monitor.record.numbers.layout import DIGEST, Array
from rankwatch_monitor.record.numbers.losses import RunLosses

GAN, CRITIC, GENERATOR, SOME = ("loss", "Gan"), ("loss", "Critic"), ("loss of Generator", "Generator"), (LOSS_OF_SOME, "Gan")


def digests(*losses: tuple[int, float]) -> Array:
    """Of (table, loss)."""
    made = np.zeros(len(losses), DIGEST)
    made["table"], made["loss"] = zip(*losses, strict=True)
    return made


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        ([GAN], {"loss": [1.0]}),
        ([GAN, CRITIC], {"loss": [1.0, 2.0]}),
        ([GAN, SOME], {"loss": [1.0]}),
        ([GAN, SOME, CRITIC, GENERATOR], {"Critic": [1.0, 3.0], "Generator": [4.0]}),
        ([GAN, CRITIC, ("loss[0] of Generator", "Generator")], {"Critic": [1.0, 2.0], "Generator": [3.0]}),
        ([CRITIC, ("loss of Q (2)", "Q (2)"), ("loss of Q", "Q")], {"Critic": [1.0], "Q": [3.0], "Q (2)": [2.0]}),
    ],
)
def test_each_loss_has_its_digests_and_a_name(tables: list[tuple[str, str]], expected: dict[str, list[float]]) -> None:
    losses = RunLosses()
    parts = digests((0, NO_LOSS), *((number, float(number)) for number in range(1, len(tables) + 1)))
    losses.look(parts, lambda number: makers.loss_table(*tables[number - 1]))
    assert {losses.name(which): own["loss"].tolist() for which, own in losses.split(parts)} == expected


def test_each_table_is_read_once() -> None:
    losses, asked = RunLosses(), list[int]()

    def read(number: int) -> FrameTable:
        asked.append(number)
        return makers.loss_table("loss", "Net")

    for _ in range(2):
        losses.look(digests((1, 1.0), (2, NO_LOSS), (0, 3.0), (3, 2.0)), read)
    assert asked == [1, 3]
