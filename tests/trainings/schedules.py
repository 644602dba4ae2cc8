"""Steps of several forwards, in which the gradients of some ranks go bad: drawn at random, and who was first is known."""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainings.case import Training
from trainings.ranks import reduce_gradients
from trainings.truths import spoilt

SCHEDULES, STEPS, BAD_STEP = 20, 4, 2
LARGE = 3000
"""Rows of a slow rank's batch."""


class Length(nn.Module):
    """Appends the length of each row: its slope at 0 is infinite."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((x, x.square().sum(-1, keepdim=True).sqrt()), -1)


@dataclass(frozen=True)
class Schedule:
    """By rank: the forwards of each step, the one of the bad step that goes bad (-1: none), and the rows of a batch.

    ``way``: one backward after each forward or ``at_once`` for all of them, reduced by DDP; or, by hand, all backwards after all
    forwards, the last one first.
    """

    way: str
    forwards: tuple[tuple[int, ...], ...]
    bad: tuple[int, ...]
    rows: tuple[int, ...]

    @property
    def first(self) -> tuple[int, int]:
        """The rank that goes bad first, and the batch as it counts."""
        micro, rank = min((micro, rank) for rank, micro in enumerate(self.bad) if micro >= 0)
        return rank, sum(self.forwards[rank][:BAD_STEP]) + micro

    @property
    def is_uneven(self) -> bool:
        return len(set(self.forwards)) > 1


def drawn(seed: int) -> Schedule:
    draw = random.Random(seed)
    ranks, alike = draw.choice([2, 2, 3]), draw.randint(1, 4)
    extra = draw.choice([None, None, *range(ranks)])
    forwards = tuple(tuple(alike + (rank == extra and draw.random() < 0.7) for _ in range(STEPS)) for rank in range(ranks))
    guilty = draw.sample(range(ranks), draw.choice([1, 1, 2]))
    bad = tuple(draw.randrange(forwards[rank][BAD_STEP]) if rank in guilty else -1 for rank in range(ranks))
    slow = draw.choice([None, *range(ranks)])
    rows = tuple(LARGE if rank == slow else 8 for rank in range(ranks))
    return Schedule(draw.choice(["each", "at_once", "by_hand"]), forwards, bad, rows)


def scheduled(schedule: Schedule) -> Training:
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16, bias=False), Length(), nn.Linear(17, 4))
    model: Any = net if schedule.way == "by_hand" else DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def loss_of(step: int, micro: int) -> Any:
        x = torch.randn(schedule.rows[rank], 8)
        if step == BAD_STEP and micro == schedule.bad[rank]:
            x[3] = 0.0
        return model(x).square().mean()

    def step(number: int) -> None:
        optimizer.zero_grad()
        count = schedule.forwards[rank][number]
        if schedule.way == "each":
            for micro in range(count):
                with nullcontext() if micro == count - 1 else model.no_sync():
                    loss_of(number, micro).backward()
        else:
            losses = [loss_of(number, micro) for micro in range(count)]
            if schedule.way == "at_once":
                torch.stack(losses).sum().backward()
            else:
                for loss in reversed(losses):
                    loss.backward()
                reduce_gradients(net.parameters())
        optimizer.step()

    return Training(model, step)


for seed in range(SCHEDULES):
    schedule = drawn(seed)
    culprit, batch = schedule.first
    truth = {"certainty": "complete"} if not schedule.is_uneven else {}
    spoilt(
        batches=STEPS, ranks=len(schedule.bad), rank=culprit, batch=batch, module="1", cause="gradient", state="nan", **truth
    ).each(**{f"schedule_{seed}_{schedule.way}": partial(scheduled, schedule)})
