"""Whether a run without a verdict went well, by rules over the numbers of its batches. Pure.

A false alarm is worse than silence. So a rule speaks only of what lasts to the end, and of what no healthy training does: a loss
that is far above where it began, and not one that rises with a harder lesson, a warm restart or the value of a policy. What is
neither plainly well nor plainly bad is told as it is, without a judgement.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise, permutations
from statistics import median
from typing import NamedTuple

from rankwatch.shared.figures import figure

LEAST = 64
"""Batches of which a run is judged, at least."""

FEW = 16
"""Batches of which it is said that the loss has blown up, at least."""

LASTS = 32
"""Batches for which a state must last, up to the end."""

BEGINNING = 5
"""The first batches of a curve, whose median is where it began: a training that blows up does so soon."""

SMOOTHED = 5
"""A number counts as the median of so many around it: one batch says nothing."""

GROWN = 10.0
"""A loss so many times its own lowest has grown. Over 37 healthy trainings of 15,170 steps none grew so far and stayed there."""

BEYOND = 4.0
"""And so many times its beginning: below that, a harder lesson does the same, and noise that cannot be learnt."""

ABRUPT = 64
"""Batches within which it has come from its beginning to so much,"""

DOUBLINGS = 1.0
"""while the weights have grown so, see ``RunNumbers.weights``. What is to be learnt may change as suddenly, as when a policy
finds its first rewards, but then the weights do not run away."""

FAR_BEYOND = 1e6
"""So many times its beginning, a loss has blown up, however slowly."""

FELL = 0.9
"""A loss of this share of its beginning has fallen."""

LEARNT = 1e-4
"""A loss of this share of its beginning has nothing left to learn: its gradients may well be 0, in float16 say."""

SLOWER, SLOWER_FORWARD = 2.0, 1.5
"""A batch that takes so many times as long as in the first minutes is told. Not if its forward does too: its work has grown."""

MINUTES = 120.0
"""Seconds of the first and of the last minutes of a run."""

LARGE, TIMES = 1e6, 1000.0
"""An output has grown that is so large, and so many times what it was in its first batches, while the loss has not fallen. A
young layer grows as far from next to nothing, and a network learns large targets. So it has if the weights have run away."""


class Doubt(NamedTuple):
    """Why a run did not go well. ``kind`` is for programs; ``batch``: since when."""

    kind: str
    batch: int
    text: str


class ByBatch(NamedTuple):
    """A number by batch, in order."""

    batches: Sequence[int] = ()
    values: Sequence[float] = ()

    def __len__(self) -> int:
        return len(self.values)


class Grown(NamedTuple):
    """An output, by the median of its first and of its last batches. ``batch``: the first one in which it was so large."""

    name: str
    batch: int
    first: float
    last: float


PARTED = 4.0
"""A rank whose loss is so many times that of the others has parted from them."""


LEFT = 4
"""Batches from where a loss left its range, by whose median a rank has parted: more, and the others have followed it. And so many
before, in which it had not."""

RISEN = 4.0
"""A loss so many times its lowest, that one rank has led there, has not come back."""

RUN_AWAY = 3.0
"""Doublings of the median weight, of a network whose output has grown while its loss has not fallen."""


class WeightsJump(NamedTuple):
    """From one batch to the next, ``changed`` of ``of`` weights changed more than twofold; this one the most."""

    before: int
    after: int
    weight: str
    times: float
    changed: int
    of: int

    def describe(self) -> str:
        many = f"{self.changed} of {self.of} weights"
        most = f"{self.weight} x{figure(self.times)}"
        return f"from batch {self.before} to {self.after}, {many} changed more than twofold ({most})"


def _no_jump(batch: int) -> WeightsJump | None:
    """Where it is not known."""
    return None


def _no_ranks(name: str, batch: int, count: int) -> dict[int, float]:
    """Where it is not known."""
    return {}


def _no_growth(first: int, last: int) -> float:
    """Where it is not known."""
    return 0.0


class RunNumbers(NamedTuple):
    """What a run is judged by.

    ``losses``: by label, the mean over the ranks. ``of_ranks``: by rank, one of them in so many batches from one on.
    ``norms``: of the gradients of a step. ``begins``, ``forwards``: of one rank, when a forward began and how long it took.
    ``weights``: by how many doublings they grew from one batch to another, the median over all. ``jump``: of weights, as a loss
    left its range in a batch. ``unchanged``: the batch since which no weight that is measured has changed, over at least LASTS
    optimizer steps; None: one has. ``outputs``: those that grew the most.
    """

    losses: dict[str, ByBatch] = {}
    norms: ByBatch = ByBatch()
    begins: ByBatch = ByBatch()
    forwards: ByBatch = ByBatch()
    of_ranks: Callable[[str, int, int], dict[int, float]] = _no_ranks
    jump: Callable[[int], WeightsJump | None] = _no_jump
    weights: Callable[[int, int], float] = _no_growth
    unchanged: int | None = None
    outputs: Sequence[Grown] = ()


class Signs(NamedTuple):
    """What the numbers of a run say. ``is_well``: its loss has fallen, and nothing speaks against it."""

    is_well: bool = False
    loss: str = ""
    pace: str = ""
    reasons: tuple[Doubt, ...] = ()


class Judgement(NamedTuple):
    """``healthy``: None where neither can be said."""

    healthy: bool | None
    text: str
    reasons: tuple[Doubt, ...] = ()


def judge(
    signs: Signs | None, known: Sequence[Doubt], told: Sequence[Doubt], replicas: str, *, is_whole: bool
) -> Judgement | None:
    """The last line of a run; None: it was too short, and nothing is known of it.

    Args:
        known: what the collector knows, which comes first.
        told: what ranks have noticed, which comes last: of the same thing, the numbers tell it in fewer words.
        replicas: ``replicas equal``; empty where that is not known.
        is_whole: whether all of the run was watched.
    """
    reasons = (*known, *(signs.reasons if signs is not None else ()))
    stands = any(one.kind in STANDS for one in reasons)
    reasons += tuple([one for one in told if not (stands and one.kind in STANDS)])
    if reasons:
        more = f"; and {len(reasons) - SHOWN} more" if len(reasons) > SHOWN else ""
        return Judgement(False, "; ".join(one.text for one in reasons[:SHOWN]) + more, reasons)
    if signs is None or not signs.loss:
        return None
    text = "; ".join(filter(None, (signs.loss, signs.pace, replicas)))
    is_well = signs.is_well and is_whole
    return Judgement(is_well or None, f"looks healthy: {text}" if is_well else text)


SHOWN = 2
"""Reasons of a line."""

STANDS = frozenset({"gradient-zero", "weights-unchanged", "no-step"})
"""Reasons that come to the same."""


def signs_of(numbers: RunNumbers, pace: float | None) -> Signs:
    """``pace``: batches a second over all of the run."""
    known = {label: one for label, one in numbers.losses.items() if len(one) >= LEAST}
    if not known:
        short = [_Curve(label, one) for label, one in numbers.losses.items() if len(one) >= FEW]
        return Signs(reasons=tuple(filter(None, [_of_blow_up(curve, numbers) for curve in short])))
    curves = [_Curve(label, one) for label, one in known.items()]
    has_fallen = all(curve.has_fallen for curve in curves)
    reasons = [
        *_of_losses(curves, numbers),
        *_of_gradients(numbers.norms, curves),
        *_of_weights(numbers.unchanged, curves),
        *_of_outputs(numbers, has_fallen=has_fallen),
    ]
    slower, told = _pace(numbers.begins, numbers.forwards, pace)
    reasons += [slower] if slower is not None else []
    loss = ", ".join(curve.text for curve in curves[:SHOWN])
    return Signs(has_fallen and not reasons, loss, told, tuple(reasons))


# --- the loss ---------------------------------------------------------------------------------------------------------


class _Curve:
    """A loss, smoothed."""

    def __init__(self, label: str, series: ByBatch) -> None:
        self.label, self.batches = label, series.batches
        self.values = _smoothed(series.values)
        self.is_positive = min(series.values) >= 0.0
        self.first = median(series.values[:BEGINNING])
        self.last = median(series.values[-LASTS:])
        self.place = min(range(len(self.values)), key=self.values.__getitem__)
        self.lowest = self.values[self.place]

    @property
    def has_fallen(self) -> bool:
        """Only a loss that is never negative: below 0, a share of it means nothing."""
        is_low = self.last <= max(2.0 * self.lowest, self.lowest + 0.05 * (self.first - self.lowest))
        return self.is_positive and self.first > 0.0 and self.last <= FELL * self.first and is_low

    @property
    def text(self) -> str:
        return f"{self.label} {figure(self.first)} -> {figure(self.last)}{self._trend()}"

    def _trend(self) -> str:
        if self.is_positive and 0.0 < self.lowest <= self.last / 2.0 and not self.has_fallen:
            return f" ({figure(self.lowest)} at its lowest, in batch {self.batches[self.place]})"
        if self.has_fallen:
            quarter = len(self.values) // 4
            before, now = self.values[-2 * quarter : -quarter], self.values[-quarter:]
            fall = median(before) - median(now)
            spread = median([abs(value - median(now)) for value in now])
            is_falling = fall > max(0.02 * median(before), spread / math.sqrt(quarter))
            return ", still falling" if is_falling else ", level at the end"
        is_as_at_first = abs(self.last - self.first) <= (1.0 - FELL) * abs(self.first)
        return ", as at first" if is_as_at_first else ""

    def since(self, least: float) -> int | None:
        """Since which place it is always at least so large; None: it is not at the end."""
        place = len(self.values)
        while place and self.values[place - 1] >= least:
            place -= 1
        return place if len(self.values) - place >= LASTS else None


def _of_losses(curves: Sequence[_Curve], numbers: RunNumbers) -> list[Doubt]:
    found = [reason for curve in curves if (reason := _of_loss(curve, numbers, alone=len(curves) == 1)) is not None]
    return found or _of_a_pair(curves)


def _of_loss(curve: _Curve, numbers: RunNumbers, *, alone: bool) -> Doubt | None:
    """``alone``: it is the only one. Of several, one may rise because another falls, as those of a GAN do."""
    if not curve.is_positive or curve.lowest <= 0.0:
        return None
    low, first = curve.lowest, curve.first
    place = curve.since(max(GROWN * low, BEYOND * first))
    if place is None or place <= curve.place or not alone:
        return _of_blow_up(curve, numbers) or (_of_a_rank(curve, numbers) if alone else None)
    before = next((at for at in range(place - 1, -1, -1) if curve.values[at] <= first), -1)
    ends = curve.batches[curve.place], curve.batches[place + LASTS - 1]
    is_blown = place - before <= ABRUPT and numbers.weights(*ends) >= DOUBLINGS
    return _grown(curve, place, numbers) if is_blown else _of_blow_up(curve, numbers) or _of_a_rank(curve, numbers)


def _of_blow_up(curve: _Curve, numbers: RunNumbers) -> Doubt | None:
    """So far above its beginning, a few batches are enough."""
    if not curve.is_positive or curve.lowest <= 0.0 or min(curve.values[-FEW // 2 :]) < FAR_BEYOND * curve.first:
        return None
    place = next(at + 1 for at in range(len(curve.values) - 1, -1, -1) if curve.values[at] < BEYOND * curve.first)
    return _grown(curve, place, numbers)


def _grown(curve: _Curve, place: int, numbers: RunNumbers) -> Doubt:
    batch, low = curve.batches[place], f"from {figure(curve.lowest)} in batch {curve.batches[curve.place]}"
    now = curve.last if len(curve.values) >= LEAST else curve.values[-1]
    text = f"the {curve.label} has grown x{figure(now / curve.lowest)} since batch {batch}: {figure(now)}"
    jump = numbers.jump(batch)
    jumped = f"; {jump.describe()}" if jump is not None else ""
    return Doubt("loss-grown", batch, f"{text}, {low}{_parted(numbers.of_ranks(curve.label, batch, LASTS))}{jumped}")


def _of_a_rank(curve: _Curve, numbers: RunNumbers) -> Doubt | None:
    """One rank alone left the range of the loss, and took the others along: they have one model."""
    place = curve.since(2.0 * curve.lowest)
    if place is None or place < LEFT or place <= curve.place or curve.last < RISEN * curve.lowest:
        return None
    batch = curve.batches[place]
    losses = numbers.of_ranks(curve.label, batch, LEFT)
    before = numbers.of_ranks(curve.label, curve.batches[place - LEFT], batch - curve.batches[place - LEFT])
    rank = max(losses, key=losses.__getitem__, default=-1)
    if len(losses) < 2 or rank not in before or before[rank] > 2.0 * _of_others(before, rank):
        return None
    if losses[rank] < PARTED * _of_others(losses, rank):
        return None
    others = figure(_of_others(losses, rank))
    text = f"the loss left its range in batch {batch} on rank {rank} alone ({figure(losses[rank])}, the others {others})"
    now = f"has not come back: {figure(curve.last)}, from {figure(curve.lowest)}"
    return Doubt("rank-parted", batch, f"{text} and {now}; look at the data of rank {rank} there")


def _of_others(losses: dict[int, float], rank: int) -> float:
    return median([loss for other, loss in losses.items() if other != rank])


def _parted(losses: dict[int, float]) -> str:
    """Which rank's loss is far above those of the others: a fact, and no cause."""
    if len(losses) < 2:
        return ""
    rank = max(losses, key=losses.__getitem__)
    others = _of_others(losses, rank)
    is_alone = losses[rank] >= PARTED * others > 0.0
    return (
        f"; on rank {rank} alone: {figure(losses[rank])}, the others {figure(others)}"
        if is_alone
        else "; on all ranks alike"
    )


