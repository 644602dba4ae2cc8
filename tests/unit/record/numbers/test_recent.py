"""How the loss and the pace went, gathered look by look."""

from __future__ import annotations

import math

import numpy as np

import makers
from rankwatch.shared.types.frame import NO_LOSS, NO_NORM
from rankwatch_monitor.record.numbers.layout import DIGEST, Array
from rankwatch_monitor.record.numbers.recent import MOST_BATCHES, RecentReader


def digests(*rows: tuple[int, int, float, float]) -> Array:
    """Of (rank, batch, loss, when it ended)."""
    made = np.zeros(len(rows), DIGEST)
    for name, column in zip(("rank", "batch", "loss", "ended"), zip(*rows, strict=True), strict=False):
        made[name] = column
    return made


def test_the_mean_of_a_batch_is_over_the_ranks_that_have_a_loss() -> None:
    first = (0, 0, 1.0, 0.0), (1, 0, 3.0, 0.1), (0, 0, NO_LOSS, 0.5)
    recent = RecentReader().take(digests(*first, (0, 1, math.inf, 1.0), (1, 1, 2.0, 1.1), (0, 2, math.nan, 2.0)))
    assert recent.losses[:2] == ((0, 2.0), (1, 2.0))
    assert math.isnan(recent.losses[2][1])
    assert recent.ends == ((0, 0.0), (1, 1.0), (2, 2.0))  # by one clock: that of the rank that is furthest; of a forward


def test_a_later_look_adds_what_is_new_and_forgets_nothing() -> None:
    reader = RecentReader()
    reader.take(digests((0, 4, 1.0, 4.0), (1, 4, 3.0, 4.0), (0, 5, 1.0, 5.0)))
    # Of batch 4 it has the last rank only.
    recent = reader.take(digests((1, 4, 9.0, 4.0), (1, 5, 3.0, 5.0), (0, 5, 1.0, 5.0)))
    assert recent.losses == ((4, 2.0), (5, 2.0))
    assert recent.ends == ((4, 4.0), (5, 5.0))
    assert reader.take(digests()).losses == recent.losses
    recent = reader.take(digests((1, 6, 1.0, 100.0), (1, 7, 1.0, 101.0)))  # rank 0 is lost: another clock
    assert recent.ends == ((6, 100.0), (7, 101.0))
    assert [batch for batch, _ in recent.losses] == [4, 5, 6, 7]


def test_the_norm_of_a_batch_is_the_mean_of_the_ranks_that_know_it() -> None:
    found = digests((0, 1, 1.0, 0.0), (1, 1, 1.0, 0.0), (2, 1, 1.0, 0.0), (0, 2, 1.0, 1.0))
    found["norm"] = [2.0, 4.0, NO_NORM, math.inf]
    recent = RecentReader().take(found)
    assert recent.norms[0] == (1, 3.0)
    assert math.isnan(recent.norms[1][1])
    assert len(recent.losses) == 2


def test_only_the_last_batches_are_kept() -> None:
    reader = RecentReader()
    for begin in (0, 1000):
        recent = reader.take(digests(*((0, begin + batch, 1.0, float(begin + batch)) for batch in range(1000))))
    assert len(recent.losses) == len(recent.ends) == MOST_BATCHES
    assert recent.losses[-1][0] == recent.ends[-1][0] == 1999


def test_losses_that_take_turns_have_a_curve_each() -> None:
    tables = {1: ("loss", "Critic"), 2: ("loss of Generator", "Generator")}
    parts = digests(*((rank, batch, (1.0, -4.0)[batch % 2] + rank, float(batch)) for batch in range(6) for rank in range(2)))
    parts["table"] = 1 + parts["batch"] % 2
    reader = RecentReader()
    reader.losses.look(parts, lambda number: makers.loss_table(*tables[number]))
    recent = reader.take(parts)
    assert recent.in_turns == (("Critic", ((0, 1.5), (2, 1.5), (4, 1.5))), ("Generator", ((1, -3.5), (3, -3.5), (5, -3.5))))
    assert recent.losses == recent.in_turns[0][1]
