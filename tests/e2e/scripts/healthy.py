"""Healthy trainings of two ranks, 200 batches each: ``healthy.py NAME``."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import rankwatch

BATCHES = 200
TRAININGS: dict[str, Callable[[], Callable[[int], None]]] = {}
Step = Callable[[int], None]


def training(build: Callable[[], Step]) -> Callable[[], Step]:
    TRAININGS[build.__name__] = build
    return build


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return out


def trained(model: nn.Module, loss_of: Callable[[int], Tensor] | None = None, **options: Any) -> Step:
    rankwatch.watch(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(number: int) -> None:
        loss = model(torch.randn(4, 8)).square().mean() if loss_of is None else loss_of(number)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@training
def replicas() -> Step:
    return trained(DistributedDataParallel(Net()))


@training
def replicas_with_gradients() -> Step:
    return trained(DistributedDataParallel(Net()), gradients=True)


@training
def accumulation() -> Step:
    """Three of four backwards without a reduction."""
    model = DistributedDataParallel(Net())
    rankwatch.watch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(number: int) -> None:
        is_last = number % 4 == 3
        with nullcontext() if is_last else model.no_sync():
            model(torch.randn(4, 8)).square().mean().backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()

    return step


@training
def unused_experts() -> Step:
    """Each rank uses another expert."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.experts = nn.Linear(8, 4), nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: Tensor, which: int) -> Tensor:
            out: Tensor = self.experts[which](x) * self.gate(x).softmax(-1)[:, which : which + 1]
            return out

    model = DistributedDataParallel(Experts(), find_unused_parameters=True)
    return trained(model, lambda n: model(torch.randn(4, 8), (n + dist.get_rank()) % 4).square().mean())


@training
def a_scaler() -> Step:
    model = DistributedDataParallel(Net())
    rankwatch.watch(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=20)

    def step(number: int) -> None:
        with torch.autocast("cpu", torch.float16):
            loss = model(torch.randn(4, 8)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


@training
def a_growing_norm() -> Step:
    """The targets are large: loss, weights and outputs go through three orders of magnitude."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
    rankwatch.watch(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 100))

    def step(number: int) -> None:
        x = torch.randn(16, 8)
        nn.functional.mse_loss(model(x), 100 * x[:, :4]).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    return step


@training
def spikes() -> Step:
    """Rewards of 1e5 at times, on one rank or the other."""
    model = DistributedDataParallel(Net())

    def loss_of(number: int) -> Tensor:
        size = 1e5 if number % 40 == 39 - dist.get_rank() else 10.0 ** int(torch.randint(0, 3, ()))
        choice = torch.distributions.Categorical(logits=model(torch.randn(8, 8)))
        loss: Tensor = -(choice.log_prob(choice.sample()) * torch.randn(8) * size).mean()
        return loss

    return trained(model, loss_of)


@training
def lengths_that_vary() -> Step:
    """Each rank has other lengths, and one has an extra evaluation now and then."""
    model = DistributedDataParallel(Net())

    def loss_of(number: int) -> Tensor:
        if number % 50 == 49 and dist.get_rank() == 0:
            model.eval()
            with torch.no_grad():
                model.module(torch.randn(2, 8))
            model.train()
        loss: Tensor = model(torch.randn(int(torch.randint(1, 9, ())), 8)).square().mean()
        return loss

    return trained(model, loss_of)


@training
def fsdp1() -> Step:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    return trained(
        FullyShardedDataParallel(Net(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), device_id=torch.device("cpu"))
    )


@training
def fsdp2() -> Step:
    from torch.distributed.fsdp import fully_shard

    net, mesh = Net(), init_device_mesh("cpu", (2,))
    for part in (net.first, net.second, net.head, net):
        fully_shard(part, mesh=mesh)
    return trained(net)


@training
def tensor_parallel() -> Step:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    net, mesh = Net(), init_device_mesh("cpu", (2,))
    parallelize_module(net, mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()})
    return trained(net)


@training
def pipeline() -> Step:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    rank = dist.get_rank()
    stage = PipelineStage(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)
    rankwatch.watch(stage)
    optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.01)

    def step(number: int) -> None:
        if rank == 0:
            schedule.step(torch.randn(8, 8))
        else:
            schedule.step(target=torch.randn(8, 8))
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    name = sys.argv[1]
    step = TRAININGS[name]()
    if name != "tensor_parallel":  # its ranks see the same data
        torch.manual_seed(dist.get_rank())
    for number in range(BATCHES):
        step(number)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
