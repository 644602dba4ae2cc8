"""The line of the user's that called an operator of a bad loss: sure only where no other code can have called it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from closeups import line_of, operator_of, the_only
from notebook import ones, watching
from rankwatch.shared.types.closeup import CloseUp
from rankwatch.shared.types.trip import Trip

IGNORED = torch.tensor([-100, -100, -100])
CRITERION = nn.CrossEntropyLoss()


def in_a_line(model: nn.Module) -> None:
    F.cross_entropy(model(ones()), IGNORED).backward()  # in_a_line


def in_a_variable(model: nn.Module) -> None:
    out = model(ones())
    loss = F.cross_entropy(out, IGNORED)  # in_a_variable
    (loss / 4).backward()


def in_a_module_of_torch(model: nn.Module) -> None:
    loss = CRITERION(model(ones()), IGNORED)  # in_a_module_of_torch
    loss.backward()


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    total = (values * mask).sum()
    return total / mask.sum()  # in_a_function


def in_a_function(model: nn.Module) -> None:
    loss = masked_mean(model(ones()), torch.zeros(3, 1))
    (loss * 4).backward()


class Focal(nn.Module):
    def forward(self, p: Tensor) -> Tensor:
        return self.weigh(p).mean()

    def weigh(self, p: Tensor) -> Tensor:
        q = 1 - p - 9
        return q.pow(0.5)  # in_a_module


def in_a_module(model: nn.Module) -> None:
    focal = Focal()
    focal(model(ones())).backward()


def over_several_lines(model: nn.Module) -> None:
    (
        model(ones())
        .softmax(-1)
        .mul(0)
        .log()  # over_several_lines
        .mean()
        .backward()
    )


def as_an_operator(model: nn.Module) -> None:
    out = model(ones())
    loss = out.abs().sum() / 0  # as_an_operator
    loss.backward()


class Trainer:
    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.criterion = nn.CrossEntropyLoss()

    def step(self) -> None:
        loss = self.loss_of(ones())
        loss.backward()

    def loss_of(self, x: Tensor) -> Tensor:
        loss: Tensor = self.criterion(self.model(x), IGNORED)  # in_an_object
        return loss


def in_an_object(model: nn.Module) -> None:
    Trainer(model).step()


def in_a_lambda(model: nn.Module) -> None:
    call: Callable[[Tensor], Tensor] = lambda p: p.log()  # noqa: E731  # in_a_lambda
    call(model(ones()) * 0).mean().backward()


SURE = [
    *(in_a_line, in_a_variable, in_a_module_of_torch, in_a_function, in_a_module, over_several_lines, as_an_operator),
    *(in_an_object, in_a_lambda),
]


def twice(model: nn.Module) -> None:
    out = model(ones())
    good = (out.abs() + 1).log().mean()
    (good + (out * 0).log().mean()).backward()


def through_a_map(model: nn.Module) -> None:
    good = model(ones()).softmax(-1).log().mean()
    (good + sum(map(torch.log, [torch.zeros(2, requires_grad=True)])).sum()).backward()  # type: ignore[union-attr]


def through_a_partial(model: nn.Module) -> None:
    power = functools.partial(torch.pow, exponent=0.5)
    (power(model(ones()).abs() * -1).mean() + model(ones()).abs().pow(2).mean()).backward()


def through_a_dictionary(model: nn.Module) -> None:
    calls: dict[str, Callable[[Tensor], Tensor]] = {"log": lambda x: getattr(x, "log")()}  # noqa: B009
    (calls["log"](model(ones()) * 0).mean() + model(ones()).softmax(-1).log().mean()).backward()


class Lazy:
    def __init__(self, out: Tensor) -> None:
        self.out = out

    @property
    def loss(self) -> Tensor:
        return (self.out * 0).log().mean()


def in_a_property(model: nn.Module) -> None:
    out = model(ones())
    lazy = Lazy(out)
    (lazy.loss + out.softmax(-1).log().mean()).backward()


def handed_over(model: nn.Module) -> None:
    ended((model(ones()) * 0).log().mean(), model(ones()).softmax(-1))


def ended(loss: Tensor, p: Tensor) -> None:
    (loss + p.log().mean()).backward()


NOT_SURE = [twice, through_a_map, through_a_partial, through_a_dictionary, handed_over, in_a_property]


def trained(step: Callable[[nn.Module], Any]) -> tuple[Trip, CloseUp]:
    model, _, notes = watching(policy="strict")
    return the_only(notes, step, model)


@pytest.mark.parametrize("step", SURE)
def test_the_line_is_known(step: Callable[[nn.Module], Any]) -> None:
    trip, found = trained(step)
    source = operator_of(trip).source
    assert source is not None
    assert (source.file, source.line) == (__file__, line_of(step.__name__, __file__))
    assert "perhaps" not in found.note


@pytest.mark.parametrize("step", NOT_SURE)
def test_no_line_is_claimed_that_may_be_another(step: Callable[[nn.Module], Any]) -> None:
    trip, _ = trained(step)
    assert operator_of(trip).source is None


def test_the_lines_that_may_be_it_are_in_the_note() -> None:
    _, found = trained(twice)
    assert f"perhaps its line is one of {__file__}:" in found.note
