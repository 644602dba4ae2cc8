"""Two ranks, of which one, or their reduction, goes wrong in batch 5."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import rankwatch
from trainings.case import Training
from trainings.parts import BAD, NAN, chain, classified, fed, kinked, put, squared, trained
from trainings.ranks import Net, alike, flat, fully, same_seed, split
from trainings.truths import spoilt

CULPRIT: dict[str, Any] = {"rank": 1, "batch": BAD, "certainty": "complete", "state": "nan"}
UNSURE: dict[str, Any] = {"rank": 1, "module": "first", "cause": "data", "certainty": "partial"}


def is_culprit() -> bool:
    return dist.get_rank() == 1


def fed_nan(model: Any) -> Training:
    return fed(model, lambda x: put(x, NAN, 1, 1) if is_culprit() else None, width=8)


def marred(model: Any, weight: Callable[[], Tensor], *where: int, value: float = NAN, after: int = BAD - 1) -> Training:
    """After one batch an element of a weight is another one."""

    def mar(number: int) -> None:
        if number == after and is_culprit():
            put(weight(), value, *where)

    return trained(model, squared(model, 4, 8), after=mar)


# --- the right rank ---------------------------------------------------------------------------------------------------


@spoilt(**CULPRIT, module="first", cause="data")
def data() -> Training:
    return fed_nan(DistributedDataParallel(Net()))


@spoilt(**CULPRIT, module="second", cause="weight")
def weight() -> Training:
    net = Net()
    return marred(DistributedDataParallel(net), lambda: net.second.weight, 1, 1)


@spoilt(**CULPRIT, module="", reading="loss")
def loss() -> Training:
    """Only one rank's labels are all ignored, and its gradient is 0."""
    model = DistributedDataParallel(Net())
    return trained(model, classified(model, BAD if is_culprit() else -1, width=8))


def with_a_kink() -> Training:
    """The loss is finite, its gradient is not; the all-reduce gives it to all ranks."""
    model = DistributedDataParallel(Net())
    return trained(model, lambda n: kinked(model(torch.randn(4, 8)), n == BAD and is_culprit()))


spoilt(**CULPRIT, module="", cause="gradient", reading="grad_output").each(gradient=with_a_kink)
spoilt(**CULPRIT, module="", cause="gradient", options={"gradients": True}).each(gradient_with_gradients=with_a_kink)


def called_again(rank: int, times: int) -> Training:
    """One rank has called the model more often, in training mode."""
    net = Net()
    training = fed_nan(DistributedDataParallel(net))

    def step(number: int) -> None:
        if number == 2 and dist.get_rank() == rank:
            for _ in range(times):
                net(torch.randn(4, 8))
        training.step(number)

    return Training(training.root, step)


# Rank 1 has the bad data, in what it counts as batch 5.
spoilt(**UNSURE, batch=BAD).each(an_extra_forward=lambda: called_again(0, 1))
# The bad rank counts more batches than the healthy one, which sees the nan a step later in its weights.
spoilt(**UNSURE, optimizer_step=BAD, options={"check": "async"}).each(
    an_extra_forward_of_the_culprit=lambda: called_again(1, 3),
)


@spoilt(**UNSURE, batch=BAD)
def a_rank_that_is_not_watched() -> Training:
    """Rank 0's watch was closed early."""
    training = fed_nan(DistributedDataParallel(Net()))
    watch = rankwatch.watch(training.root)

    def step(number: int) -> None:
        if number == 2 and not is_culprit():
            watch.close()
        training.step(number)

    return Training(training.root, step, is_watched=True)


# --- sharded ----------------------------------------------------------------------------------------------------------


@spoilt(**CULPRIT, cause="weight")
def fsdp1_weight() -> Training:
    model = flat(Net(), auto_wrap_policy=None, use_orig_params=False)
    return marred(model, lambda: next(model.parameters()), 0)


@spoilt(**CULPRIT, module="second", cause="weight")
def fsdp2_weight() -> Training:
    net = fully()
    return marred(net, lambda: net.second.weight.to_local(), 0, 0)


