"""Trainings in which one rank calls another collective than the others: ``collectives.py NAME [TOLD]``.

``test_collectives.py`` has the truths. ``TOLD``: a file for which the ranks wait a few steps after that. Else a training of
milliseconds might be over, or 64 calls further, before a busy collector has asked.

What ranks call in the groups ``side`` is not waited for, so that nobody hangs.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import rankwatch

STEPS, AT = 150, 6
TOLD = AT + 2
"""The step after which ranks wait until the difference was told: within two steps."""

begun: list[object] = []
"""What nobody waits for."""
side: list[dist.ProcessGroup | None] = []


def flag(length: int = 1) -> torch.Tensor:
    return torch.ones(length)


# Each is called at the end of each step with its number; ``odd``: on the rank, and in the step, that differ.


def healthy(step: int, *, odd: bool) -> None:
    dist.all_reduce(flag())


def barrier(step: int, *, odd: bool) -> None:
    if odd:
        begun.append(dist.barrier(side[0], async_op=True))
    begun.append(dist.all_reduce(flag(), group=side[0], async_op=True))


def kind(step: int, *, odd: bool) -> None:
    if odd:
        begun.append(dist.broadcast(flag(), 0, group=side[0], async_op=True))
    else:
        begun.append(dist.all_reduce(flag(), group=side[0], async_op=True))


def size(step: int, *, odd: bool) -> None:
    begun.append(dist.all_reduce(flag(5 if odd else 4), group=side[0], async_op=True))


def group(step: int, *, odd: bool) -> None:
    begun.append(dist.broadcast(flag(), 0, group=side[1 if odd else 0], async_op=True))
    begun.append(dist.all_reduce(flag(), group=side[0], async_op=True))


def order(step: int, *, odd: bool) -> None:
    if odd:
        begun.append(dist.all_reduce(flag(3), group=side[0], async_op=True))
    begun.append(dist.all_reduce(flag(2), group=side[0], async_op=True))
    if not odd:
        begun.append(dist.all_reduce(flag(3), group=side[0], async_op=True))


def gathered(step: int, *, odd: bool) -> None:
    if odd:
        dist.all_gather_object([None] * dist.get_world_size(), {"step": step})


def evaluated(step: int, *, odd: bool) -> None:
    if odd:
        dist.all_reduce(flag(16), dist.ReduceOp.MAX)


CASES = {"healthy": healthy, "barrier": barrier, "kind": kind, "size": size, "group": group, "order": order}
CASES |= {"gathered": gathered, "evaluated": evaluated}


def main(name: str, told: Path | None = None) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    side.extend(dist.new_group() for _ in range(2))
    torch.manual_seed(0)
    # All gradients are as large: gloo kills a process whose tensor is too small for what another one sends.
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    which = 1 if name in ("skips", "leaves", "uneven") else 0
    watch = rankwatch.watch(model)
    for step in range(STEPS):
        if name == "leaves" and rank == which and step == AT:
            return  # the process ends well
        if name == "uneven" and rank == which and step == AT:
            break
        if name == "skips" and rank == which and step == AT:
            continue
        optimizer.zero_grad()
        model(torch.randn(3, 4)).square().mean().backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
        optimizer.step()
        if step % 4 == 3:
            dist.all_gather([flag() for _ in range(dist.get_world_size())], flag())
        if name in CASES:
            CASES[name](step, odd=rank == which and step == AT)
        while step == TOLD and told is not None and not told.exists():
            time.sleep(0.01)
    dist.barrier()
    watch.close()
    if begun:
        os._exit(0)  # what was begun and never ends is not waited for
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], *map(Path, sys.argv[2:]))
