"""Whole models on each rank, which DDP keeps equal."""

from __future__ import annotations

import copy
import io
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from notebook import take_step
from recorded.truths import Truth
from trainings.case import Training
from trainings.truths import desynced

from .parts import ALL, WEIGHT, Data, Tower, ddp, flip, following, net, on, sgd


def flipped(*, at: int = 120, rank: int = 1, name: str = WEIGHT) -> Training:
    """The lowest bit of a mantissa."""
    model = net()
    return following(ddp(model), before=on(rank, at, lambda: flip(model.get_parameter(name), at=2)))


desynced(Truth(("one-rank",), (0, 1), 120, (WEIGHT,), 1)).each(a_flipped_bit_of_two=flipped)
desynced(Truth(("one-rank",), (1,), 120, (WEIGHT,), 1), ranks=3).each(a_flipped_bit_of_three=flipped)
desynced(Truth(("one-rank",), (3,), 121, ("head.bias",), 1), ranks=4).each(
    a_flipped_bit_of_four=lambda: flipped(at=121, rank=3, name="head.bias"),
)
desynced(Truth(("one-rank",), (2,), 60, (WEIGHT,), 1, within=1), ranks=3, batches=80, fingerprints=1).each(
    a_flipped_bit_looked_for_at_each_step=lambda: flipped(at=60, rank=2),
)


@desynced(Truth(("one-rank",), (1,), 80, (WEIGHT, "head.bias"), 2, lines=2), ranks=3)
def two_flipped_bits() -> Training:
    """One after the other, in two parameters of one rank."""
    model = net()

    def before(number: int) -> None:
        if dist.get_rank() == 1 and number in (80, 110):
            flip(model.get_parameter(WEIGHT if number == 80 else "head.bias"))

    return following(ddp(model), before=before)


@desynced(Truth(("one-rank",), (1,), 100, (WEIGHT,), 1), ranks=3)
def a_flipped_bit_in_bfloat16() -> Training:
    model = net().to(torch.bfloat16)
    root, data = ddp(model), Data()
    return following(
        root,
        loss_of=lambda n: data.loss(lambda x: root(x.bfloat16()).float()),
        before=on(1, 100, lambda: flip(model.get_parameter(WEIGHT))),
    )


@desynced(Truth(("one-rank",), (1,), 101, (WEIGHT,), 1), ranks=3)
def a_momentum_of_one_rank() -> Training:
    """The state of one parameter in the optimizer is another one on rank 1."""
    root = ddp(net())
    optimizer = sgd(root)

    def change() -> None:
        optimizer.state[root.module.get_parameter(WEIGHT)]["momentum_buffer"][0, 0] *= 1.5

    return following(root, optimizer=optimizer, before=on(1, 100, change))


@desynced(Truth(("one-rank", "load"), (1,), 61, ("",), ALL), ranks=3)
def an_optimizer_resumed_on_two_ranks_of_three() -> Training:
    """Rank 1 has no file of the optimizer's state, and begins with moments of zero."""
    root = ddp(net())
    optimizer = torch.optim.AdamW(root.parameters(), lr=3e-3)
    return following(root, optimizer=optimizer, before=on(1, 60, lambda: optimizer.state.clear()))


@desynced(Truth(("one-rank",), (2,), 1, ("",), ALL), ranks=3)
def a_learning_rate_of_one_rank() -> Training:
    root = ddp(net())
    return following(root, optimizer=torch.optim.SGD(root.parameters(), lr=0.021 if dist.get_rank() == 2 else 0.02))


@desynced(Truth(("unsynchronised", "unknown"), (0, 1, 2), 51, ("",), ALL), ranks=3)
def a_schedule_by_the_loss_of_each_rank() -> Training:
    """The learning rates come apart as a plateau is seen on the own data."""
    root = ddp(net())
    optimizer = torch.optim.SGD(root.parameters(), lr=0.05)

    def between(number: int) -> None:
        if number >= 50:
            optimizer.param_groups[0]["lr"] = 0.05 * (1 - 0.01 * (dist.get_rank() + 1))

    return following(root, optimizer=optimizer, between=between)


@desynced(Truth(("one-rank",), (0,), 61, ("",), ALL), ranks=3)
def a_clipping_on_rank_zero_alone() -> Training:
    root = ddp(net())

    def between(number: int) -> None:
        if number >= 60 and dist.get_rank() == 0:
            nn.utils.clip_grad_norm_(root.parameters(), 0.05)

    return following(root, between=between)


