"""Which optimizers are the model's own: each step of each optimizer of the process asks three times."""

from __future__ import annotations

from collections.abc import ValuesView

import torch
from torch import nn
from torch.optim import SGD

from rankwatch.judge.steps.optimizer_steps import ASKED_AGAIN, OptimizerSteps


class Counted(dict[str, nn.Parameter | None]):
    """Counts how often it is listed."""

    lists = 0

    def values(self) -> ValuesView[nn.Parameter | None]:  # type: ignore[override]
        self.lists += 1
        return super().values()


def test_another_models_optimizer_is_looked_at_rarely() -> None:
    model = nn.Linear(4, 4)
    model._parameters = own = Counted(model._parameters)
    steps, foreign = OptimizerSteps(model), SGD(nn.Linear(4, 4).parameters(), lr=0.1)
    assert not any(steps.is_ours(foreign) for _ in range(2 * ASKED_AGAIN))
    assert own.lists == 2


def test_a_parameter_that_is_added_to_another_models_optimizer_makes_it_ours_at_once() -> None:
    model = nn.Linear(4, 4)
    steps, foreign = OptimizerSteps(model), SGD(nn.Linear(4, 4).parameters(), lr=0.1)
    assert not steps.is_ours(foreign)
    foreign.add_param_group({"params": list(model.parameters())})
    assert steps.is_ours(foreign)


def test_a_parameter_that_comes_to_the_model_later_makes_its_optimizer_ours() -> None:
    model, head = nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4)
    steps, foreign = OptimizerSteps(model), SGD(head.parameters(), lr=0.1)
    assert not steps.is_ours(foreign)
    model.append(head)
    asked = [steps.is_ours(foreign) for _ in range(ASKED_AGAIN)]
    assert asked[-1]
    steps.count(foreign, 0)
    assert (steps.done, steps.of(foreign)) == (1, 1)


def test_an_optimizer_that_has_stepped_stays_ours() -> None:
    model = nn.Linear(4, 4)
    steps, own = OptimizerSteps(model), SGD(model.parameters(), lr=0.1)
    steps.count(own, 0)
    model.weight = nn.Parameter(torch.zeros(4, 4))
    model.bias = nn.Parameter(torch.zeros(4))
    assert steps.is_ours(own)
