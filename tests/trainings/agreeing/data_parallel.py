"""DistributedDataParallel, in the many ways in which it is used."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
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
from notebook import learn, take_step
from trainings.case import Training
from trainings.ranks import EPOCH, Net, draw, loss_of, taught
from trainings.truths import agreeing


@agreeing(compared=6)
def ddp() -> Training:
    """Each rank initialises with another seed: DDP gives all of them the model of rank 0."""
    return taught(DistributedDataParallel(Net()))


@agreeing(compared=6)
def watched_before_it_is_wrapped() -> Training:
    net = Net()
    rankwatch.watch(net)
    model = DistributedDataParallel(net)
    return replace(taught(model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-2)), is_watched=True)


@agreeing(compared=6)
def tried_before_it_is_wrapped() -> Training:
    """A first forward with gradients, of the bare model: each rank still has weights of its own."""
    net = Net()
    rankwatch.watch(net)
    loss_of(net).backward()
    net.zero_grad()
    model = DistributedDataParallel(net)
    return replace(taught(model), is_watched=True)


@agreeing(compared=6, every=7)
def every_second_batch() -> Training:
    return taught(DistributedDataParallel(Net()))


agreeing(compared=6).each(
    static_graph=lambda: taught(DistributedDataParallel(Net(), static_graph=True)),
    bucket_views=lambda: taught(DistributedDataParallel(Net(), gradient_as_bucket_view=True, bucket_cap_mb=1)),
)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 4), nn.ModuleList(nn.Linear(8, 4) for _ in range(4))

    def forward(self, x: Tensor, which: int) -> Any:
        return self.experts[which](x) * self.gate(x).softmax(-1)[:, which : which + 1]


@agreeing(compared=10)
def unused_parameters() -> Training:
    """Each rank uses another expert, and DDP finds which were used."""
    model = DistributedDataParallel(Experts(), find_unused_parameters=True)
    return taught(model, lambda n: model(draw()[0], (n + dist.get_rank()) % 4).square().mean())


@agreeing(compared=10)
def never_used_parameters() -> Training:
    """Experts 2 and 3 have no gradient on any rank."""
    model = DistributedDataParallel(Experts(), find_unused_parameters=True)
    return taught(model, lambda n: model(draw()[0], (n + dist.get_rank()) % 2).square().mean())


def accumulated(model: Any, *, ragged: bool) -> Training:
    """Three of four backwards without a reduction; with ``ragged`` the last step of an epoch has but two."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(number: int) -> None:
        batches = 2 if ragged and number % EPOCH == EPOCH - 1 else 4
        for batch in range(batches):
            with nullcontext() if batch == batches - 1 else model.no_sync():
                (loss_of(model) / batches).backward()
        take_step(optimizer)

    return Training(model, step)


agreeing(compared=6).each(
    accumulation=lambda: accumulated(DistributedDataParallel(Net()), ragged=False),
    accumulation_with_a_ragged_end=lambda: accumulated(DistributedDataParallel(Net()), ragged=True),
)


@agreeing(compared=6)
def accumulation_without_no_sync() -> Training:
    """Reduces in each backward, which costs time and is right."""
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(number: int) -> None:
        loss_of(model).backward()
        if number % 3 == 2:
            take_step(optimizer)

    return Training(model, step)


def hooked(hook: Callable[..., Any], state: Any = None, width: int = 8) -> Training:
    model = DistributedDataParallel(Net(width))
    model.register_comm_hook(state, hook)

    def loss(number: int) -> Any:
        x, y = draw(4, width)
        return (model(x) - y).square().mean()

    return taught(model, loss)


def powered(wrap: Callable[[Any], Any]) -> Training:
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=10, min_compression_rate=1.0)
    return hooked(wrap(powerSGD_hook.powerSGD_hook), state, width=32)


agreeing(compared=6).each(
    power_sgd=lambda: powered(lambda hook: hook),
    float16_gradients=lambda: hooked(default_hooks.fp16_compress_hook),
    float16_power_sgd=lambda: powered(default_hooks.fp16_compress_wrapper),
)