@desynced(Truth(("one-rank",), (1,), 60, ("",), ALL), ranks=3)
def a_step_that_one_rank_skips() -> Training:
    """Rank 1 found its own loss too large, and took no step: from then on its step 60 is the others' step 61."""
    root, data = ddp(net()), Data()
    optimizer = sgd(root)

    def step(number: int) -> Tensor:
        loss = data.loss(root)
        loss.backward()
        if number != 59 or dist.get_rank() != 1:
            optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Training(root, step)


@desynced(Truth(("one-rank",), (0,), 50, ("",), ALL), ranks=3)
def an_average_left_in_place_on_rank_zero() -> Training:
    """Rank 0 evaluates with averaged weights and does not put its own back."""
    model = net()
    average = copy.deepcopy(model)

    def before(number: int) -> None:
        with torch.no_grad():
            for mean, value in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(value, 0.1)
                if number == 50 and dist.get_rank() == 0:
                    value.copy_(mean)

    return following(ddp(model), before=before)


@desynced(Truth(("load",), (1,), 0, ("blocks.2.down.weight",), 1), ranks=3, batches=60)
def a_checkpoint_of_which_one_tensor_changed() -> Training:
    """Each rank loads its own copy, after DDP has made all equal."""
    root = ddp(net())
    file = io.BytesIO()
    torch.save(net(seed=3).state_dict(), file)
    file.seek(0)
    state = torch.load(file)
    if dist.get_rank() == 1:
        flip(state["blocks.2.down.weight"])
    root.module.load_state_dict(state)
    return following(root)


@desynced(Truth(("load",), (0, 1), 80, ("blocks.2.down.weight",), 1, within=0))
def a_checkpoint_loaded_in_mid_run() -> Training:
    """Training goes back to a copy, of which rank 1 has one tensor wrong."""
    root = ddp(net())
    copies: list[dict[str, Tensor]] = []

    def before(number: int) -> None:
        if number == 70:
            copies.append(copy.deepcopy(root.state_dict()))
        if number == 80:
            if dist.get_rank() == 1:
                flip(copies[0]["module.blocks.2.down.weight"], bit=20)
            root.load_state_dict(copies[0])

    return following(root, before=before)


@desynced(Truth(("load", "initialisation"), (0,), 0, ("",), ALL - 6), ranks=3, batches=60)
def a_checkpoint_on_rank_zero_alone() -> Training:
    """Loaded after DDP has made all equal, and nobody hands it on. The norms are the same in it."""
    root = ddp(net())
    if dist.get_rank() == 0:
        root.module.load_state_dict(net(seed=3).state_dict())
    return following(root)


@desynced(Truth(("unknown", "subset"), (0, 1, 2), 80, ("head.",), 2), ranks=3)
def a_head_drawn_anew_on_each_rank() -> Training:
    """In mid-run, with a random state of its own on each rank."""
    model = net()
    torch.manual_seed(dist.get_rank())

    def before(number: int) -> None:
        if number == 80:
            nn.init.normal_(model.head.weight, std=0.1)
            nn.init.normal_(model.head.bias, std=0.1)

    return following(ddp(model), before=before)


@desynced(Truth(("subset", "unknown"), (0, 1, 2), 61, ("head.",), 2), ranks=3)
def parameters_thawed_after_ddp() -> Training:
    """DDP reduces no gradient of what was frozen when it was made."""
    model = net()
    model.head.requires_grad_(False)
    root = ddp(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)

    def before(number: int) -> None:
        if number == 60:
            model.head.requires_grad_(True)

    return following(root, optimizer=optimizer, before=before)


@desynced(Truth(("subset",), (0, 1, 2), 1, ("head.",), 2), ranks=3)
def a_head_replaced_after_ddp() -> Training:
    """For a finetuning: with the same seed on all ranks, so that it is equal until the first step."""
    root = ddp(net(), find_unused_parameters=True)
    torch.manual_seed(3)
    root.module.head = nn.Linear(8, 4)
    return following(root)


@desynced(Truth(("initialisation", "load"), (0, 1), 0, ("head.",), 2))
def a_head_drawn_after_ddp() -> Training:
    """The same with seeds of their own."""
    root = ddp(net(), find_unused_parameters=True)
    torch.manual_seed(dist.get_rank())
    root.module.head = nn.Linear(8, 4)
    return following(root)


