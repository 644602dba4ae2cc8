"""What trainings of several ranks are made of."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from trainings.case import Training
from trainings.parts import trained

EPOCH = 50


class Net(nn.Module):
    """Six parameters. Its attributes are anything: some trainings replace them."""

    first: Any
    second: Any
    head: Any

    def __init__(self, width: int = 8, middle: type[nn.Module] = nn.Identity) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 4)
        self.norm = middle(width) if middle is not nn.Identity else middle()

    def forward(self, x: Tensor) -> Any:
        return self.head(torch.tanh(self.second(torch.tanh(self.norm(self.first(x))))))


def same_seed(seed: int = 0) -> None:
    """What follows is drawn alike on all ranks."""
    torch.manual_seed(seed)


def own_seed() -> None:
    torch.manual_seed(100 + dist.get_rank())


def alike() -> Any:
    same_seed()
    net = Net()
    own_seed()
    return net


def flat(net: nn.Module | None = None, unit: type[nn.Module] = nn.Linear, **options: Any) -> Any:
    """FSDP1. ``unit``: the class of what is gathered at a time."""
    warnings.simplefilter("ignore")
    options = {"auto_wrap_policy": ModuleWrapPolicy({unit}), "use_orig_params": True, **options}
    return FullyShardedDataParallel(net or alike(), device_id=torch.device("cpu"), **options)


def fully(net: Any = None, mesh: Any = None, parts: Iterable[nn.Module] = (), **options: Any) -> Any:
    """FSDP2, of a model that all ranks draw alike."""
    from torch.distributed.fsdp import fully_shard

    net = net or alike()
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*(parts or (net.first, net.second, net.head)), net):
        fully_shard(module, mesh=mesh, **options)
    return net


def split(net: Any, mesh: Any) -> Any:
    """Tensor parallelism; the head stays a plain parameter on each rank."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    return parallelize_module(net, mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()})


def draw(count: int = 4, width: int = 8) -> tuple[Tensor, Tensor]:
    """Inputs, and targets that can be learned."""
    x = torch.randn(count, width)
    return x, x[:, :4].sin()


def loss_of(model: nn.Module) -> Any:
    x, y = draw()
    return (model(x) - y).square().mean()


def taught(
    model: Any,
    loss: Callable[[int], Any] | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    **options: Any,
) -> Training:
    """Learns such targets. ``options``: those of ``trained``."""
    optimizer = optimizer or torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return trained(model, loss or (lambda number: loss_of(model)), optimizer=optimizer, **options)


def reduce_gradients(parameters: Any, group: dist.ProcessGroup | None = None) -> None:
    """As a training without DDP does it by hand."""
    for parameter in parameters:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= dist.get_world_size(group)


def average(parameters: Any, group: dist.ProcessGroup | None = None) -> None:
    with torch.no_grad():
        for parameter in parameters:
            dist.all_reduce(parameter.data, group=group)
            parameter.data /= dist.get_world_size(group)


def broadcast(model: nn.Module, source: int = 0) -> None:
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.data, source)
