"""A bad step is left out, or it ends the training, and then the trip says why it was not left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from notebook import Notebook
from rankwatch.errors import TrainingAborted
from rankwatch.hook.detector import Detector
from rankwatch.rerun.capsule.capsule import CapsuleRules
from rankwatch.shared.types.bad_step import OnBadStep
from rankwatch.shared.types.config import Config
from rankwatch.shared.types.notice import NoticeKind

NAN = float("nan")


class Trained:
    """A model that is watched, its optimizer, and what is reported."""

    def __init__(
        self,
        model: nn.Module,
        make: Callable[[Any], Any] = lambda some: torch.optim.SGD(some, 0.1),
        most: int = 3,
        closeup: float = 0.0,
    ) -> None:
        self.model, self.optimizer, self.notebook = model, make(model.parameters()), Notebook()
        self.detector = Detector(model, Config(on_bad_step=OnBadStep(most, 10), closeup=closeup), self.notebook)

    def backward(self, x: Tensor) -> None:
        self.optimizer.zero_grad()
        self.model(x).square().mean().backward()

    def step(self, *, bad: bool = False) -> None:
        self.backward(torch.full((2, 3), NAN) if bad else torch.ones(2, 3))
        self.optimizer.step()

    @property
    def steps(self) -> list[int]:
        return [trip.optimizer_step for trip in self.notebook.left_out]

    @property
    def refusal(self) -> str:
        (trip,) = self.notebook.trips
        assert trip.left_out is not None
        return trip.left_out.refused


@pytest.fixture
def trained() -> Iterator[Callable[..., Trained]]:
    made: list[Trained] = []

    def make(*args: Any, **kwargs: Any) -> Trained:
        made.append(Trained(*args, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.detector.remove()


def test_it_goes_on(trained: Callable[..., Trained]) -> None:
    one = trained(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    for number in range(6):
        before = [value.clone() for value in one.model.state_dict().values()]
        one.step(bad=number in (2, 4))
        changed = not all(map(torch.equal, before, one.model.state_dict().values()))
        assert changed is (number not in (2, 4))
    assert one.steps == [2, 4]
    assert one.notebook.trips == []
    assert [trip.left_out and trip.left_out.budget_left for trip in one.notebook.left_out] == [2, 1]
    assert {"1.running_mean", "1.running_var"} <= set(one.notebook.left_out[0].left_out.restored)  # type: ignore[union-attr]
    assert one.notebook.notices == []


def test_the_budget_is_spent(trained: Callable[..., Trained]) -> None:
    one = trained(nn.Linear(3, 3), most=1)
    one.step()
    one.step(bad=True)
    with pytest.raises(TrainingAborted):
        one.step(bad=True)
    assert one.refusal == "1 of the last 10 steps were left out, as many as skip=1/10 allows"


def test_a_weight_is_bad_already(trained: Callable[..., Trained]) -> None:
    one = trained(nn.Linear(3, 3))
    one.step()
    with torch.no_grad():
        one.model.weight[0, 0] = NAN  # type: ignore[operator]
    with pytest.raises(TrainingAborted):
        one.step()
    assert "a weight or buffer is bad already" in one.refusal


def test_an_optimizer_that_does_not_stand_still(trained: Callable[..., Trained]) -> None:
    one = trained(nn.Linear(3, 3), lambda some: torch.optim.LBFGS(some, 0.1))

    def closure() -> float:
        one.backward(torch.full((2, 3), NAN))
        return 0.0

    with pytest.raises(TrainingAborted):
        one.optimizer.step(closure)
    assert "LBFGS" in one.refusal


class _Decays(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            self.param_groups[0]["params"][0].mul_(0.99)
        return super().step(closure)


def test_an_optimizer_that_changes_weights_without_gradients(trained: Callable[..., Trained]) -> None:
    one = trained(nn.Linear(3, 3), lambda some: _Decays(some, 0.1))
    one.step()
    with pytest.raises(TrainingAborted):
        one.step(bad=True)
    assert one.refusal == "_Decays has changed weights or its state without gradients"


def test_an_optimizer_of_copies(trained: Callable[..., Trained]) -> None:
    one = trained(nn.Linear(3, 3), lambda some: torch.optim.SGD([value.detach().clone() for value in some], 0.1))
    with pytest.raises(TrainingAborted):
        one.step(bad=True)
    assert "the parameters of SGD are copies" in one.refusal


def test_the_training_ends_before_the_step(trained: Callable[..., Trained]) -> None:
    one = trained(nn.Linear(3, 3))
    one.step()
    one.backward(torch.full((2, 3), NAN))
    one.detector.remove()
    assert one.refusal == "the training ended before its step"


class _Masks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
        self.side = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        self.side(h.detach() / 0 * 0)
        found: Tensor = self.last(h)
        return found


def test_what_harms_no_gradient_is_told_once(trained: Callable[..., Trained]) -> None:
    one = trained(_Masks())
    for _ in range(4):
        one.step()
    assert (one.steps, one.notebook.trips) == ([], [])
    assert [notice.kind for notice in one.notebook.notices] == [NoticeKind.HARMLESS_LOSS]


def test_a_step_that_the_training_skips_by_itself(trained: Callable[..., Trained]) -> None:
    one = trained(nn.Linear(3, 3))
    for number in range(12):
        one.backward(torch.full((2, 3), NAN) if number == 8 else torch.ones(2, 3))
        if number == 8:
            one.optimizer.zero_grad()
        else:
            one.optimizer.step()
    assert (one.steps, one.notebook.trips) == ([], [])
    assert [(notice.kind, notice.batch) for notice in one.notebook.notices] == [(NoticeKind.SKIPPED_STEP, 8)]


def test_what_a_forward_counts_goes_on(trained: Callable[..., Trained], tmp_path: Path) -> None:
    """The bad forward was run again, and its capsule was written."""

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.calls = nn.Linear(3, 3), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.linear(x) / (self.calls != 3)  # type: ignore[no-any-return]

    counts = Counts()
    one = trained(counts, closeup=5.0)
    one.notebook.rules = CapsuleRules(tmp_path)
    for _ in range(6):
        one.step()
    assert (one.steps, counts.calls) == ([2], 6)
    assert one.notebook.closeups[0].recurred == one.notebook.closeups[0].of == 3
    assert list(tmp_path.iterdir())