VANISHED = 1e-3
"""One of two losses is below this share of its beginning, while the other has grown: a discriminator that its generator cannot
fool any more has no gradient for it."""


def _of_a_pair(curves: Sequence[_Curve]) -> list[Doubt]:
    for gone, grown in permutations(curves, 2):
        limit = VANISHED * gone.first
        if not (gone.is_positive and grown.is_positive and limit > 0.0 and max(gone.values[-2 * LASTS :]) <= limit):
            continue
        if min(grown.values[-2 * LASTS :]) >= BEYOND * grown.first:
            batch = gone.batches[next(at + 1 for at in range(len(gone.values) - 1, -1, -1) if gone.values[at] > limit)]
            text = f"the {gone.label} has vanished since batch {batch} ({figure(gone.first)} -> {figure(gone.last)})"
            rest = f"the {grown.label} has grown: {figure(grown.first)} -> {figure(grown.last)}"
            return [Doubt("one-sided", batch, f"{text}, and {rest}")]
    return []


# --- gradients, weights, outputs --------------------------------------------------------------------------------------


def _of_gradients(norms: ByBatch, curves: Sequence[_Curve]) -> list[Doubt]:
    """A loss of which next to nothing is left needs no gradient."""
    zeros = 0
    while zeros < len(norms) and norms.values[-1 - zeros] == 0.0:
        zeros += 1
    if zeros < LASTS or all(curve.first > 0.0 and curve.last <= LEARNT * curve.first for curve in curves):
        return []
    batch = norms.batches[-zeros]
    return [Doubt("gradient-zero", batch, f"all gradients have been exactly 0 since batch {batch}: nothing is learnt")]


