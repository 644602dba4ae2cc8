"""What the ranks are fed: the same by chance, by right, or nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from trainings.case import Training
from trainings.ranks import Net, taught
from trainings.truths import agreeing


@agreeing(compared=6)
def inputs_that_never_change() -> Training:
    """A benchmark: all ranks are fed the same ones."""
    model = DistributedDataParallel(Net())
    x = torch.ones(4, 8)
    return taught(model, lambda n: model(x).square().mean())


@agreeing(compared=6)
def a_tiny_data_set() -> Training:
    """Two samples: often both ranks happen to draw the same one."""
    model = DistributedDataParallel(Net())
    data = torch.eye(2, 8)
    return taught(model, lambda n: model(data[torch.randint(2, (1,))]).square().mean())


class Draws(Net):
    """Is told the time only, and draws its data itself."""

    def forward(self, time: Tensor) -> Any:
        return super().forward(torch.randn(4, 8) + time)


@agreeing(compared=6)
def data_drawn_in_the_model() -> Training:
    model = DistributedDataParallel(Draws())
    return taught(model, lambda n: model(torch.tensor([float(n)])).square().mean())


@agreeing(compared=6)
def no_input_at_all() -> Training:
    class Alone(Net):
        def forward(self) -> Any:  # type: ignore[override]
            return super().forward(torch.randn(4, 8))

    model = DistributedDataParallel(Alone())
    return taught(model, lambda n: model().square().mean())


@agreeing(compared=6)
def the_same_prompts() -> Training:
    """Each rank rolls out other answers to the same prompts, and trains on them."""
    model = DistributedDataParallel(Net())

    def loss(number: int) -> Any:
        prompts = torch.full((4, 8), float(number))
        with torch.no_grad():
            model.module(prompts)
        choice = torch.distributions.Categorical(logits=model(prompts + torch.randn(4, 8)))
        return -(choice.log_prob(choice.sample()) * torch.randn(4)).mean()

    return taught(model, loss)


@agreeing(compared=6)
def validation_that_all_ranks_see() -> Training:
    """Ten batches without gradients after each step, the same ones on all ranks."""
    model = DistributedDataParallel(Net())

    def after(number: int) -> None:
        model.eval()
        with torch.no_grad():
            for batch in range(10):
                model(torch.full((4, 8), batch + number / 100))
        model.train()

    return taught(model, after=after)
