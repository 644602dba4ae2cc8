"""Two ranks train a model that communicates: rank 1 goes bad in batch 3. ``closer.py HOW`` names the model; see ``made``.

``fsdp2-module`` and ``sync-norm-module``: in a module that communicates with nobody. Else in one that communicates: rank 0 then
waits for rank 1.
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


class Gathers(torch.autograd.Function):
    """What torch's own function does, which needs a GPU: gathers the mean in the forward, sums its gradient in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        means = [torch.empty_like(x[0]) for _ in range(dist.get_world_size())]
        dist.all_gather(means, x.mean(0))
        return x - torch.stack(means).mean(0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.sum(0)
        dist.all_reduce(total)
        return gradient - total / dist.get_world_size() / len(gradient)


class SyncNorm(nn.SyncBatchNorm):
    def forward(self, x: Tensor) -> Tensor:
        centred: Tensor = Gathers.apply(x)  # type: ignore[no-untyped-call]
        return centred * self.weight + self.bias


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
    if how in ("sync-norm", "sync-norm-module"):
        outer = Outer(nn.Sequential(inner, SyncNorm(4)))
        return nn.Sequential(outer), inner if how == "sync-norm-module" else outer
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
