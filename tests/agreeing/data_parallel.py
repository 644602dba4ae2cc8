"""DistributedDataParallel, in the many ways in which it is used."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import rankwatch

from .case import EPOCH, Net, Step, draw, healthy, loop, loss_of, trained


@healthy(compared=6)
def ddp() -> Step:
    """Each rank initialises with another seed: DDP gives all of them the model of rank 0."""
    return trained(DistributedDataParallel(Net()))


@healthy(compared=6)
def watched_before_it_is_wrapped() -> Step:
    net = Net()
    rankwatch.watch(net)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def step(number: int) -> None:
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()

    return step


@healthy(compared=6)
def tried_before_it_is_wrapped() -> Step:
    """A first forward with gradients, of the bare model: each rank still has weights of its own."""
    net = Net()
    rankwatch.watch(net)
    loss_of(net).backward()
    net.zero_grad()
    model = DistributedDataParallel(net)
    return loop(model)


@healthy(compared=6)
def every_second_batch() -> Step:
    return trained(DistributedDataParallel(Net()), every=7)


@healthy(compared=6)
def static_graph() -> Step:
    return trained(DistributedDataParallel(Net(), static_graph=True))


@healthy(compared=6)
def bucket_views() -> Step:
    return trained(DistributedDataParallel(Net(), gradient_as_bucket_view=True, bucket_cap_mb=1))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 4), nn.ModuleList(nn.Linear(8, 4) for _ in range(4))

    def forward(self, x: Tensor, which: int) -> Tensor:
        out: Tensor = self.experts[which](x) * self.gate(x).softmax(-1)[:, which : which + 1]
        return out


@healthy(compared=10)
def unused_parameters() -> Step:
    """Each rank uses another expert, and DDP finds which were used."""
    model = DistributedDataParallel(Experts(), find_unused_parameters=True)
    return trained(model, lambda n: model(draw()[0], (n + dist.get_rank()) % 4).square().mean())


@healthy(compared=10)
def never_used_parameters() -> Step:
    """Experts 2 and 3 have no gradient on any rank."""
    model = DistributedDataParallel(Experts(), find_unused_parameters=True)
    return trained(model, lambda n: model(draw()[0], (n + dist.get_rank()) % 2).square().mean())


def accumulated(model: Any, *, ragged: bool) -> Step:
    """Three of four backwards without a reduction; with ``ragged`` the last step of an epoch has but two."""
    rankwatch.watch(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(number: int) -> None:
        batches = 2 if ragged and number % EPOCH == EPOCH - 1 else 4
        for batch in range(batches):
            with nullcontext() if batch == batches - 1 else model.no_sync():
                (loss_of(model) / batches).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@healthy(compared=6)
def accumulation() -> Step:
    return accumulated(DistributedDataParallel(Net()), ragged=False)


@healthy(compared=6)
def accumulation_with_a_ragged_end() -> Step:
    return accumulated(DistributedDataParallel(Net()), ragged=True)


@healthy(compared=6)
def accumulation_without_no_sync() -> Step:
    """Reduces in each backward, which costs time and is right."""
    model = DistributedDataParallel(Net())
    rankwatch.watch(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(number: int) -> None:
        loss_of(model).backward()
        if number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()

    return step


def hooked(hook: Callable[..., Any], state: Any = None, width: int = 8) -> Step:
    model = DistributedDataParallel(Net(width))
    model.register_comm_hook(state, hook)

    def loss(number: int) -> Tensor:
        x, y = draw(4, width)
        out: Tensor = (model(x) - y).square().mean()
        return out

    return trained(model, loss)


@healthy(compared=6)
def power_sgd() -> Step:
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=10, min_compression_rate=1.0)
    return hooked(powerSGD_hook.powerSGD_hook, state, width=32)


@healthy(compared=6)
def float16_gradients() -> Step:
    return hooked(default_hooks.fp16_compress_hook)


@healthy(compared=6)
def float16_power_sgd() -> Step:
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=10, min_compression_rate=1.0)
    return hooked(default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook), state, width=32)


@healthy(compared=6)
def a_hook_of_the_user() -> Step:
    """Averages with a factor, by its own all-reduce."""

    def hook(state: Any, bucket: Any) -> Any:
        work: Any = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        future: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
        return future

    hook.__annotations__.update({"bucket": GradBucket, "return": torch.futures.Future[Tensor]})  # DDP reads them
    return hooked(hook)


@healthy(compared=6)
def joined() -> Step:
    """Uneven inputs: in each epoch another rank is done first. Without momentum: whoever is done would have no more of it."""
    model = DistributedDataParallel(Net())
    rankwatch.watch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def epoch(number: int) -> None:
        if number % EPOCH:
            return
        is_short = (number // EPOCH) % 2 == dist.get_rank()
        with model.join():
            for _ in range(EPOCH - 13 * is_short):
                loss_of(model).backward()
                optimizer.step()
                optimizer.zero_grad()

    return epoch


@healthy(compared=6, ranks=3)
def joined_with_zero() -> Step:
    """DDP and its sharded optimizer, both under ``Join``; each rank has another number of inputs."""
    model = DistributedDataParallel(Net())
    rankwatch.watch(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=1e-2)

    def epoch(number: int) -> None:
        if number % EPOCH:
            return
        with Join([model, optimizer]):
            for _ in range(EPOCH - 7 * dist.get_rank()):
                loss_of(model).backward()
                optimizer.step()
                optimizer.zero_grad()

    return epoch


@healthy(compared=8)
def batch_norm() -> Step:
    """The running statistics of each rank are its own, but for the broadcast from rank 0."""
    return trained(DistributedDataParallel(Net(middle=nn.BatchNorm1d)))


@healthy(compared=8)
def batch_norm_without_broadcast() -> Step:
    return trained(DistributedDataParallel(Net(middle=nn.BatchNorm1d), broadcast_buffers=False))


@healthy(compared=6)
def scaler_that_skips() -> Step:
    model = DistributedDataParallel(Net())
    rankwatch.watch(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=20)

    def step(number: int) -> None:
        x, y = draw()
        with torch.autocast("cpu", torch.float16):
            out = model(x)
        scaler.scale((out.float() - y).square().mean()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


@healthy(compared=6)
def optimizer_in_backward() -> Step:
    """DDP steps each parameter once its gradient is reduced, inside of the backward."""
    model: Any = DistributedDataParallel(Net())
    model._register_fused_optim(torch.optim.SGD, 1e-2)
    rankwatch.watch(model)

    def step(number: int) -> None:
        loss_of(model).backward()

    return step


@healthy(compared=6, ranks=3)
def zero_optimizer() -> Step:
    model = DistributedDataParallel(Net())
    return trained(model, optimizer=ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-2))


@healthy(compared=2, ranks=4)
def zero_optimizer_with_fewer_parameters_than_ranks() -> Step:
    """Two ranks have nothing to step."""
    model = DistributedDataParallel(nn.Linear(8, 4))
    return trained(model, optimizer=ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-2))


class Checkpointed(Net):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant, self.dropout = reentrant, nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        def middle(h: Tensor) -> Tensor:
            kept: Tensor = self.dropout(torch.tanh(self.second(h)))
            return kept

        hidden = torch.tanh(self.first(x))
        out: Tensor = self.head(checkpoint(middle, hidden, use_reentrant=self.reentrant))
        return out


@healthy(compared=6)
def checkpointed() -> Step:
    return trained(DistributedDataParallel(Checkpointed(reentrant=False)))


@healthy(compared=6)
def checkpointed_and_reentrant() -> Step:
    return trained(DistributedDataParallel(Checkpointed(reentrant=True), static_graph=True))


@healthy(compared=6)
def compiled_inside() -> Step:
    net: Any = torch.compile(Net(), backend="aot_eager")
    return trained(DistributedDataParallel(net))


@healthy(compared=6)
def compiled_outside() -> Step:
    model: Any = torch.compile(DistributedDataParallel(Net()), backend="aot_eager")
    return trained(model)


@healthy(compared=6)
def autocast() -> Step:
    model = DistributedDataParallel(Net())

    def loss(number: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(model)

    return trained(model, loss)