@spoilt(**CULPRIT, module="first", cause="weight")
def tensor_parallel_weight() -> Training:
    net = split(alike(), init_device_mesh("cpu", (2,)))
    training = marred(net, lambda: net.first.weight.to_local(), 0, 0)

    def step(number: int) -> None:
        same_seed(number)
        training.step(number)

    return Training(net, step)


class RowParallel(nn.Module):
    """As Megatron's row-parallel linear: the parts are summed in place, by a collective."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = nn.Linear(8, 8), 0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        self.calls += 1
        part = torch.full_like(out, 2e38) if self.calls == BAD + 1 else out.detach().clone()
        with torch.no_grad():
            out.copy_(part)
        dist.all_reduce(out.detach())
        return out


class Summed(nn.Module):
    """A sum in float16: 4e4 on each rank is finite, and their sum is not."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        part = (x.detach() * 0 + (4e4 if self.calls == BAD + 1 else 1.0)).half()
        dist.all_reduce(part)
        return x + part.float()


def reduced(middle: nn.Module) -> Training:
    """All ranks see what their reduction gives."""
    net = chain(nn.Linear(8, 8), middle, nn.Linear(8, 4))
    return trained(net, squared(net, 4, 8))


spoilt(batch=BAD, module="1", cause="reduction", state="inf").each(
    row_parallel=lambda: reduced(RowParallel()),  # the parts are finite (2e38 each), their sum is inf
    a_sum_in_float16=lambda: reduced(Summed()),
)


@spoilt(batch=BAD, cause="reduction", options={"gradients": True})
def a_float16_hook() -> Training:
    """DDP compresses the gradients to float16; each rank's own gradient is finite."""
    model = DistributedDataParallel(Net())
    model.register_comm_hook(None, fp16_compress_hook)
    return trained(model, lambda n: model(torch.randn(4, 8)).square().mean() * (1e8 if n == BAD else 1.0))


# --- began ------------------------------------------------------------------------------------------------------------


class Deep(nn.Module):
    """Products of activations: what is large becomes inf some batches later."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x) * x.abs().mean().clamp(max=1e6)
        return x


@spoilt(began={"rank": 1, "batch": 80, "module": "", "label": "input[0]", "alone": True}, batches=120)
def a_rank_that_left_first() -> Training:
    """bfloat16; rank 1's input is x1000 in batch 80; the all-reduce gives its gradient to rank 0."""
    model = DistributedDataParallel(Deep().bfloat16())

    def loss_of(number: int) -> Any:
        x = torch.randn(4, 8).bfloat16() * (1000 if number == 80 and is_culprit() else 1)
        return model(x).float().square().mean()

    return trained(model, loss_of, lr=1e-3)


@spoilt(
    rank=1,
    batch=41,
    state="inf",
    began={"rank": 1, "batch": 41, "module": "head", "label": "weight", "alone": True},
    batches=60,
)
def a_flipped_bit() -> Training:
    """A weight of rank 1 becomes 3e38."""
    net = Net()
    return marred(DistributedDataParallel(net), lambda: net.head.weight, 1, 1, value=3e38, after=40)


def diverging(raised: float) -> Training:
    """All ranks alike: the learning rate is raised from batch 20 on."""
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def before(number: int) -> None:
        if number == 0:
            torch.manual_seed(dist.get_rank())  # how fast it diverges depends on what is drawn
        if number == 20:
            optimizer.param_groups[0]["lr"] = raised

    def loss_of(number: int) -> Tensor:
        return nn.functional.mse_loss(model(torch.randn(4, 8)), torch.randn(4, 4))

    return trained(model, loss_of, optimizer=optimizer, before=before)


# The loss takes six batches to become inf.
spoilt(rank=None, cause="divergence", began={"rank": None, "batch": range(20, 27), "alone": False}, batches=60).each(
    a_learning_rate_that_diverges=lambda: diverging(4.0),
)
# The loss takes three.
spoilt(rank=None, batches=60).each(a_learning_rate_that_explodes=lambda: diverging(30.0))