def _of_weights(unchanged: int | None, curves: Sequence[_Curve]) -> list[Doubt]:
    """Where a loss moves, something is trained that is not measured."""
    stands = all(abs(curve.last - curve.first) <= (1.0 - FELL) * abs(curve.first) for curve in curves)
    if unchanged is None or not stands:
        return []
    text = f"no weight has changed since batch {unchanged}: a learning rate of 0, or an optimizer of other tensors?"
    return [Doubt("weights-unchanged", unchanged, text)]


def _of_outputs(numbers: RunNumbers, *, has_fallen: bool) -> list[Doubt]:
    found = [one for one in numbers.outputs if one.last >= TIMES * one.first > 0.0]
    if has_fallen or not any(one.last >= LARGE or numbers.weights(0, one.batch) >= RUN_AWAY for one in found):
        return []
    one = min(found, key=lambda grown: grown.batch)
    text = f"the output of {one.name} has grown x{figure(one.last / one.first)} since its first batches: {figure(one.last)}"
    return [Doubt("output-grown", one.batch, f"{text}, and the loss has not fallen")]


# --- time -------------------------------------------------------------------------------------------------------------


def _pace(begins: ByBatch, forwards: ByBatch, pace: float | None) -> tuple[Doubt | None, str]:
    """A reason, and the pace in words. Medians: an evaluation or a checkpoint now and then is no change."""
    told = f"{figure(pace)} batches/s" if pace is not None else ""
    count = len(begins)
    if count < LEAST or not told:
        return None, told
    skipped = LASTS // 2  # the first batches compile, allocate, and fill caches
    end, start = begins.values[-1], begins.values[skipped]
    span = min(MINUTES, (end - start) / 4.0)
    first = [at for at in range(skipped, count - 1) if begins.values[at] <= start + span]
    last = [at for at in range(skipped, count - 1) if begins.values[at] >= end - span]
    if len(first) < LASTS // 2 or len(last) < LASTS // 2:
        return None, told
    places = list(zip(begins.batches, begins.values, strict=True))
    steps = [(time - past) / (batch - one) for (one, past), (batch, time) in pairwise(places)]
    before, now = median([steps[at] for at in first]), median([steps[at] for at in last])
    if not (before > 0 and now > 0):
        return None, told
    ratio = now / before
    if 0.75 <= ratio <= 4 / 3:
        return None, f"{told}, steady"
    if span < MINUTES:
        return None, told
    told = f"{told} ({figure(1 / before)} in the first minutes, {figure(1 / now)} in the last)"
    work = median([forwards.values[at] for at in last]) / max(median([forwards.values[at] for at in first]), 1e-9)
    if ratio < SLOWER or work >= SLOWER_FORWARD:
        return None, told
    slow = 1.5 * before
    since = next(at + 1 for at in range(count - 2, -1, -1) if at < skipped or median(steps[max(0, at - 8) : at + 9]) < slow)
    batch = begins.batches[min(since, last[0])]
    text = f"a batch takes x{figure(ratio)} as long as in the first minutes, since about batch {batch}, and its forward does not"
    return Doubt("slower", batch, text), told


def _smoothed(values: Sequence[float]) -> list[float]:
    """Medians of SMOOTHED numbers, shorter at both ends."""
    reach = SMOOTHED // 2
    return [median(values[max(0, at - reach) : at + reach + 1]) for at in range(len(values))]
