"""A DDP training of two ranks that are not watched alike: ``unequal.py WHAT ...``, each WHAT as below.

closed    rank 1 closes its watch after batch 3
broken    in batch 3 of rank 1 our code that measures a module raises
overflow  rank 1 overflows in its sixth step, rank 0 with ``closed`` and ``broken``
gradient  in the fifth step of rank 1 a gradient becomes nan, and the all-reduce hands it to both
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import rankwatch
from rankwatch.measure.recorder import Recorder

STEPS = 8


def raise_planted(*_: object) -> None:
    raise RuntimeError("planted")


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = 1.0

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"x": x * self.gain}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 4), Middle(), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.middle(self.first(x)).get("x"))
        return out


def main(*what: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Model()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-3)
    guilty = 0 if {"closed", "broken"} & set(what) else 1
    watch = rankwatch.watch(wrapped)
    with watch:
        for step in range(STEPS):
            if rank == 1:
                if "closed" in what and step == 4:
                    watch.close()
                if "broken" in what and step == 3:
                    Recorder.call = raise_planted  # type: ignore[method-assign, assignment]
            if rank == guilty and "overflow" in what and step == 5:
                model.middle.gain = float("inf")
            loss = wrapped(torch.ones(2, 4)).sum()
            if rank == guilty and "gradient" in what and step == 4:
                model.first.weight.register_hook(lambda gradient: gradient * float("nan"))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
