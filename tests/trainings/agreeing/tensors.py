"""DTensors: tensor parallelism, sequence parallelism, both together with FSDP2, and replicas as DTensors."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from notebook import learn
from recorded.truths import ANY
from trainings.case import Training
from trainings.ranks import Net, alike, loss_of, own_seed, same_seed, split, taught
from trainings.truths import agreeing


def same_data(model: nn.Module, group: int = 0) -> Any:
    """All ranks of a tensor-parallel group are fed the same."""

    def loss(number: int) -> Any:
        same_seed(1000 * group + number)
        return loss_of(model)

    return loss


@agreeing(compared=ANY)
def tensor_parallel() -> Training:
    """The head is a plain parameter on each rank."""
    model = split(alike(), init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    return taught(model, same_data(model), optimizer=optimizer)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Any:
        return self.down(torch.tanh(self.up(self.norm(x))))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x))


@agreeing(compared=ANY)
def norms_on_shards_of_the_sequence() -> Training:
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
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(number: int) -> None:
        same_seed(number)
        x = distribute_tensor(torch.randn(8, 8), mesh, [Shard(0)])
        out = model(x)
        learn(out.full_tensor().square().mean(), optimizer)

    return Training(model, step)


@agreeing(compared=ANY, ranks=4)
def tensor_parallel_and_fsdp2() -> Training:
    """2x2: each pair is fed data of its own."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    net = split(alike(), mesh["tensor"])
    for part in (net.first, net.second, net.head, net):
        fully_shard(part, mesh=mesh["data"])
    return taught(net, same_data(net, dist.get_rank() // 2))


@agreeing(compared=ANY, ranks=4)
def tensor_parallel_and_hsdp() -> Training:
    """2x1x2 ranks: replicas, shards of one, tensors."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tensor"))
    net = split(alike(), mesh["tensor"])
    for part in (net.first, net.second, net.head, net):
        fully_shard(part, mesh=mesh["replicate", "shard"])
    return taught(net, same_data(net, dist.get_rank() // 2))


@agreeing(compared=ANY, ranks=4)
def tensor_parallel_and_replicas() -> Training:
    """Two tensor-parallel pairs; the training reduces the gradients of the local tensors between them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    net = split(alike(), mesh["tensor"])
    group = mesh["data"].get_group()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2, foreach=False)

    def between(number: int) -> None:
        for parameter in net.parameters():
            gradient: Any = parameter.grad
            local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
            dist.all_reduce(local, group=group)
            local /= 2

    return taught(net, same_data(net, dist.get_rank() // 2), optimizer=optimizer, between=between)


@agreeing(compared=6)
def replicas_as_dtensors() -> Training:
    """All parameters are DTensors with Replicate; the batch is sharded."""
    from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    net = distribute_module(alike(), mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)

    def step(number: int) -> None:
        same_seed(number)
        x = distribute_tensor(torch.randn(8, 8), mesh, [Shard(0)])
        learn(net(x).square().mean().redistribute(mesh, [Replicate()]), optimizer)

    return Training(net, step)


@agreeing(compared=6)
def replicate_of_torch() -> Training:
    """``torch.distributed._composable.replicate``: DDP without a wrapper."""
    from torch.distributed._composable.replicate import replicate

    net = Net()
    replicate(net)
    return taught(net)
