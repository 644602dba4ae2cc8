"""DTensors: tensor parallelism, sequence parallelism, both together with FSDP2, and replicas as DTensors."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import rankwatch

from .case import ANY, Net, Step, healthy, loss_of, own_seed, same_seed, trained


def alike() -> Any:
    same_seed()
    net = Net()
    own_seed()
    return net


def split(net: Any, mesh: Any) -> Any:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    return parallelize_module(net, mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()})


def same_data(model: nn.Module, group: int = 0) -> Any:
    """All ranks of a tensor-parallel group are fed the same."""

    def loss(number: int) -> Tensor:
        same_seed(1000 * group + number)
        return loss_of(model)

    return loss


@healthy(compared=ANY)
def tensor_parallel() -> Step:
    """The head is a plain parameter on each rank."""
    model = split(alike(), init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    return trained(model, same_data(model), optimizer=optimizer)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.tanh(self.up(self.norm(x))))
        return out


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.head(self.norm(x))
        return out


@healthy(compared=ANY)
def norms_on_shards_of_the_sequence() -> Step:
    """The norms' gradients are partial sums, which DTensor reduces."""
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

    same_seed()
    model = Blocks()
    own_seed()
    for block in model.blocks:
        plan = {
            "norm": SequenceParallel(sequence_dim=0, use_local_output=False),
            "up": ColwiseParallel(input_layouts=Shard(0), use_local_output=False),
            "down": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
        }
        parallelize_module(block, mesh, plan)
    top = {"norm": SequenceParallel(sequence_dim=0), "head": ColwiseParallel(input_layouts=Shard(0), use_local_output=False)}
    parallelize_module(model, mesh, top)
    rankwatch.watch(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(number: int) -> None:
        same_seed(number)
        x = distribute_tensor(torch.randn(8, 8), mesh, [Shard(0)])
        out = model(x)
        (out.full_tensor().square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@healthy(compared=ANY, ranks=4)
def tensor_parallel_and_fsdp2() -> Step:
    """2x2: each pair is fed data of its own."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    net = split(alike(), mesh["tensor"])
    for part in (net.first, net.second, net.head, net):
        fully_shard(part, mesh=mesh["data"])
    return trained(net, same_data(net, dist.get_rank() // 2))


@healthy(compared=ANY, ranks=4)
def tensor_parallel_and_hsdp() -> Step:
    """2x1x2 ranks: replicas, shards of one, tensors."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tensor"))
    net = split(alike(), mesh["tensor"])
    for part in (net.first, net.second, net.head, net):
        fully_shard(part, mesh=mesh["replicate", "shard"])
    return trained(net, same_data(net, dist.get_rank() // 2))


@healthy(compared=ANY, ranks=4)
def tensor_parallel_and_replicas() -> Step:
    """Two tensor-parallel pairs; the training reduces the gradients of the local tensors between them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    net = split(alike(), mesh["tensor"])
    group = mesh["data"].get_group()
    rankwatch.watch(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2, foreach=False)
    loss = same_data(net, dist.get_rank() // 2)

    def step(number: int) -> None:
        loss(number).backward()
        for parameter in net.parameters():
            gradient: Any = parameter.grad
            local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
            dist.all_reduce(local, group=group)
            local /= 2
        optimizer.step()
        optimizer.zero_grad()

    return step


@healthy(compared=6)
def replicas_as_dtensors() -> Step:
    """All parameters are DTensors with Replicate; the batch is sharded."""
    from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    net = distribute_module(alike(), mesh)
    rankwatch.watch(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)

    def step(number: int) -> None:
        same_seed(number)
        x = distribute_tensor(torch.randn(8, 8), mesh, [Shard(0)])
        net(x).square().mean().redistribute(mesh, [Replicate()]).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@healthy(compared=6)
def replicate_of_torch() -> Step:
    """``torch.distributed._composable.replicate``: DDP without a wrapper."""
    from torch.distributed._composable.replicate import replicate

    net = Net()
    replicate(net)
    return trained(net)
