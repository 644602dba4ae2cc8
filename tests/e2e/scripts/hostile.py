"""Trainings of two ranks that go wrong in a known way: ``hostile.py NAME``. ``test_truth.py`` has what is true of each."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import rankwatch

BAD, BATCHES = 5, 12
NAN = float("nan")
WARM_UP = 80
"""The batch of those trainings that need a past."""

Training = Callable[[int], Any]
TRAININGS: dict[str, Callable[[], Training]] = {}


def training(build: Callable[[], Training]) -> Callable[[], Training]:
    TRAININGS[build.__name__] = build
    return build


def is_culprit() -> bool:
    return dist.get_rank() == 1


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 4)
        self.gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.second(torch.tanh(self.first(x)))) * self.gain)
        return out


def trained(
    model: nn.Module,
    loss_of: Callable[[int], Tensor],
    *,
    after: Callable[[int], object] = lambda number: None,
    lr: float = 0.01,
    **options: Any,
) -> Training:
    rankwatch.watch(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)

    def step(number: int) -> None:
        loss_of(number).backward()
        optimizer.step()
        optimizer.zero_grad()
        after(number)

    return step


def plain(model: nn.Module, *, spoil: Callable[[int, Tensor], None] = lambda number, x: None, **options: Any) -> Training:
    def loss_of(number: int) -> Tensor:
        x = torch.randn(4, 8)
        spoil(number, x)
        loss: Tensor = model(x).square().mean()
        return loss

    return trained(model, loss_of, **options)


def put(tensor: Any, value: float, *where: int) -> None:
    with torch.no_grad():
        tensor[where] = value


# --- the right rank ---------------------------------------------------------------------------------------------------


@training
def healthy() -> Training:
    return plain(DistributedDataParallel(Net()))


@training
def data() -> Training:
    return plain(DistributedDataParallel(Net()), spoil=lambda n, x: put(x, NAN, 1, 1) if n == BAD and is_culprit() else None)


@training
def weight() -> Training:
    net = Net()
    return plain(
        DistributedDataParallel(net),
        after=lambda n: put(net.second.weight, NAN, 1, 1) if n == BAD - 1 and is_culprit() else None,
    )


@training
def loss() -> Training:
    """Only one rank's labels are all ignored, and its gradient is 0."""
    model = DistributedDataParallel(Net())

    def loss_of(number: int) -> Tensor:
        labels = torch.full((4,), -100) if number == BAD and is_culprit() else torch.randint(4, (4,))
        return nn.functional.cross_entropy(model(torch.randn(4, 8)), labels)

    return trained(model, loss_of)


def with_a_bad_gradient(**options: Any) -> Training:
    """The loss is finite, its gradient is not; the all-reduce gives it to all ranks."""
    model = DistributedDataParallel(Net())

    def loss_of(number: int) -> Tensor:
        out = model(torch.randn(4, 8))
        loss: Tensor = out.square().mean()
        return loss + (out * 0).square().sum().sqrt() if number == BAD and is_culprit() else loss

    return trained(model, loss_of, **options)


@training
def gradient() -> Training:
    return with_a_bad_gradient()


@training
def gradient_with_gradients() -> Training:
    return with_a_bad_gradient(gradients=True)


@training
def an_extra_forward() -> Training:
    """Rank 0 has called the model once more, in training mode; rank 1 has the bad data, in what it counts as batch 5."""
    net = Net()
    model = DistributedDataParallel(net)

    def spoil(number: int, x: Tensor) -> None:
        if number == 2 and not is_culprit():
            net(torch.randn(4, 8))
        if number == BAD and is_culprit():
            put(x, NAN, 1, 1)

    return plain(model, spoil=spoil)


@training
def an_extra_forward_of_the_culprit() -> Training:
    """The bad rank counts one more batch than the healthy one, which sees the nan a step later in its weights."""
    net = Net()
    model = DistributedDataParallel(net)

    def spoil(number: int, x: Tensor) -> None:
        if number == 2 and is_culprit():
            for _ in range(3):
                net(torch.randn(4, 8))
        if number == BAD and is_culprit():
            put(x, NAN, 1, 1)

    return plain(model, spoil=spoil, check="async")


@training
def a_rank_that_is_not_watched() -> Training:
    """Rank 0's watch was closed early."""
    net = Net()
    model = DistributedDataParallel(net)
    watch = rankwatch.watch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(number: int) -> None:
        if number == 2 and not is_culprit():
            watch.close()
        x = torch.randn(4, 8)
        if number == BAD and is_culprit():
            put(x, NAN, 1, 1)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


