"""What the ranks are fed: the same by chance, by right, or nothing."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from .case import Net, Step, healthy, trained


@healthy(compared=6)
def inputs_that_never_change() -> Step:
    """A benchmark: all ranks are fed the same ones."""
    model = DistributedDataParallel(Net())
    x = torch.ones(4, 8)
    return trained(model, lambda n: model(x).square().mean())


@healthy(compared=6)
def a_tiny_data_set() -> Step:
    """Two samples: often both ranks happen to draw the same one."""
    model = DistributedDataParallel(Net())
    data = torch.eye(2, 8)
    return trained(model, lambda n: model(data[torch.randint(2, (1,))]).square().mean())


class Draws(Net):
    """Is told the time only, and draws its data itself."""

    def forward(self, time: Tensor) -> Tensor:
        return super().forward(torch.randn(4, 8) + time)


@healthy(compared=6)
def data_drawn_in_the_model() -> Step:
    model = DistributedDataParallel(Draws())
    return trained(model, lambda n: model(torch.tensor([float(n)])).square().mean())


@healthy(compared=6)
def no_input_at_all() -> Step:
    class Alone(Net):
        def forward(self) -> Tensor:  # type: ignore[override]
            return super().forward(torch.randn(4, 8))

    model = DistributedDataParallel(Alone())
    return trained(model, lambda n: model().square().mean())


@healthy(compared=6)
def the_same_prompts() -> Step:
    """Each rank rolls out other answers to the same prompts, and trains on them."""
    model = DistributedDataParallel(Net())

    def loss(number: int) -> Tensor:
        prompts = torch.full((4, 8), float(number))
        with torch.no_grad():
            model.module(prompts)
        choice = torch.distributions.Categorical(logits=model(prompts + torch.randn(4, 8)))
        out: Tensor = -(choice.log_prob(choice.sample()) * torch.randn(4)).mean()
        return out

    return trained(model, loss)


@healthy(compared=6)
def validation_that_all_ranks_see() -> Step:
    """Ten batches without gradients after each step, the same ones on all ranks."""
    model = DistributedDataParallel(Net())

    def after(number: int) -> None:
        model.eval()
        with torch.no_grad():
            for batch in range(10):
                model(torch.full((4, 8), batch + number / 100))
        model.train()

    return trained(model, after=after)
