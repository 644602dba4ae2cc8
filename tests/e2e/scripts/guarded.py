"""Trainings whose loss is finite, and whose gradient is not, on one rank: ``guarded.py NAME``. ``test_guard.py`` has the truths.

Each rank says at the end whether its weights are finite.
"""

from __future__ import annotations

import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

sys.path.insert(1, str(Path(__file__).resolve().parents[2]))

import rankwatch
from trainings.case import Training
from trainings.parts import trained
from trainings.ranks import flat, fully, reduce_gradients

BAD, BATCHES = 5, 12


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


def watched(model: nn.Module, to_all: bool = False, watch: Any = None, **options: Any) -> Training:
    """``watch``: the options of the watch; ``options``: those of ``trained``."""
    rankwatch.watch(model, **(watch or {}))
    return trained(model, lambda number: model(fed(number, to_all)).square().mean(), **options)


def clipped(model: nn.Module, look: Callable[[Tensor], object] = bool, refuses: bool = False) -> Training:
    def clip(number: int) -> None:
        look(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=refuses))

    return watched(model, between=clip)


def with_unused() -> Training:
    """A parameter that no loss reaches."""
    net = Net()
    net.unused = nn.Linear(8, 8)
    return watched(DDP(net, find_unused_parameters=True))


def compressed() -> Training:
    """The gradients are reduced in float16."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model = DDP(Net())
    model.register_comm_hook(None, fp16_compress_hook)
    return watched(model)


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
    return Training(net, lambda number: net(fed(number)).square().mean().backward())


def by_hand() -> Training:
    """The training itself reduces the gradients, after the backward."""
    net = Net()
    return watched(net, between=lambda number: reduce_gradients(net.parameters()))


def asserted() -> Training:
    """The training itself raises, on rank 0 alone."""

    def look(norm: Tensor) -> None:
        assert dist.get_rank() > 0 or norm.isfinite(), "the norm is bad"

    return clipped(DDP(Net()), look)


def anomalous() -> Training:
    """torch raises within the backward, on one rank alone."""
    torch.autograd.set_detect_anomaly(True)
    return watched(DDP(Net()))


def accumulated() -> Training:
    """Batch 5 of 4 to 7, the last of which is reduced."""
    training = watched(DDP(Net()), accumulate=4)

    def step_with_sync_at_last(number: int) -> None:
        with training.root.no_sync() if (number + 1) % 4 else nullcontext():
            training.step(number)

    return Training(training.root, step_with_sync_at_last)


def penalised() -> Training:
    """A term of the loss that is made of the parameters, on all ranks alike: no rank is the culprit."""
    net = Net()
    model = DDP(net)
    rankwatch.watch(model)

    def loss_of(number: int) -> Tensor:
        penalty = (net.head.bias * float(number != BAD)).square().sum().sqrt()
        loss: Tensor = model(torch.randn(4, 8)).square().mean() + penalty
        return loss

    return trained(model, loss_of)


def penalised_by_gradients() -> Training:
    """A penalty of the gradients of the critic, whose backward goes twice through the model: of the culprit's inputs alone."""
    net = nn.Sequential(nn.Linear(8, 8), nn.Softplus(), nn.Linear(8, 1))
    model = DDP(net)
    rankwatch.watch(model)

    def loss_of(number: int) -> Tensor:
        real, false, between = (torch.randn(4, 8) for _ in range(3))
        differs = model(false).mean() - model(real).mean()
        (slope,) = torch.autograd.grad(model(between.requires_grad_()).sum(), between, create_graph=True)
        length = (slope * float(number != BAD or not is_culprit())).square().sum(-1).sqrt()
        loss: Tensor = differs + (length - 1).square().mean()
        return loss

    return trained(model, loss_of)


def synchronised() -> Training:
    """A module that communicates in its forward is not run again."""

    class Shared(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            total = x.detach().clone()
            dist.all_reduce(total)
            return x + 0 * total

    net = Net()
    net.first = nn.Sequential(nn.Linear(8, 8, bias=False), Shared())  # type: ignore[assignment]
    return watched(DDP(net))


def sharded() -> nn.Module:
    net = Net()
    fully(net, parts=(net.first, net.head))
    return net


def tensor_parallel() -> Training:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    torch.manual_seed(0)
    net, mesh = Net(), init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(net, mesh, {"head": ColwiseParallel(output_layouts=Replicate())})
    return watched(net, to_all=True)


TRAININGS: dict[str, Callable[[], Training]] = {
    "plain": lambda: watched(DDP(Net())),
    "with_gradients": lambda: watched(DDP(Net()), watch={"gradients": True}),
    "clipped": lambda: clipped(DDP(Net())),
    "in_buckets": lambda: clipped(DDP(Net(), gradient_as_bucket_view=True)),  # of which gradients are views
    "of_a_static_graph": lambda: watched(DDP(Net(), static_graph=True)),
    "compiled_around": lambda: watched(torch.compile(DDP(Net()), backend="aot_eager")),  # type: ignore[arg-type]
    "compiled_within": lambda: watched(DDP(torch.compile(Net(), backend="aot_eager"))),
    "refused": lambda: clipped(DDP(Net()), refuses=True),  # torch raises in the user's code, on all ranks
    "late": lambda: watched(DDP(Net()), watch={"check": "batch", "every": 4}),
    "scaled": lambda: watched(DDP(Net()), scaler=torch.amp.GradScaler("cpu", init_scale=1024.0)),  # it skips the step
    "fsdp1": lambda: watched(flat(Net())),
    "fsdp2": lambda: watched(sharded()),
    "fsdp2_clipped": lambda: clipped(sharded()),
    **{one.__name__: one for one in (with_unused, compressed, in_the_backward, by_hand, asserted, anomalous)},
    **{one.__name__: one for one in (accumulated, penalised, penalised_by_gradients, synchronised, tensor_parallel)},
}


def are_finite(model: nn.Module) -> bool:
    values = [getattr(value, "to_local", lambda value=value: value)() for value in model.parameters()]
    return all(bool(value.isfinite().all()) for value in values)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as another rank has failed: what follows is still printed
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    training = TRAININGS[sys.argv[1]]()
    try:
        for number in range(BATCHES):
            training.step(number)
    finally:
        print(f"rank {dist.get_rank()}: weights {'finite' if are_finite(training.root) else 'BAD'}", flush=True)
    dist.destroy_process_group()