@agreeing(compared=6)
def a_hook_of_the_user() -> Training:
    """Averages with a factor, by its own all-reduce."""

    def hook(state: Any, bucket: Any) -> Any:
        work: Any = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        future: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
        return future

    hook.__annotations__.update({"bucket": GradBucket, "return": torch.futures.Future[Tensor]})  # DDP reads them
    return hooked(hook)


@agreeing(compared=6)
def joined() -> Training:
    """Uneven inputs: in each epoch another rank is done first. Without momentum: whoever is done would have no more of it."""
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def epoch(number: int) -> None:
        if number % EPOCH:
            return
        is_short = (number // EPOCH) % 2 == dist.get_rank()
        with model.join():
            for _ in range(EPOCH - 13 * is_short):
                learn(loss_of(model), optimizer)

    return Training(model, epoch)


@agreeing(compared=6, ranks=3)
def joined_with_zero() -> Training:
    """DDP and its sharded optimizer, both under ``Join``; each rank has another number of inputs."""
    model = DistributedDataParallel(Net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=1e-2)

    def epoch(number: int) -> None:
        if number % EPOCH:
            return
        with Join([model, optimizer]):
            for _ in range(EPOCH - 7 * dist.get_rank()):
                learn(loss_of(model), optimizer)

    return Training(model, epoch)


agreeing(compared=8).each(
    # The running statistics of each rank are its own, but for the broadcast from rank 0.
    batch_norm=lambda: taught(DistributedDataParallel(Net(middle=nn.BatchNorm1d))),
    batch_norm_without_broadcast=lambda: taught(
        DistributedDataParallel(Net(middle=nn.BatchNorm1d), broadcast_buffers=False)
    ),
)


@agreeing(compared=6)
def scaler_that_skips() -> Training:
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=20)

    def loss(number: int) -> Any:
        x, y = draw()
        with torch.autocast("cpu", torch.float16):
            out = model(x)
        return (out.float() - y).square().mean()

    def between(number: int) -> None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    return taught(model, loss, optimizer=optimizer, scaler=scaler, between=between)


@agreeing(compared=6)
def optimizer_in_backward() -> Training:
    """DDP steps each parameter once its gradient is reduced, inside of the backward."""
    model: Any = DistributedDataParallel(Net())
    model._register_fused_optim(torch.optim.SGD, 1e-2)

    def step(number: int) -> None:
        loss_of(model).backward()

    return Training(model, step)


@agreeing(compared=6, ranks=3)
def zero_optimizer() -> Training:
    model = DistributedDataParallel(Net())
    return taught(model, optimizer=ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-2))


@agreeing(compared=2, ranks=4)
def zero_optimizer_with_fewer_parameters_than_ranks() -> Training:
    """Two ranks have nothing to step."""
    model = DistributedDataParallel(nn.Linear(8, 4))
    return taught(model, optimizer=ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-2))


class Checkpointed(Net):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant, self.dropout = reentrant, nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Any:
        def middle(h: Tensor) -> Any:
            return self.dropout(torch.tanh(self.second(h)))

        hidden = torch.tanh(self.first(x))
        return self.head(checkpoint(middle, hidden, use_reentrant=self.reentrant))


agreeing(compared=6).each(
    checkpointed=lambda: taught(DistributedDataParallel(Checkpointed(reentrant=False))),
    checkpointed_and_reentrant=lambda: taught(DistributedDataParallel(Checkpointed(reentrant=True), static_graph=True)),
)


@agreeing(compared=6)
def compiled_inside() -> Training:
    net: Any = torch.compile(Net(), backend="aot_eager")
    return taught(DistributedDataParallel(net))


@agreeing(compared=6)
def compiled_outside() -> Training:
    model: Any = torch.compile(DistributedDataParallel(Net()), backend="aot_eager")
    return taught(model)


@agreeing(compared=6)
def autocast() -> Training:
    model = DistributedDataParallel(Net())

    def loss(number: int) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(model)

    return taught(model, loss)
