"""A training whose ranks reduce: ``reduced.py HOW``. In batch 3 a sum over the ranks, or rank 1's part of it, is not finite.

In the forward, as a row-parallel linear layer does: its result is reduced in place, in the module around it.
  sum      each rank's part is finite, their sum is inf
  async    the same, and another module runs until the sum is there
  scatter  the same by reduce_scatter
  inner    rank 1's part is inf already as the inner module returns it
  here     rank 1's part is nan, made by the module that reduces it
  after    the sum is finite; the module that reduces makes an inf of it
Of gradients:
  hook     DDP with float16 compression: each rank's gradient is finite, and inf in float16
  manual   the training loop reduces them in float16
  local    the same; rank 1's own gradient is inf
"""

from __future__ import annotations

import sys
import warnings
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.functional import linear

import rankwatch

BATCHES, FAULT_AT, FAULTY_RANK = 6, 3, 1


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, x: Tensor, gain: float) -> Tensor:
        return linear(x, self.weight) * gain


class Reduce(torch.autograd.Function):
    """As in Megatron: the tensor is changed in place, unseen by autograd."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient


class RowParallel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.meanwhile = nn.Linear(4, 4)

    def forward(self, x: Tensor, how: str) -> Tensor:
        gain = {
            "sum": 2e38,
            "async": 2e38,
            "scatter": 2e38,
            "after": 100.0,
            "inner": 1e39 if dist.get_rank() == FAULTY_RANK else 1.0,
        }
        y: Tensor = self.inner(x, gain.get(how, 1.0))
        if how == "here" and dist.get_rank() == FAULTY_RANK:
            y = y * float("nan")
        if how == "scatter":
            total = torch.empty(2, 4)
            dist.reduce_scatter_tensor(total, y.detach())
            return y + torch.cat([total, total])
        if how == "async":
            work = dist.all_reduce(y.detach(), async_op=True)
            self.meanwhile(x)
            work.wait()
            return y
        y = Reduce.apply(y)  # type: ignore[no-untyped-call]
        return y.exp() if how == "after" else y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.row = RowParallel()
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor, how: str = "") -> Tensor:
        out: Tensor = self.head(torch.tanh(self.row(x, how)))
        return out


def main() -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    how = sys.argv[1]
    train_reduced(how) if how in ("hook", "manual", "local") else train_parallel(how)
    dist.destroy_process_group()


def train_parallel(how: str) -> None:
    model = Model()
    with rankwatch.watch(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for batch in range(BATCHES):
            model(torch.ones(4, 4), how if batch == FAULT_AT else "").sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def train_reduced(how: str) -> None:
    model: nn.Module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    if how == "hook":
        model = nn.parallel.DistributedDataParallel(model)
        model.register_comm_hook(None, fp16_compress_hook)
    with rankwatch.watch(model, gradients=True):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
        for batch in range(BATCHES):
            out = model(torch.ones(1, 4))
            if batch == FAULT_AT:
                # in float16, 7e4 is inf, and so is the sum of two times 4e4
                gain = {"hook": 7e4, "manual": 4e4, "local": 1e39 if dist.get_rank() == FAULTY_RANK else 1.0}[how]
                out.register_hook(partial(torch.mul, torch.tensor(gain)))
            out.sum().backward()
            if how != "hook":
                reduce_in_float16(model)
            optimizer.step()
            optimizer.zero_grad()


def reduce_in_float16(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        half = parameter.grad.half()
        dist.all_reduce(half)
        parameter.grad.copy_(half)


if __name__ == "__main__":
    main()
