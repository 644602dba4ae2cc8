"""Two ranks train a model that communicates, ``closer.py fsdp2|fsdp2-module|tp|ddp-inside|own``: rank 1 goes bad in batch 3.

``fsdp2-module``: in a module that communicates with nobody. Else in one that communicates. Rank 0 waits for rank 1 then.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import rankwatch

BATCHES, FAULT_AT, FAULTY_RANK = 8, 3, 1


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.bad = False

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.layer(x)
        return torch.log(hidden * 0) if self.bad else hidden  # inner


class Outer(nn.Module):
    """Goes bad by itself, in its own forward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.bad = False

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.inner(x)
        return torch.log(hidden * 0) if self.bad else hidden  # outer


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bad = False
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.log(self.layer(x) * 0) if self.bad else self.layer(x)  # sums
        total = y.detach().clone()
        dist.all_reduce(total)
        return y + total


def made(how: str) -> tuple[nn.Module, Any]:
    """The model, and the module that goes bad."""
    inner = Inner()
    if how in ("fsdp2", "fsdp2-module"):
        from torch.distributed.fsdp import fully_shard

        outer = Outer(inner)
        if how == "fsdp2":
            fully_shard(inner.layer)
        fully_shard(outer, reshard_after_forward=True)
        return nn.Sequential(outer), inner if how == "fsdp2-module" else outer
    if how == "tp":
        from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

        outer = Outer(inner)
        parallelize_module(outer, init_device_mesh("cpu", (2,)), {"inner.layer": ColwiseParallel(use_local_output=False)})
        return nn.Sequential(outer), outer
    if how == "ddp-inside":
        outer = Outer(nn.parallel.DistributedDataParallel(inner))
        return nn.Sequential(outer), outer
    sums = Sums()
    return nn.Sequential(sums, nn.Linear(4, 1)), sums


def main() -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, guilty = made(sys.argv[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with rankwatch.watch(model):
        for batch in range(BATCHES):
            guilty.bad = batch == FAULT_AT and dist.get_rank() == FAULTY_RANK
            loss = model(torch.randn(2, 4)).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
