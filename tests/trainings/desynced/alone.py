"""What shows without other replicas: inputs that are alike, weights that never change, weights that came untied."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from notebook import take_step
from recorded.truths import Truth
from trainings.case import Training
from trainings.ranks import reduce_gradients
from trainings.truths import desynced

from .parts import Data, Tower, ddp, following, net, sgd

TOLD_AFTER = 50
"""A parameter that never changed is named after 32 optimizer steps, give or take a rotation."""


@desynced(Truth(("same-input",), (0, 1), 0, ("input",), 1, within=16), batches=60)
def one_shard_for_two_ranks() -> Training:
    """The sampler is the same on both ranks."""
    return following(ddp(net()), Data(0))


@desynced(Truth(("same-input",), (0, 2), 0, ("input",), 2, lines=2, within=16), ranks=4, batches=60)
def a_sampler_of_two_for_four_ranks() -> Training:
    """Ranks 0 and 2 are fed the same, and ranks 1 and 3."""
    return following(ddp(net()), Data(dist.get_rank() % 2))


@desynced(Truth(("same-input",), (1, 2), 40, ("input",), 1, within=16), ranks=3, batches=80)
def workers_that_drew_the_same_seed() -> Training:
    """From step 40 on, as the second epoch begins."""
    root, own, same = ddp(net()), Data(), Data(99)
    return following(root, loss_of=lambda n: (own if n < 40 or dist.get_rank() == 0 else same).loss(root))


@desynced(Truth(("never-changed",), (0, 1), 0, ("head.weight",), 1, within=TOLD_AFTER))
def a_parameter_in_no_optimizer() -> Training:
    root = ddp(net())
    trained = [parameter for name, parameter in root.module.named_parameters() if name != "head.weight"]
    return following(root, optimizer=torch.optim.SGD(trained, lr=0.02))


@desynced(Truth(("never-changed",), (0, 1), 0, ("adapter.",), 2, within=TOLD_AFTER))
def an_adapter_added_after_the_optimizer() -> Training:
    class Adapted(Tower):
        adapter: nn.Module

        def forward(self, x: Tensor) -> Any:
            return super().forward(x + self.adapter(x))

    torch.manual_seed(0)
    model: Any = Adapted()
    optimizer = sgd(model)
    model.adapter = nn.Linear(8, 8)
    return following(ddp(model), optimizer=optimizer)


@desynced(Truth(("never-changed",), (0, 1), 0, ("blocks.",), 3, within=TOLD_AFTER))
def norms_whose_updates_are_rounded_away() -> Training:
    """Weights of one in bfloat16, and a learning rate of 5e-4: Adam's updates are below half of the last bit."""
    torch.manual_seed(0)
    model = Tower()
    for block in model.blocks:
        block.norm = LowNorm()
    root = ddp(model)
    return following(root, optimizer=torch.optim.Adam(root.parameters(), lr=5e-4))


class LowNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, (8,), self.weight.float())


class Tied(nn.Module):
    """The head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(16, 8), Tower(), nn.Linear(8, 16, bias=False)
        self.body.head = nn.Linear(8, 8)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Any:
        return self.head(self.body(self.embed(ids)))


@desynced(Truth(("untied",), (0, 1), 61, ("head.weight", "embed.weight"), 1, within=16))
def a_head_that_came_untied() -> Training:
    """Something replaced the head's weight by a copy of it."""
    torch.manual_seed(0)
    model: Any = Tied()
    root = ddp(model)
    optimizers = [sgd(root)]
    draw = torch.Generator().manual_seed(dist.get_rank())

    def before(number: int) -> None:
        if number == 60:
            model.head.weight = nn.Parameter(model.head.weight.detach().clone())
            optimizers[0] = sgd(root)

    def step(number: int) -> Tensor:
        ids = torch.randint(0, 16, (8,), generator=draw)
        loss = nn.functional.cross_entropy(root(ids), (ids * 3 + 1) % 16)
        loss.backward()
        if number >= 60:  # DDP does not know the new parameter: its gradient is averaged by hand
            reduce_gradients([model.head.weight])
        take_step(optimizers[0])
        return loss.detach()

    return Training(root, step, before)