# --- sharded ----------------------------------------------------------------------------------------------------------


@training
def fsdp1_weight() -> Training:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(Net(), device_id=torch.device("cpu"))
    return plain(model, after=lambda n: put(next(model.parameters()), NAN, 0) if n == BAD - 1 and is_culprit() else None)


@training
def fsdp2_weight() -> Training:
    from torch.distributed.fsdp import fully_shard

    net, mesh = Net(), init_device_mesh("cpu", (2,))
    for part in (net.first, net.second, net.head, net):
        fully_shard(part, mesh=mesh)

    def after(number: int) -> None:
        if number == BAD - 1 and is_culprit():
            weight: Any = net.second.weight
            put(weight.to_local(), NAN, 0, 0)

    return plain(net, after=after)


@training
def row_parallel() -> Training:
    """The parts are finite (2e38 each), their sum is inf: on all ranks at once."""
    net = nn.Sequential(nn.Linear(8, 8), Row(), nn.Linear(8, 4))
    return trained(net, lambda n: net(torch.randn(4, 8)).square().mean())


class Row(nn.Module):
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


@training
def a_sum_in_float16() -> Training:
    """4e4 on each rank: finite, and their sum is not."""

    class Reduce(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            part = (x.detach() * 0 + (4e4 if self.calls == BAD + 1 else 1.0)).half()
            dist.all_reduce(part)
            return x + part.float()

    net = nn.Sequential(nn.Linear(8, 8), Reduce(), nn.Linear(8, 4))
    return trained(net, lambda n: net(torch.randn(4, 8)).square().mean())


@training
def a_float16_hook() -> Training:
    """DDP compresses the gradients to float16; each rank's own gradient is finite."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model = DistributedDataParallel(Net())
    model.register_comm_hook(None, fp16_compress_hook)
    return trained(model, lambda n: model(torch.randn(4, 8)).square().mean() * (1e8 if n == BAD else 1.0), gradients=True)


@training
def tensor_parallel_weight() -> Training:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    net, mesh = Net(), init_device_mesh("cpu", (2,))
    parallelize_module(net, mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()})

    def after(number: int) -> None:
        if number == BAD - 1 and is_culprit():
            weight: Any = net.first.weight
            put(weight.to_local(), NAN, 0, 0)

    torch.manual_seed(0)
    return plain(net, after=after)


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


@training
def a_rank_that_left_first() -> Training:
    """bfloat16; rank 1's input is x1000 in batch 80; the all-reduce gives its gradient to rank 0."""
    model = DistributedDataParallel(Deep().bfloat16())

    def loss_of(number: int) -> Tensor:
        x = torch.randn(4, 8).bfloat16() * (1000 if number == WARM_UP and is_culprit() else 1)
        loss: Tensor = model(x).float().square().mean()
        return loss

    return trained(model, loss_of, lr=1e-3)


@training
def a_flipped_bit() -> Training:
    """A weight of rank 1 becomes 3e38."""
    net = Net()
    return plain(
        DistributedDataParallel(net), after=lambda n: put(net.head.weight, 3e38, 1, 1) if n == 40 and is_culprit() else None
    )


def diverging(raised: float) -> Training:
    """All ranks alike: the learning rate is raised from batch 20 on."""
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    model = DistributedDataParallel(net)
    rankwatch.watch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(number: int) -> None:
        optimizer.param_groups[0]["lr"] = raised if number >= 20 else 0.01
        nn.functional.mse_loss(model(torch.randn(4, 8)), torch.randn(4, 4)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@training
def a_learning_rate_that_diverges() -> Training:
    """The loss takes eight batches to become inf."""
    return diverging(4.0)


@training
def a_learning_rate_that_explodes() -> Training:
    """The loss takes three."""
    return diverging(30.0)


LONG = {
    "a_learning_rate_that_explodes": 60,
    "a_rank_that_left_first": 120,
    "a_flipped_bit": 60,
    "a_learning_rate_that_diverges": 60,
}


def main() -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    name = sys.argv[1]
    step = TRAININGS[name]()
    if "parallel" not in name and name != "a_sum_in_float16":
        torch.manual_seed(dist.get_rank())  # tensor parallel ranks see the same data
    for number in range(LONG.get(name, BATCHES)):
        step(number)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