class Scaling(nn.Module):
    """Like ActNorm: scale and bias are set by the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.bias = nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(8))
        self.is_set = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_set:
            with torch.no_grad():
                self.scale.copy_(1 / x.std(0))
                self.bias.copy_(-x.mean(0) / x.std(0))
            self.is_set = True
        return x * self.scale + self.bias


@desynced(Truth(("subset",), (0, 1, 2), 1, ("0.",), 2), ranks=3)
def a_scale_set_by_the_own_first_batch() -> Training:
    return following(ddp(nn.Sequential(Scaling(), net())))


class Codebook(nn.Module):
    """Vectors that follow the mean of the own data; they have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors = nn.Parameter(torch.randn(4, 8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        nearest = torch.cdist(x, self.vectors).argmin(1)
        if self.training:
            for index in nearest.unique():
                self.vectors[index] = self.vectors[index].lerp(x[nearest == index].mean(0), 0.05)
        return x + 0.1 * self.vectors[nearest]


@desynced(Truth(("subset", "unknown"), (0, 1, 2), 1, ("0.vectors",), 1), ranks=3)
def a_codebook_that_follows_the_own_data() -> Training:
    torch.manual_seed(0)
    return following(ddp(nn.Sequential(Codebook(), net())))


@desynced(Truth(("unsynchronised",), (0, 1, 2), 1, ("",), ALL), ranks=3)
def noise_of_its_own_in_each_gradient() -> Training:
    """After the reduction, with random numbers that differ by rank."""
    root, draw = ddp(net()), torch.Generator().manual_seed(dist.get_rank())

    def between(number: int) -> None:
        for parameter in root.parameters():
            assert parameter.grad is not None
            parameter.grad += 1e-4 * torch.randn(parameter.shape, generator=draw)

    return following(root, between=between)


@desynced(Truth(("unsynchronised",), (0, 1), 1, ("",), ALL, within=150, is_declared=False), batches=220)
def steps_without_synchronisation() -> Training:
    """The training never leaves ``no_sync``."""
    root, data = ddp(net()), Data()
    optimizer = sgd(root)

    def step(number: int) -> Tensor:
        with root.no_sync():
            loss = data.loss(root)
            loss.backward()
        take_step(optimizer)
        return loss.detach()

    return Training(root, step)


@desynced(Truth(("unsynchronised",), (0, 1, 2), 1, ("",), ALL), ranks=3)
def accumulation_that_reduces_a_micro_batch() -> Training:
    """The last of two micro-batches is reduced alone: the sum of the first is added to it afterwards, by the user's code."""
    root, data = ddp(net()), Data()
    optimizer = sgd(root)

    def step(number: int) -> Tensor:
        own = []
        for micro in range(2):
            with root.no_sync() if micro == 0 else nullcontext():
                loss = data.loss(root)
                loss.backward()
            if micro == 0:
                own = [parameter.grad for parameter in root.parameters()]
                optimizer.zero_grad()
        for parameter, kept in zip(root.parameters(), own, strict=True):
            assert parameter.grad is not None
            assert kept is not None
            parameter.grad.add_(kept).div_(2)
        take_step(optimizer)
        return loss.detach()

    return Training(root, step)


def keeps_its_own(state: object, bucket: Any) -> torch.futures.Future[Tensor]:
    """A communication hook without a reduction."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


torch_distributed: Any = dist
keeps_its_own.__annotations__.update(  # DDP checks them
    {"bucket": torch_distributed.GradBucket, "return": torch.futures.Future[Tensor]}
)


@desynced(Truth(("unsynchronised",), (0, 1), 1, ("",), ALL, within=150, is_declared=False), batches=220)
def a_hook_that_reduces_nothing() -> Training:
    root = ddp(net())
    root.register_comm_hook(None, keeps_its_own)
    return following(root)


class Router(Tower):
    """Two experts whose gate is left to the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 2)
        self.branches = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        gates = self.router(x).softmax(-1)
        mixed = sum(gates[:, index : index + 1] * branch(x) for index, branch in enumerate(self.branches))
        return super().forward(x + mixed)


@desynced(Truth(("subset",), (0, 1, 2, 3), 1, ("router.",), 2, within=40, is_declared=False), ranks=4)
def a_router_that_ddp_ignores() -> Training:
    torch.manual_seed(0)
    model = Router()
    ignored: Any = model
    ignored._ddp_params_and_buffers_to_ignore = ["router.weight", "router.bias"]
    return following(ddp(model))


@desynced(Truth(("one-rank",), (1,), 71, (WEIGHT,), 1), ranks=3)
def stale_values_under_zero() -> Training:
    """ZeroRedundancyOptimizer hands each parameter on from its owner; from step 70 on rank 1 receives one of them no more."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    root = ddp(net())
    optimizer = ZeroRedundancyOptimizer(root.parameters(), torch.optim.SGD, lr=0.02, momentum=0.9)
    stale: list[Tensor] = []

    def before(number: int) -> None:
        if number >= 70 and dist.get_rank() == 1:
            weight = root.module.get_parameter(WEIGHT).data
            stale[:] = stale or [weight.clone()]
            weight.copy_(stale[0])

    return following(root, optimizer=optimizer, before=before)
