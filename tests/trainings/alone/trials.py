"""Weights on trial: code other than an optimizer writes them, looks at what comes of them, and mostly takes them back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from trainings.case import Training
from trainings.parts import BAD, Root, chain
from trainings.truths import healthy, hostile


def data(number: int) -> Tensor:
    return torch.rand(4, 4, generator=torch.Generator().manual_seed(number)) - 0.5


def linear() -> Any:
    return chain(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 4))


def write(model: nn.Module, values: Iterable[Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), values, strict=True):
            parameter.copy_(value)


def write_unseen(model: nn.Module, values: Iterable[Tensor]) -> None:
    for parameter, value in zip(model.parameters(), values, strict=True):
        parameter.data.copy_(value)


def searched(put: Callable[[nn.Module, Iterable[Tensor]], None], rates: tuple[float, ...]) -> Training:
    """Each batch tries step sizes along its gradient, the largest first."""
    model = linear()

    def step(number: int) -> None:
        model.zero_grad()
        loss = model(data(number)).square().mean()
        loss.backward()
        old, slopes = [one.detach().clone() for one in model.parameters()], [one.grad for one in model.parameters()]
        for rate in rates:
            put(model, [value - rate * slope for value, slope in zip(old, slopes, strict=True)])
            with torch.no_grad():
                if model(data(number)).square().mean() < loss:
                    break
        else:
            put(model, old)

    return Training(model, step)


RATES = (1e25, 1e24, 0.1, 0.01)

hostile(notice="[TRIAL 1.output]").each(
    a_line_search=lambda: searched(write, RATES),
    a_line_search_unseen_by_autograd=lambda: searched(write_unseen, RATES),
)
hostile(notice="[TRIAL 1.output]", check="batch").each(a_line_search_read_once_a_batch=lambda: searched(write, RATES))
hostile(notice="[TRIAL 1.output]", gradients=True).each(a_line_search_with_gradients=lambda: searched(write, RATES))
hostile(notice="[TRIAL 0.weight]").each(a_line_search_with_inf_weights=lambda: searched(write, (1e42, 1e41, 0.1)))


def tried(try_it: Callable[[Any, int], None]) -> Training:
    """An optimizer trains; weights are tried in batch BAD."""
    model = linear()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)

    def step(number: int) -> None:
        optimizer.zero_grad()
        model(data(number)).square().mean().backward()
        optimizer.step()
        if number == BAD:
            model.eval()
            with torch.no_grad():
                try_it(model, number)
            model.train()

    return Training(model, step)


def along_a_line(model: Any, number: int) -> None:
    """The landscape of the loss."""
    old = [one.clone() for one in model.parameters()]
    for length in (0.1, 1e30):
        write_unseen(model, [value + length for value in old])
        model(data(number))
    write_unseen(model, old)


def from_a_file(model: Any, number: int) -> None:
    old = copy.deepcopy(model.state_dict())
    model.load_state_dict({name: value * 1e20 for name, value in old.items()})
    model(data(number))
    model.load_state_dict(old)


def by_functional_call(model: Any, number: int) -> None:
    tried = {name: value + 1e20 for name, value in model.named_parameters()}
    torch.func.functional_call(model, tried, (data(number),))


hostile(notice="[TRIAL 1.output]").each(
    a_landscape_of_the_loss=lambda: tried(along_a_line),
    a_state_that_is_tried=lambda: tried(from_a_file),
    weights_of_a_functional_call=lambda: tried(by_functional_call),
)


@hostile(notice="[TRIAL .output]")
def a_variance_that_becomes_negative() -> Training:
    """Maximum likelihood: the search rejects what has no logarithm."""
    variance, x = nn.Parameter(torch.ones(1)), 0.1 * torch.randn(64)
    model = Root(lambda self, x: (0.5 * self.variance.log() + x.square() / (2 * self.variance)).mean(), variance=variance)

    def step(number: int) -> None:
        model.zero_grad()
        loss = model(x)
        loss.backward()
        assert variance.grad is not None
        old, slope, rate = variance.detach().clone(), variance.grad, 10.0
        while rate > 1e-6:
            write(model, [old - rate * slope])
            with torch.no_grad():
                if model(x) < loss:
                    return
            rate /= 2
        write(model, [old])

    return Training(model, step)


@hostile(notice="[TRIAL 1.output]")
def an_evolution() -> Training:
    """No backward ever comes: the best of several is kept."""
    model = linear()

    def members() -> Iterator[list[Tensor]]:
        for spread in (0.0, 0.1, 1e20, 0.1):
            yield [value + spread * torch.randn_like(value) for value in old]

    old = [one.detach().clone() for one in model.parameters()]

    def step(number: int) -> None:
        nonlocal old
        with torch.no_grad():
            scores = []
            for member in members():
                write(model, member)
                scores.append((float(model(data(number)).square().mean()), member))
        old = min((one for one in scores if one[0] < 1e30), key=lambda one: one[0])[1]

    return Training(model, step)


healthy(forwards=1).each(a_line_search_whose_trials_are_finite=lambda: searched(write, (1e3, 0.1, 0.01)))


# --- faults -----------------------------------------------------------------------------------------------------------


def averaged(model: Any, number: int) -> None:
    """A moving average whose correction is 0 / 0."""
    old = [one.clone() for one in model.parameters()]
    write(model, [value * torch.tensor(0.0) / 0.0 for value in old])
    model(data(number))
    write(model, old)


hostile("0", "weight", label="weight").each(an_average_that_is_nan=lambda: tried(averaged))


def kept(model: Any, number: int) -> None:
    write(model, [value + 1e20 for value in model.parameters()])
    model(data(number))


def kept_for_two(model: Any, number: int) -> None:
    kept(model, number)
    model(data(0))


hostile("1", ("overflow",), "inf").each(
    weights_that_are_written_and_kept=lambda: tried(kept),
    weights_that_are_kept_for_two_evaluations=lambda: tried(kept_for_two),
)
hostile("1", "overflow", ("inf", "nan"), batches=BAD + 1).each(weights_that_are_written_at_the_end=lambda: tried(kept))
