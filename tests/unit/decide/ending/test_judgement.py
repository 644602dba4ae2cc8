"""How the numbers of a run are judged."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwatch_monitor.decide.ending.judgement import (
    LEAST,
    ByBatch,
    Doubt,
    Grown,
    RunNumbers,
    Signs,
    WeightsJump,
    judge,
    signs_of,
)

BATCHES = 400


def curve(of: Callable[[int], float], batches: int = BATCHES) -> ByBatch:
    return ByBatch(range(batches), [of(batch) for batch in range(batches)])


def falls(batch: int) -> float:
    return 2.4 * 0.99**batch + 0.01 * math.sin(batch) ** 2


def signs(loss: Callable[[int], float] = falls, pace: float | None = 12.9, **of: Any) -> Signs:
    return signs_of(RunNumbers(losses={"loss": curve(loss)}, **of), pace)


def kinds(found: Signs) -> list[str]:
    return [one.kind for one in found.reasons]


def test_a_loss_that_falls_looks_healthy() -> None:
    found = signs()
    assert found == Signs(True, "loss 2.36 -> 0.0556, still falling", "12.9 batches/s")
    told = judge(found, (), (), "replicas equal", is_whole=True)
    assert told is not None
    assert told.text == "looks healthy: loss 2.36 -> 0.0556, still falling; 12.9 batches/s; replicas equal"
    unwatched = judge(found, (), (), "", is_whole=False)
    assert unwatched is not None
    assert (unwatched.healthy, unwatched.text) == (None, "loss 2.36 -> 0.0556, still falling; 12.9 batches/s")


def test_a_short_run_is_not_judged() -> None:
    assert signs_of(RunNumbers(losses={"loss": curve(falls, LEAST - 1)}), 1.0) == Signs()
    assert judge(Signs(), (), (), "", is_whole=True) is None
    assert judge(None, (), (), "", is_whole=True) is None


def test_of_a_short_run_it_is_said_that_its_loss_has_blown_up() -> None:
    found = signs_of(RunNumbers(losses={"loss": curve(lambda batch: 0.7 * 1.9**batch, 60)}), 1.0)
    assert (found.loss, kinds(found)) == ("", ["loss-grown"])
    assert found.reasons[0].text.startswith("the loss has grown x7.74e15 since batch 5: 1.03e16")
    assert signs_of(RunNumbers(losses={"loss": curve(lambda batch: 0.7 * 1.1**batch, 60)}), 1.0) == Signs()


def test_reasons_come_first_and_the_rest_is_counted() -> None:
    reasons = [Doubt(kind, 3, kind) for kind in "abc"]
    told = judge(signs(), reasons, (), "", is_whole=True)
    assert told is not None
    assert (told.healthy, told.text, len(told.reasons)) == (False, "a; b; and 1 more", 3)


def test_what_a_rank_tells_of_weights_that_stand_is_not_said_twice() -> None:
    found = signs(lambda batch: 2.3, norms=curve(lambda batch: float(batch < 100)))
    told = judge(
        found, (), [Doubt("weights-unchanged", 128, "stands still"), Doubt("bad-buffer", 5, "bad")], "", is_whole=True
    )
    assert told is not None
    assert [one.kind for one in told.reasons] == ["gradient-zero", "bad-buffer"]
    assert told.reasons[0].batch == 100


@pytest.mark.parametrize(("last", "is_told"), [(0.0, False), (1e-5, False), (0.5, True)])
def test_gradients_of_0_are_none_of_a_loss_that_is_learnt(last: float, is_told: bool) -> None:
    zero = curve(lambda batch: float(batch < 100))
    assert kinds(signs(lambda batch: 2.3 if batch < 50 else last, norms=zero)) == ["gradient-zero"] * is_told


def blown(factor: float, since: int, within: int) -> Callable[[int], float]:
    """Level at 0.7, and ``factor`` times as much ``within`` batches after batch ``since``."""
    return lambda batch: 0.7 * factor ** min(1.0, max(0.0, (batch - since) / within))


@pytest.mark.parametrize(
    ("loss", "growth", "is_told"),
    [
        (blown(56, 300, 10), 4.0, True),
        (blown(56, 300, 10), 0.3, False),  # what was to be learnt has changed: the weights are as before
        (blown(1e15, 100, 300), 0.0, True),
        (blown(56, 50, 300), 4.0, False),  # so slowly as values rise
        (blown(56, 390, 5), 4.0, False),  # not for 32 batches yet
        (lambda batch: 40.0 if 200 <= batch < 280 else 0.7, 4.0, False),  # it has come back
        (lambda batch: 2.4 if batch < 50 else 0.01 if batch < 300 else 2.3, 4.0, False),  # a harder lesson
        (lambda batch: 40.0 if batch % 9 == 0 else 0.7, 4.0, False),  # heavy tails
        (lambda batch: -0.7 if batch < 300 else 40.0, 4.0, False),
    ],
)
def test_a_loss_that_has_grown(loss: Callable[[int], float], growth: float, is_told: bool) -> None:
    found = signs(loss, weights=lambda first, last: growth)
    assert kinds(found) == ["loss-grown"] * is_told
    assert not found.is_well


def test_it_names_its_batch() -> None:
    (reason,) = signs(blown(56, 300, 10), weights=lambda first, last: 2.0).reasons
    assert reason == Doubt("loss-grown", 306, "the loss has grown x56 since batch 306: 39.2, from 0.7 in batch 0")


def test_it_says_whether_one_rank_has_parted() -> None:
    losses = {0: 0.7, 1: 112.0, 2: 0.8}
    (alone,) = signs(blown(56, 300, 10), weights=lambda first, last: 2.0, of_ranks=lambda name, batch, count: losses).reasons
    assert alone.text.endswith("; on rank 1 alone: 112, the others 0.75")
    losses = dict.fromkeys(range(3), 39.0)
    (alike,) = signs(blown(56, 300, 10), weights=lambda first, last: 2.0, of_ranks=lambda name, batch, count: losses).reasons
    assert alike.text.endswith("; on all ranks alike")


def test_it_says_which_weights_changed_as_the_loss_left_its_range() -> None:
    jump = WeightsJump(305, 322, "head.weight", 12.0, 4, 6)
    (reason,) = signs(blown(56, 300, 10), weights=lambda first, last: 2.0, jump=lambda batch: jump).reasons
    assert reason.text.endswith("; from batch 305 to 322, 4 of 6 weights changed more than twofold (head.weight x12)")


@pytest.mark.parametrize(
    ("of_1", "ends", "is_told"),
    [
        (8.3, 0.9, True),
        (8.3, 0.12, False),  # it has come back
        (0.5, 0.9, False),  # the others left with it
    ],
)
def test_one_rank_whose_loss_left_the_others(of_1: float, ends: float, is_told: bool) -> None:
    """Its data went bad in batch 120, and both have one model: the loss of the other one follows."""

    def of_ranks(name: str, batch: int, count: int) -> dict[int, float]:
        return {0: 0.2, 1: of_1} if batch >= 120 else {0: 0.11, 1: 0.1}

    found = signs(lambda batch: max(0.1, 1.7 * 0.95**batch) if batch < 120 else ends, of_ranks=of_ranks)
    assert kinds(found) == ["rank-parted"] * is_told
    if is_told:
        assert found.reasons[0].text == (
            "the loss left its range in batch 120 on rank 1 alone (8.3, the others 0.2) and has not come back: 0.9, from 0.1; "
            "look at the data of rank 1 there"
        )
    had_parted = signs(
        lambda batch: max(0.1, 1.7 * 0.95**batch) if batch < 120 else ends,
        of_ranks=lambda name, batch, count: {0: 0.2, 1: of_1},
    )
    assert kinds(had_parted) == []


@pytest.mark.parametrize(("growth", "is_told"), [(4.0, True), (1.0, False)])
def test_an_output_that_has_grown_with_weights_that_ran_away(growth: float, is_told: bool) -> None:
    grown = [Grown("head (Linear)", 40, 1.1, 16_400.0)]
    found = signs(lambda batch: 2.3, outputs=grown, weights=lambda first, last: growth)
    assert kinds(found) == ["output-grown"] * is_told


def test_one_of_two_losses_that_has_vanished() -> None:
    of = {
        "loss[0]": curve(lambda batch: 1.4 * 0.95**batch),
        "loss[1]": curve(lambda batch: 0.7 + min(batch, 200) / 10),
    }
    (reason,) = signs_of(RunNumbers(losses=of), None).reasons
    assert (reason.kind, reason.batch) == ("one-sided", 137)
    balanced = {**of, "loss[0]": curve(lambda batch: 1.4 + 0.2 * math.sin(batch))}
    assert signs_of(RunNumbers(losses=balanced), None).reasons == ()


def test_weights_that_never_changed_count_where_the_loss_stands() -> None:
    assert kinds(signs(lambda batch: 2.3 + 0.1 * math.sin(batch), unchanged=0)) == ["weights-unchanged"]
    assert kinds(signs(unchanged=0)) == []  # something else is trained


def test_an_output_that_runs_away_counts_where_the_loss_does_not_fall() -> None:
    outputs = [Grown("2 (Linear)", 120, 0.5, 7e7)]
    assert kinds(signs(lambda batch: 0.7, outputs=outputs)) == ["output-grown"]
    assert kinds(signs(outputs=outputs)) == []
    assert kinds(signs(lambda batch: 0.7, outputs=[Grown("2 (Linear)", 120, 0.5, 900.0)])) == []


def times(of: Callable[[int], float], batches: int = 6000) -> tuple[ByBatch, list[float]]:
    """When each batch begins, of which each takes so many seconds."""
    at, begins = 0.0, []
    for batch in range(batches):
        begins.append(at)
        at += of(batch)
    return ByBatch(range(batches), begins), begins


@pytest.mark.parametrize(
    ("of", "forward", "is_told"),
    [
        (lambda batch: 0.1, 0.02, False),
        (lambda batch: 0.1 if batch < 4000 else 0.25, 0.02, True),
        (lambda batch: 0.1 if batch < 4000 else 0.25, 0.05, False),  # its forward takes longer, too: longer rows
        (lambda batch: 0.1 + 60.0 * (batch % 500 == 0), 0.02, False),  # evaluations
        (lambda batch: 0.1 if batch < 5980 else 5.0, 0.02, False),  # not for long
    ],
)
def test_a_pace_that_is_half_of_the_first_minutes(of: Callable[[int], float], forward: float, is_told: bool) -> None:
    begins, _ = times(of)
    forwards = ByBatch(begins.batches, [0.02 if batch < 4000 else forward for batch in begins.batches])
    found = signs(begins=begins, forwards=forwards, pace=6.0)
    assert kinds(found) == ["slower"] * is_told
    if is_told:
        assert abs(found.reasons[0].batch - 4000) < 20
        assert found.pace == "6 batches/s (10 in the first minutes, 4 in the last)"


def test_a_steady_pace_is_said_to_be_one() -> None:
    begins, _ = times(lambda batch: 0.1)
    assert signs(begins=begins, forwards=begins, pace=10.0).pace == "10 batches/s, steady"


HEALTHY: dict[str, Callable[[int, float], float]] = {
    "it falls": lambda batch, noise: 2.4 * 0.98**batch + 0.05 * noise,
    "warm restarts": lambda batch, noise: 0.05 + 2.0 * 0.93 ** (batch % 100) + 0.02 * noise,
    "curriculum": lambda batch, noise: (1 + batch // 100) * (0.1 + 0.9 * 0.95 ** (batch % 100)) + 0.05 * noise,
    "one task after another": lambda batch, noise: 2.3 * 0.95 ** (batch % 130) + 0.001 + 0.01 * noise,
    "a policy that finds its rewards": lambda batch, noise: (0.02 if batch < 150 else 1.4) * (1.0 + 0.5 * noise),
    "values that rise": lambda batch, noise: 0.1 + (batch / 40) ** 2 * (0.5 + noise),
    "fine-tuned at its minimum": lambda batch, noise: 0.3 + 0.05 * noise,
    "spikes": lambda batch, noise: 40.0 if noise > 0.97 else 0.7,
    "a batch of two": lambda batch, noise: 0.5 * math.exp(3.0 * (noise - 0.5)),
}


@pytest.mark.parametrize("shape", HEALTHY)
@given(seed=st.integers(0, 2**32), batches=st.integers(1, BATCHES))
def test_of_a_healthy_loss_no_beginning_is_bad(shape: str, seed: int, batches: int) -> None:
    """Where it is judged while it runs, it may have come anywhere, and its weights have grown somewhat."""
    draw = random.Random(seed)
    found = signs_of(
        RunNumbers(
            losses={"loss": curve(lambda batch: HEALTHY[shape](batch, draw.random()), batches)},
            weights=lambda first, last: 0.9,
            norms=curve(lambda batch: 0.1 + draw.random(), batches),
        ),
        4.0,
    )
    assert found.reasons == ()


@given(st.integers(0, 2**32), st.integers(1, BATCHES), st.floats(0.1, 1.0))
def test_of_two_losses_that_fight_no_beginning_is_bad(seed: int, batches: int, swing: float) -> None:
    draw = random.Random(seed)
    of = {
        "loss[0]": curve(lambda batch: 1.4 + swing * math.sin(batch / 9) + 0.1 * draw.random(), batches),
        "loss[1]": curve(lambda batch: 0.7 - 0.6 * swing * math.sin(batch / 9) + 0.1 * draw.random(), batches),
    }
    assert signs_of(RunNumbers(losses=of, weights=lambda first, last: 3.0), None).reasons == ()


@given(st.integers(0, 2**32), st.floats(0.001, 1e6), st.floats(0.0, 1.5))
def test_noise_around_one_level_is_no_reason(seed: int, level: float, spread: float) -> None:
    draw = random.Random(seed)
    found = signs(lambda batch: level * math.exp(spread * draw.gauss(0, 1)), weights=lambda first, last: 9.0)
    assert found.reasons == ()
