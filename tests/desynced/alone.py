"""What shows without other replicas: inputs that are alike, weights that never change, weights that came untied."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .case import Data, Faulty, Net, Truth, average_gradients, ddp, desynced, net, sgd, taught

TOLD_AFTER = 50
"""A parameter that never changed is named after 32 optimizer steps, give or take a rotation."""


@desynced(Truth(("same-input",), (0, 1), 0, ("input",), 1, within=16), batches=60)
def one_shard_for_two_ranks(rank: int) -> Faulty:
    """The sampler is the same on both ranks."""
    return taught(ddp(net()), Data(0))


@desynced(Truth(("same-input",), (0, 2), 0, ("input",), 2, lines=2, within=16), ranks=4, batches=60)
def a_sampler_of_two_for_four_ranks(rank: int) -> Faulty:
    """Ranks 0 and 2 are fed the same, and ranks 1 and 3."""
    return taught(ddp(net()), Data(rank % 2))


@desynced(Truth(("same-input",), (1, 2), 40, ("input",), 1, within=16), ranks=3, batches=80)
def workers_that_drew_the_same_seed(rank: int) -> Faulty:
    """From step 40 on, as the second epoch begins."""
    root, own, same = ddp(net()), Data(rank), Data(99)
    optimizer = sgd(root)

    def step(number: int) -> Tensor:
        x, y = (own if number < 40 or rank == 0 else same).batch()
        loss = nn.functional.mse_loss(root(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Faulty(root, step)


@desynced(Truth(("never-changed",), (0, 1), 0, ("head.weight",), 1, within=TOLD_AFTER))
def a_parameter_in_no_optimizer(rank: int) -> Faulty:
    root = ddp(net())
    trained = [parameter for name, parameter in root.module.named_parameters() if name != "head.weight"]
    return taught(root, Data(rank), optimizer=torch.optim.SGD(trained, lr=0.02))


@desynced(Truth(("never-changed",), (0, 1), 0, ("adapter.",), 2, within=TOLD_AFTER))
def an_adapter_added_after_the_optimizer(rank: int) -> Faulty:
    class Adapted(Net):
        adapter: nn.Module

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = super().forward(x + self.adapter(x))
            return out

    torch.manual_seed(0)
    model: Any = Adapted()
    optimizer = sgd(model)
    model.adapter = nn.Linear(8, 8)
    return taught(ddp(model), Data(rank), optimizer=optimizer)


@desynced(Truth(("never-changed",), (0, 1), 0, ("blocks.",), 3, within=TOLD_AFTER))
def norms_whose_updates_are_rounded_away(rank: int) -> Faulty:
    """Weights of one in bfloat16, and a learning rate of 5e-4: Adam's updates are below half of the last bit."""
    torch.manual_seed(0)
    model = Net()
    for block in model.blocks:
        block.norm = LowNorm()
    root = ddp(model)
    return taught(root, Data(rank), optimizer=torch.optim.Adam(root.parameters(), lr=5e-4))


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
        self.embed, self.body, self.head = nn.Embedding(16, 8), Net(), nn.Linear(8, 16, bias=False)
        self.body.head = nn.Linear(8, 8)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(self.embed(ids)))
        return out


def language(rank: int, untie: int) -> Faulty:
    torch.manual_seed(0)
    model: Any = Tied()
    root = ddp(model)
    optimizers = [sgd(root)]
    draw = torch.Generator().manual_seed(rank)

    def before(number: int) -> None:
        if number == untie:
            model.head.weight = nn.Parameter(model.head.weight.detach().clone())
            optimizers[0] = sgd(root)

    def step(number: int) -> Tensor:
        ids = torch.randint(0, 16, (8,), generator=draw)
        loss = nn.functional.cross_entropy(root(ids), (ids * 3 + 1) % 16)
        loss.backward()
        if number >= untie:  # DDP does not know the new parameter: its gradient is averaged by hand
            average_gradients([model.head.weight])
        optimizers[0].step()
        optimizers[0].zero_grad()
        return loss.detach()

    return Faulty(root, step, before)


@desynced(Truth(("untied",), (0, 1), 61, ("head.weight", "embed.weight"), 1, within=16))
def a_head_that_came_untied(rank: int) -> Faulty:
    """Something replaced the head's weight by a copy of it."""
    return language(rank, untie=60)
