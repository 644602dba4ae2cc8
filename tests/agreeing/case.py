"""A healthy training of several ranks, the table of all, and what they are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import rankwatch
from recorded.truths import ANY as ANY

STEPS = 200
EPOCH = 50

Step = Callable[[int], object]


@dataclass(frozen=True)
class Case:
    """``build`` is called in each rank, which has a seed of its own, and watches its model; the step that it returns is called
    with the numbers up to STEPS.

    ``compared``: as in ``recorded.truths.Healthy``.
    """

    name: str
    build: Callable[[], Step]
    ranks: int
    compared: int


CASES: dict[str, Case] = {}


def healthy(*, compared: int, ranks: int = 2) -> Callable[[Callable[[], Step]], Callable[[], Step]]:
    """Adds a training to the table."""

    def add(build: Callable[[], Step]) -> Callable[[], Step]:
        name = build.__name__
        assert name not in CASES, name
        CASES[name] = Case(name, build, ranks, compared)
        return build

    return add


class Net(nn.Module):
    """Six parameters. Its attributes are anything: some trainings replace them."""

    first: Any
    second: Any
    head: Any

    def __init__(self, width: int = 8, middle: type[nn.Module] = nn.Identity) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 4)
        self.norm = middle(width) if middle is not nn.Identity else middle()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.second(torch.tanh(self.norm(self.first(x))))))
        return out


def same_seed(seed: int = 0) -> None:
    """What follows is drawn alike on all ranks."""
    torch.manual_seed(seed)


def own_seed() -> None:
    torch.manual_seed(100 + dist.get_rank())


def draw(count: int = 4, width: int = 8) -> tuple[Tensor, Tensor]:
    """Inputs, and targets that can be learned."""
    x = torch.randn(count, width)
    return x, x[:, :4].sin()


def loss_of(model: nn.Module) -> Tensor:
    x, y = draw()
    loss: Tensor = (model(x) - y).square().mean()
    return loss


def trained(
    model: nn.Module,
    loss: Callable[[int], Tensor] | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    watched: nn.Module | None = None,
    before: Callable[[int], object] = lambda number: None,
    between: Callable[[], object] = lambda: None,
    after: Callable[[int], object] = lambda number: None,
    **options: Any,
) -> Step:
    """Watches; returns the usual loop. ``before`` and ``after`` are called around each step, ``between`` after its backward."""
    rankwatch.watch(model if watched is None else watched, **options)
    return loop(model, loss, optimizer=optimizer, before=before, between=between, after=after)


def loop(
    model: nn.Module,
    loss: Callable[[int], Tensor] | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    before: Callable[[int], object] = lambda number: None,
    between: Callable[[], object] = lambda: None,
    after: Callable[[int], object] = lambda number: None,
) -> Step:
    """As ``trained``, of a model that is watched already."""
    stepped = optimizer or torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    def step(number: int) -> None:
        before(number)
        (loss_of(model) if loss is None else loss(number)).backward()
        between()
        stepped.step()
        stepped.zero_grad()
        after(number)

    return step


def reduce_gradients(parameters: Any, group: dist.ProcessGroup | None = None) -> None:
    """As a training without DDP does it by hand."""
    for parameter in parameters:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= dist.get_world_size(group)


def average(parameters: Any, group: dist.ProcessGroup | None = None) -> None:
    with torch.no_grad():
        for parameter in parameters:
            dist.all_reduce(parameter.data, group=group)
            parameter.data /= dist.get_world_size(group)


def broadcast(model: nn.Module, source: int = 0) -> None:
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.data, source)
