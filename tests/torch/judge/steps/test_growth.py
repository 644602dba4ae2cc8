"""Trainings that diverge: whether their optimizer made the weights grow, or other code did."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from notebook import UNHURRIED, Notebook
from rankwatch.errors import TrainingAborted
from rankwatch.hook.detector import Detector
from rankwatch.judge.outside import Outside
from rankwatch.shared.types.config import resolve
from rankwatch.shared.words.cause import advise
from rankwatch.shared.words.divergence import OwnLosses

MOST = 1500
RATE, LATE = 0.01, 100
OTHER = "other code writes to the weights"

After = Callable[[nn.Module, int], object]


def net() -> Any:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


def of(model: nn.Module) -> list[Tensor]:
    return [value.detach() for value in model.parameters()]


def scaled(model: nn.Module, number: int) -> None:
    with torch.no_grad():
        for value in model.parameters():
            value.mul_(1.3)


def scaled_unseen(model: nn.Module, number: int) -> None:
    for value in model.parameters():
        value.data *= 1.2


def scaled_together(model: nn.Module, number: int) -> None:
    torch._foreach_mul_(of(model), 1.1)


def decayed_upwards(model: nn.Module, number: int) -> None:
    with torch.no_grad():
        for value in model.parameters():
            value.add_(value, alpha=0.2)


class Taught(nn.Module):
    """Learns what a teacher says, which is the average of its own weights."""

    def __init__(self, keep: float, rest: float) -> None:
        super().__init__()
        self.student = net()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.keep, self.rest = keep, rest

    def average(self, _: nn.Module, number: int) -> None:
        for mean, value in zip(of(self.teacher), of(self.student), strict=True):
            mean.mul_(self.keep).add_(value, alpha=self.rest)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher(x + 0.1) + x
        return (self.student(x) - target).square().mean()  # type: ignore[no-any-return]


class Reparametrised(nn.Sequential):
    def __init__(self, how: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__(how(nn.Linear(4, 8)), nn.Tanh(), how(nn.Linear(8, 4)))


def clipped(model: nn.Module, number: int) -> None:
    """A Wasserstein GAN's critic."""
    next(model.parameters()).data.clamp_(-0.3, 0.3)


def looked_at_with_an_average(model: nn.Module, number: int) -> None:
    """The weights are swapped for others, and back."""
    if number % 5 == 0:
        kept = copy.deepcopy(model.state_dict())
        model.load_state_dict({name: 3 * value for name, value in kept.items()})
        model.load_state_dict(kept)


def loaded(model: nn.Module, number: int) -> None:
    if number == 3:
        model.load_state_dict({name: 3 * value for name, value in model.state_dict().items()})


def renormed(model: nn.Module, number: int) -> None:
    """A weight keeps its norm."""
    with torch.no_grad():
        value = next(model.parameters())
        value.mul_(2.0 / value.norm())


class Student(nn.Module):
    def __init__(self, both: Taught) -> None:
        super().__init__()
        self.net, self.taught = both.student, both.forward

    def forward(self, x: Tensor) -> Any:
        return self.taught(x)


def run(
    model: Any, *after: After, rate: float = RATE, late: float = RATE, adam: bool = False, outside: Outside | None = None
) -> str:
    """What is said of the divergence, and the advice. ``late``: the rate from batch LATE on."""
    torch.manual_seed(0)
    notebook, optimizers = Notebook(), {False: torch.optim.SGD, True: torch.optim.AdamW}
    detector = Detector(model, resolve(UNHURRIED, check="frame"), notebook, outside=outside)
    trained = [value for value in model.parameters() if value.requires_grad]
    optimizer, losses = optimizers[adam](trained, lr=rate), OwnLosses()
    with suppress(TrainingAborted):
        for number in range(MOST):
            x = torch.randn(16, 4)
            out = model(x)
            loss = out if not out.dim() else (out - x.sin()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.param_groups[0]["lr"] = late if number >= LATE else rate
            optimizer.step()
            for one in after:
                one(model, number)
    detector.remove()
    for table, summary in notebook.sent:
        losses.take(table, summary)
    cause, said = losses.explain(notebook.trips[0])
    return f"{cause.value}: {said} -> {advise(cause, notebook.trips[0], None)}"


@pytest.mark.parametrize(
    ("after", "adam"),
    [(scaled, False), (scaled_unseen, False), (scaled_together, True), (decayed_upwards, True)],
)
def test_weights_that_are_scaled_by_hand(after: After, adam: bool) -> None:
    said = run(net(), after, adam=adam)
    assert said.count(OTHER) == 1, said
    assert "look at code that writes to" in said
    assert "learning rate" not in said


@pytest.mark.parametrize(("keep", "rest"), [(1.1, 0.0), (0.95, 0.5)])
def test_a_teacher_whose_average_blows_up(keep: float, rest: float) -> None:
    model = Taught(keep, rest)
    said = run(model, model.average)
    assert "of teacher." in said, said
    assert said.count(f"no optimizer's step does that: {OTHER}") == 1, said
    assert "learning rate" not in said


def test_a_teacher_outside_of_the_model() -> None:
    both, outside = Taught(1.1, 0.0), Outside()
    outside.watch(both.teacher, "teacher")
    student = Student(both)
    said = run(student, both.average, outside=outside)
    assert "of teacher." in said, said
    assert "learning rate" not in said


@pytest.mark.parametrize(
    "after",
    [None, clipped, looked_at_with_an_average, loaded, renormed],
    ids=lambda one: getattr(one, "__name__", "nothing"),
)
def test_a_rate_that_is_too_large(after: After | None) -> None:
    said = run(net(), *([after] if after else []), late=1e3)
    assert OTHER not in said, said


def test_a_rate_that_is_too_large_for_a_student() -> None:
    model = Taught(0.9, 0.1)
    assert OTHER not in run(model, model.average, late=1e3)


@pytest.mark.parametrize("how", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_a_rate_that_is_too_large_for_parametrised_weights(how: Callable[[nn.Module], nn.Module]) -> None:
    assert OTHER not in run(Reparametrised(how), late=1e5)
