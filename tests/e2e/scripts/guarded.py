"""Trainings whose loss is finite, and whose gradient is not, on one rank: ``guarded.py NAME``. ``test_guard.py`` has the truths.

Each rank says at the end whether its weights are finite.
"""

from __future__ import annotations

import signal
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

import rankwatch

BAD, BATCHES = 5, 12

Training = tuple[nn.Module, Callable[[int], Any]]
"""The model, and one step of it."""


def is_culprit() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


class Length(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().sum(-1, keepdim=True).sqrt()  # its slope at 0 is infinite


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.length, self.head = nn.Linear(8, 8, bias=False), Length(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        out: Tensor = self.head(x * self.length(x))
        return out


def fed(number: int, to_all: bool = False) -> Tensor:
    """On the culprit, what the norm is taken of is 0 in one batch. ``to_all``: the ranks are all fed the same."""
    if to_all:
        torch.manual_seed(number)
    return torch.randn(4, 8) * float(not (number == BAD and (to_all or is_culprit())))


def trained(
    model: nn.Module,
    *,
    accumulate: int = 1,
    clips: bool = False,
    to_all: bool = False,
    refuses: bool = False,
    reduces: bool = False,
    look: Callable[[Tensor], object] = bool,
    **options: Any,
) -> Training:
    rankwatch.watch(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(number: int) -> None:
        (model(fed(number, to_all)).square().mean() / accumulate).backward()
        if (number + 1) % accumulate:
            return
        for value in model.parameters() if reduces else ():
            dist.all_reduce(value.grad)
        if clips:
            look(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=refuses))
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def with_unused() -> Training:
    """A parameter that no loss reaches."""
    net = Net()
    net.unused = nn.Linear(8, 8)
    return trained(DDP(net, find_unused_parameters=True))


def compressed() -> Training:
    """The gradients are reduced in float16."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model = DDP(Net())
    model.register_comm_hook(None, fp16_compress_hook)
    return trained(model)


def in_the_backward() -> Training:
    """Each parameter is updated as its gradient comes; the ranks do not communicate."""
    net = Net()
    rankwatch.watch(net)
    optimizers = {value: torch.optim.SGD([value], lr=0.01) for value in net.parameters()}

    def update(value: Any) -> None:
        optimizers[value].step()
        optimizers[value].zero_grad()

    for value in net.parameters():
        value.register_post_accumulate_grad_hook(update)
    return net, lambda number: net(fed(number)).square().mean().backward()


def asserted() -> Training:
    """The training itself raises, on rank 0 alone."""

    def look(norm: Tensor) -> None:
        assert dist.get_rank() > 0 or norm.isfinite(), "the norm is bad"

    return trained(DDP(Net()), clips=True, look=look)


def anomalous() -> Training:
    """torch raises within the backward, on one rank alone."""
    torch.autograd.set_detect_anomaly(True)
    return trained(DDP(Net()))


def accumulated() -> Training:
    """Batch 5 of 4 to 7, the last of which is reduced."""
    model = DDP(Net())
    whole, step = trained(model, accumulate=4)

    def step_with_sync_at_last(number: int) -> None:
        if (number + 1) % 4:
            with model.no_sync():
                step(number)
        else:
            step(number)

    return whole, step_with_sync_at_last


def scaled() -> Training:
    """The scaler of all ranks skips the step, and the training goes on."""
    model = DDP(Net())
    rankwatch.watch(model)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step(number: int) -> None:
        scaler.scale(model(fed(number)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return model, step


def penalised() -> Training:
    """A term of the loss that is made of the parameters, on all ranks alike: no rank is the culprit."""
    net = Net()
    model = DDP(net)
    rankwatch.watch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(number: int) -> None:
        penalty = (net.head.bias * float(number != BAD)).square().sum().sqrt()
        (model(torch.randn(4, 8)).square().mean() + penalty).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def synchronised() -> Training:
    """A module that communicates in its forward is not run again."""

    class Shared(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            total = x.detach().clone()
            dist.all_reduce(total)
            return x + 0 * total

    net = Net()
    net.first = nn.Sequential(nn.Linear(8, 8, bias=False), Shared())  # type: ignore[assignment]
    return trained(DDP(net))


def fsdp1() -> Training:
    from torch.distributed.fsdp import FullyShardedDataParallel

    net = Net()
    for name in ("first", "head"):
        setattr(net, name, FullyShardedDataParallel(getattr(net, name), device_id=torch.device("cpu"), use_orig_params=True))
    return trained(FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True))


def sharded() -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    net, mesh = Net(), init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (net.first, net.head, net):
        fully_shard(module, mesh=mesh)
    return net


def tensor_parallel() -> Training:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    torch.manual_seed(0)
    net, mesh = Net(), init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(net, mesh, {"head": ColwiseParallel(output_layouts=Replicate())})
    return trained(net, to_all=True)


TRAININGS: dict[str, Callable[[], Training]] = {
    "plain": lambda: trained(DDP(Net())),
    "with_gradients": lambda: trained(DDP(Net()), gradients=True),
    "clipped": lambda: trained(DDP(Net()), clips=True),
    "in_buckets": lambda: trained(DDP(Net(), gradient_as_bucket_view=True), clips=True),  # of which gradients are views
    "of_a_static_graph": lambda: trained(DDP(Net(), static_graph=True)),
    "compiled_around": lambda: trained(torch.compile(DDP(Net()), backend="aot_eager")),  # type: ignore[arg-type]
    "compiled_within": lambda: trained(DDP(torch.compile(Net(), backend="aot_eager"))),
    "by_hand": lambda: trained(Net(), reduces=True),  # the training itself reduces the gradients, after the backward
    "refused": lambda: trained(DDP(Net()), clips=True, refuses=True),  # torch raises in the user's code, on all ranks
    "late": lambda: trained(DDP(Net()), check="batch", every=4),
    "fsdp2": lambda: trained(sharded()),
    "fsdp2_clipped": lambda: trained(sharded(), clips=True),
    **{one.__name__: one for one in (with_unused, compressed, in_the_backward, asserted, anomalous, accumulated)},
    **{one.__name__: one for one in (scaled, penalised, synchronised, fsdp1, tensor_parallel)},
}


def are_finite(model: nn.Module) -> bool:
    values = [getattr(value, "to_local", lambda value=value: value)() for value in model.parameters()]
    return all(bool(value.isfinite().all()) for value in values)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as another rank has failed: what follows is still printed
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model, step = TRAININGS[sys.argv[1]]()
    try:
        for number in range(BATCHES):
            step(number)
    finally:
        print(f"rank {dist.get_rank()}: weights {'finite' if are_finite(model) else 'BAD'}", flush=True)
    dist.destroy_process_group()
