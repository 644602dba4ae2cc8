"""What a rank sees alone: trainable parameters that never change, and tied ones that came untied."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from notebook import model_of, ones, watched
from rankwatch.shared.types.notice import Notice, NoticeKind
from trainings.parts import Root


@pytest.fixture(autouse=True)
def ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")


def found(
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    steps: int = 56,
    before: Callable[[int], None] = lambda step: None,
) -> list[tuple[str, str, str]]:
    """What is noticed in a training."""
    _, notebook = watched(model)
    for step in range(steps):
        before(step)
        model.zero_grad()
        model(ones().to(next(model.parameters()).dtype)).pow(2).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    assert not notebook.faults
    kinds = NoticeKind.NEVER_CHANGED, NoticeKind.UNTIED
    notices: list[Notice] = [one for one in notebook.notices if one.kind in kinds]
    assert all(one.batch <= 45 and one.value >= 0 for one in notices)
    return [(one.kind.name, one.module, one.label) for one in notices]


def sgd(*parameters: Tensor, lr: float = 1e-3) -> torch.optim.SGD:
    return torch.optim.SGD(list(parameters), lr=lr)


@pytest.mark.parametrize("world", ["1", "2"])
def test_a_parameter_in_no_optimizer(world: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", world)
    model = model_of(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = sgd(*[value for name, value in model.named_parameters() if name != "1.weight"])
    assert found(model, [optimizer]) == [("NEVER_CHANGED", "1", "weight")]


def test_updates_that_are_rounded_away() -> None:
    model = model_of(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    assert found(model, [optimizer]) == [("NEVER_CHANGED", "1", "weight")]


def silent(case: str) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    model = model_of(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizers: list[torch.optim.Optimizer] = [sgd(*model.parameters())]
    if case == "frozen":
        model[0].requires_grad_(False)
    elif case == "without a gradient":
        model.register_parameter("unused", nn.Parameter(torch.ones(3)))
    elif case == "zero gradient":
        model[1].get_parameter("weight").register_hook(lambda gradient: gradient * -0.0)
    elif case == "learning rate 0":
        optimizers[0].param_groups[0]["lr"] = 0.0
    elif case == "the optimizer steps later":
        optimizers = [sgd(*model[0].parameters()), sgd(*model[1].parameters())]
        late, steps = optimizers[1].step, [0]

        def step(closure: object = None) -> None:
            steps[0] += 1
            if steps[0] > 50:
                late()

        optimizers[1].step = step  # type: ignore[method-assign, assignment]
    elif case == "put back":
        weight = model[1].get_parameter("weight")
        first = weight.detach().clone()

        def put_back(_: Tensor) -> None:
            weight.data.copy_(first)

        model.get_submodule("0").get_parameter("bias").register_post_accumulate_grad_hook(put_back)
    return model, optimizers


@pytest.mark.parametrize(
    "case",
    ["usual", "frozen", "without a gradient", "zero gradient", "learning rate 0", "the optimizer steps later", "put back"],
)
def test_silent(case: str) -> None:
    assert found(*silent(case)) == []


def tied() -> Any:
    torch.manual_seed(0)
    first, last = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    last.weight = first.weight
    return Root(lambda self, x: self.last(self.first(x).relu()), first=first, last=last)


def test_parameters_that_came_untied() -> None:
    model = tied()
    optimizer = sgd(model.first.weight)

    def untie(step: int) -> None:
        if step == 5:
            model.last.weight = nn.Parameter(model.first.weight.detach().clone())
            optimizer.add_param_group({"params": [model.last.weight]})

    assert found(model, [optimizer], before=untie) == [("UNTIED", "last", "weight")]


def test_parameters_that_stay_tied() -> None:
    model = tied()

    def load(step: int) -> None:
        if step == 5:
            model.load_state_dict(copy.deepcopy(model.state_dict()))

    assert found(model, [sgd(*model.parameters())], before=load) == []


@pytest.mark.parametrize("keys", [["last.weight"], {"last.weight": "first.weight"}], ids=["a list", "a dict"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_a_model_that_says_what_is_tied(keys: object, is_tied: bool) -> None:
    model = tied()
    model.config = SimpleNamespace(tie_word_embeddings=True)
    model._tied_weights_keys = keys
    model.get_input_embeddings = lambda: model.first
    if not is_tied:
        model.last.weight = nn.Parameter(torch.randn(4, 4))
    assert found(model, [sgd(*model.parameters())]) == ([] if is_tied else [("UNTIED", "last", "weight")])
