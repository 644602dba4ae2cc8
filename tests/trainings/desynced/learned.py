"""Trainings that keep their replicas equal by hand, or forgot to: nothing declares them equal."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recorded.truths import Truth
from trainings.by_hand import gathered, gradients_summed, own_part, parts_summed
from trainings.case import Training
from trainings.ranks import reduce_gradients
from trainings.truths import desynced

from .parts import Block, Data, Tower, following, net

LEARNED = 40
"""A subset is named once it has differed for 32 steps; its parameters are compared in turn."""
ALONE = 150
"""Ranks that do not talk are named after 128 steps."""


@desynced(Truth(("initialisation",), (0, 1), 0, within=32, is_declared=False), batches=80)
def two_models_of_their_own() -> Training:
    """The script forgot DDP, and its seeds differ."""
    return following(net(seed=dist.get_rank()))


@desynced(Truth(("unsynchronised",), (0, 1), 1, within=ALONE, is_declared=False), batches=200)
def two_models_of_one_seed() -> Training:
    """The script forgot DDP."""
    return following(net())


@desynced(Truth(("unsynchronised",), (0, 1, 2), 1, within=ALONE, is_declared=False), ranks=3, batches=200)
def three_models_and_a_mean_loss() -> Training:
    """Forgot DDP as well; the loss is averaged for the log, which is no more than a number."""
    training = following(net())

    def step(number: int) -> Tensor:
        loss = torch.tensor(training.step(number))
        dist.all_reduce(loss)
        return loss / dist.get_world_size()

    return Training(training.root, step)


@desynced(Truth(("subset",), (0, 1), 1, ("head.bias",), 1, within=LEARNED, is_declared=False))
def a_bias_left_out_by_hand() -> Training:
    model = net()
    reduced = [parameter for name, parameter in model.named_parameters() if name != "head.bias"]
    return following(model, between=lambda number: reduce_gradients(reduced))


@desynced(Truth(("subset",), (0, 1, 2), 1, ("head.",), 2, within=LEARNED, is_declared=False), ranks=3)
def a_head_replaced_after_the_list_was_made() -> Training:
    """The list of what is reduced still has the old head."""
    model = net()
    reduced = list(model.parameters())
    torch.manual_seed(3)
    model.head = nn.Linear(8, 4)
    return following(model, between=lambda number: reduce_gradients(reduced))


@desynced(Truth(("subset",), (0, 1), 1, ("blocks.2.down.", "head."), 4, within=LEARNED, is_declared=False))
def a_flat_buffer_that_is_too_short() -> Training:
    """Gradients are reduced in one buffer, whose last elements are lost by a division."""
    model = net()

    def between(number: int) -> None:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        whole = torch.cat([gradient.view(-1) for gradient in gradients])
        used = whole[: whole.numel() // 128 * 128]
        dist.all_reduce(used)
        whole[: used.numel()] = used / dist.get_world_size()
        for gradient, part in zip(gradients, whole.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    return following(model, between=between)


class SplitBlock(Block):
    """Tensor parallelism by hand, as in Megatron, with a norm in parts of the sequence, whose gradients must be summed."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Any:
        whole = gathered(self.norm(own_part(x)))
        return x + parts_summed(self.down(torch.tanh(self.up(gradients_summed(whole)))))


@desynced(
    Truth(("subset",), (0, 1), 1, tuple(f"blocks.{i}.norm." for i in range(3)), 6, within=LEARNED, is_declared=False),
    groups=((0, 1),),
)
def norms_of_shards_written_by_hand() -> Training:
    """The other modules of a block are shards of their own by right, and no one says so."""
    torch.manual_seed(0)
    model = Tower()
    torch.manual_seed(10 + dist.get_rank())
    for index in range(3):
        model.blocks[index] = SplitBlock()
    return following(model, Data(0))
