"""Two ranks, of which one, or their reduction, goes wrong in batch 5."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import rankwatch
from trainings.case import Training
from trainings.parts import BAD, INF, NAN, Gain, averaged, chain, fed, kinked, labels, put, squared, trained
from trainings.ranks import Net, alike, flat, fully, reduce_gradients, same_seed, split
from trainings.truths import spoilt

CULPRIT: dict[str, Any] = {"rank": 1, "batch": BAD, "certainty": "complete", "state": "nan"}
LOST: dict[str, Any] = {**CULPRIT, "module": "", "reading": "loss", "says": "the model's output was finite"}
REDUCED: dict[str, Any] = {
    **{"batch": BAD, "phase": "backward", "module": "head", "state": "inf", "cause": "reduction", "also": [1]},
    "options": {"gradients": True},
}
HARD = 30.0
"""How much larger the inputs of a hard batch are."""
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


@spoilt(**CULPRIT, module="first", cause="data", nan_count=8)
def data() -> Training:
    return fed_nan(DistributedDataParallel(Net()))


@spoilt(
    **CULPRIT,
    module="second",
    reading="weight",
    cause="weight",
    nan_count=1,
    says="last seen finite in batch 4, bad in batch 5: the gradients were finite",
)
def weight() -> Training:
    net = Net()
    return marred(DistributedDataParallel(net), lambda: net.second.weight, 1, 1)


@spoilt(**LOST, operator="aten.div.Tensor")
def loss() -> Training:
    """Only one rank's labels are all ignored, and the mean is made by hand."""
    model = DistributedDataParallel(Net())
    return trained(model, averaged(model, BAD if is_culprit() else -1, width=8))


def lost(loss_of: Callable[[Tensor, bool], Any], **options: Any) -> Training:
    """One rank's loss goes bad; the model's output is finite."""
    model = DistributedDataParallel(Net())
    return trained(model, lambda n: loss_of(model(torch.randn(4, 8)), n == BAD and is_culprit()), **options)


@spoilt(**LOST, operator="aten.div.Tensor")
def loss_of_no_tokens() -> Training:
    """A sum of losses is divided by a number of tokens, which is 0."""

    def loss_of(out: Tensor, is_bad: bool) -> Tensor:
        mask = torch.zeros(4) if is_bad else torch.ones(4)
        return (nn.functional.cross_entropy(out, labels(False), reduction="none") * mask).sum() / mask.sum()

    return lost(loss_of)


@spoilt(**LOST, operator="aten.div.Tensor", also=[0])
def loss_of_gathered_rows() -> Training:
    """One rank's row of zeros is divided by its norm; all ranks gather it."""

    def loss_of(out: Tensor, is_bad: bool) -> Tensor:
        rows = out * (torch.arange(4)[:, None] != 1 if is_bad else 1.0)
        rows = rows / rows.norm(dim=-1, keepdim=True)
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows.detach())
        parts[dist.get_rank()] = rows
        every = torch.cat(parts)
        return nn.functional.cross_entropy(10 * every @ every.T, torch.arange(len(every)))

    return lost(loss_of)


@spoilt(**LOST, operator="aten.mul.Tensor")
def loss_times_nan() -> Training:
    """Under a scaler, after a micro-batch that was not reduced."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    training = lost(lambda out, is_bad: out.square().mean() * (NAN if is_bad else 1), scaler=scaler, accumulate=2)

    def step(number: int) -> None:
        with nullcontext() if number % 2 else training.root.no_sync():
            training.step(number)

    return Training(training.root, step)


@spoilt(batch=13, cause="gradient", says="since batch 3", batches=40)
def a_scale_that_shrinks_for_ever() -> Training:
    """From batch 3 on a gradient is inf."""
    model = DistributedDataParallel(Net())

    def loss_of(number: int) -> Any:
        out = model(torch.randn(4, 8))
        if number >= 3 and is_culprit():
            out.register_hook(lambda gradient: gradient * INF)
        return out.square().mean()

    return trained(model, loss_of, scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))


def with_a_kink() -> Training:
    """The loss is finite, its gradient is not; the all-reduce gives it to all ranks."""
    model = DistributedDataParallel(Net())
    return trained(model, lambda n: kinked(model(torch.randn(4, 8)), n == BAD and is_culprit()))


spoilt(**CULPRIT, module="", cause="gradient", reading="grad_output").each(gradient=with_a_kink)
spoilt(**CULPRIT, module="", cause="gradient", options={"gradients": True}).each(gradient_with_gradients=with_a_kink)


@spoilt(**CULPRIT, module="", cause="gradient", reading="grad_output")
def a_harmless_loss_beside_a_bad_gradient() -> Training:
    """All labels of one rank are ignored, and its loss is nan; what is bad in all gradients comes from the other one."""
    model = DistributedDataParallel(Net())

    def loss_of(number: int) -> Any:
        out = model(torch.randn(4, 8))
        if is_culprit():
            return kinked(out, number == BAD)
        return nn.functional.cross_entropy(out, labels(number == BAD))

    return trained(model, loss_of)


@spoilt(**{**LOST, "says": "0 / 0"})
def a_loss_of_a_sharded_model() -> Training:
    """What it makes bad lies in the shards of both ranks."""
    model = fully(Net())
    return trained(model, averaged(model, BAD if is_culprit() else -1, width=8))


@spoilt(batch=1, cause="weight", says="its eps of 1e-08 is 0 in float16: it divided by 0")
def an_epsilon_that_float16_does_not_have() -> Training:
    """The gradients that all ranks have are finite, and small: their squares are 0."""
    model = DistributedDataParallel(Net().half())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return trained(model, lambda n: model(torch.randn(4, 8).half()).float().square().mean() * 1e-3, optimizer=optimizer)


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


@spoilt(**CULPRIT, cause="weight", also=[0])
def fsdp1_weight() -> Training:
    """What was gathered is bad on all ranks, in the same frame."""
    model = flat(Net(), auto_wrap_policy=None, use_orig_params=False)
    return marred(model, lambda: next(model.parameters()), 0)


@spoilt(**CULPRIT, module="second", reading="weight", cause="weight", also=[0])
def fsdp1_weight_of_the_users() -> Training:
    """The shard of rank 1 begins within a parameter."""
    model = flat(Net(), auto_wrap_policy=None)
    return marred(model, lambda: model.second.weight, 0)


@spoilt(**CULPRIT, module="second", reading="weight (shard of 2)", cause="weight", also=[0])
def fsdp2_weight() -> Training:
    net = fully()
    return marred(net, lambda: net.second.weight.to_local(), 0, 0)


@spoilt(**CULPRIT, module="second", reading="weight", cause="weight", also=[0])
def fsdp2_weight_that_stays_gathered() -> Training:
    net = alike()
    fully(net, parts=[net.first])
    return marred(net, lambda: net.second.weight.to_local(), 0, 0)


@spoilt(**CULPRIT, module="first", reading="weight (shard of 2)", cause="weight")
def tensor_parallel_weight() -> Training:
    net = split(alike(), init_device_mesh("cpu", (2,)))
    training = marred(net, lambda: net.first.weight.to_local(), 0, 0)

    def step(number: int) -> None:
        same_seed(number)
        training.step(number)

    return Training(net, step)


# --- reductions -------------------------------------------------------------------------------------------------------


class Row(nn.Module):
    """As Megatron's row-parallel linear: what its inner module returns is a part of each rank, and ``reduce`` sums the parts.

    In the bad batch, all numbers of this rank's part are ``part``. ``reduce`` is told whether this is the bad batch.
    """

    def __init__(self, part: Callable[[], float | None], reduce: Callable[[Row, Tensor, bool], Tensor]) -> None:
        super().__init__()
        self.inner = Gain(lambda x, part: x if part is None else x * 0 + part, None)
        self.meanwhile = nn.Linear(8, 8)
        self.part, self.reduce, self.calls = part, reduce, 0

    def forward(self, x: Tensor) -> Tensor:
        is_bad = self.calls == BAD
        self.calls += 1
        self.inner.gain = self.part() if is_bad else None
        return self.reduce(self, self.inner(x), is_bad)


def in_place(row: Row, x: Tensor, is_bad: bool) -> Tensor:
    """Unseen by autograd."""
    dist.all_reduce(x.detach())
    return x


def beside_a_module(row: Row, x: Tensor, is_bad: bool) -> Tensor:
    """Another module runs until the sum is there."""
    work: Any = dist.all_reduce(x.detach(), async_op=True)
    row.meanwhile(torch.ones(4, 8))
    work.wait()
    return x


def scattered(row: Row, x: Tensor, is_bad: bool) -> Tensor:
    total = torch.empty(2, 8)
    dist.reduce_scatter_tensor(total, x.detach())
    return x + torch.cat([total, total])


def in_float16(row: Row, x: Tensor, is_bad: bool) -> Tensor:
    total = x.detach().half()
    dist.all_reduce(total)
    return x * 0 + total.float()


def spoiled_before(row: Row, x: Tensor, is_bad: bool) -> Tensor:
    return in_place(row, x * NAN if is_bad and is_culprit() else x * 1, is_bad)


def spoiled_after(row: Row, x: Tensor, is_bad: bool) -> Tensor:
    total = in_place(row, x, is_bad)
    return total.exp() if is_bad else total


def summed(part: Callable[[], float | None], reduce: Callable[[Row, Tensor, bool], Tensor]) -> Training:
    net = chain(nn.Linear(8, 8), Row(part, reduce), nn.Tanh(), nn.Linear(8, 4))
    return trained(net, squared(net, 4, 8))


# All ranks see what their reduction gives: none is guilty alone.
spoilt(batch=BAD, module="1", reading="output", cause="reduction", state="inf", also=[1]).each(
    row_parallel=lambda: summed(lambda: 2e38, in_place),
    a_sum_beside_another_module=lambda: summed(lambda: 2e38, beside_a_module),
    a_sum_that_is_scattered=lambda: summed(lambda: 2e38, scattered),
    a_sum_in_float16=lambda: summed(lambda: 4e4, in_float16),
)
spoilt(rank=1, batch=BAD, module="1.inner", cause="overflow").each(
    a_part_that_is_inf=lambda: summed(lambda: INF if is_culprit() else 1.0, in_place),
)
spoilt(rank=1, batch=BAD, module="1", cause="invalid").each(
    a_part_that_is_nan_where_it_is_reduced=lambda: summed(lambda: None, spoiled_before),
)
spoilt(rank=0, batch=BAD, module="1", cause="overflow").each(
    an_overflow_of_a_finite_sum=lambda: summed(lambda: 100.0, spoiled_after),
)


def pulled(model: nn.Module, gain: Callable[[], float], **options: Any) -> Training:
    """The gradient of the model's output is multiplied in the bad batch."""

    def loss_of(number: int) -> Any:
        out = model(torch.ones(1, 8))
        if number == BAD:
            out.register_hook(partial(torch.mul, torch.tensor(gain())))
        return out.sum()

    return trained(model, loss_of, lr=1e-9, **options)


def reduced_in_float16(gain: Callable[[], float]) -> Training:
    """By the training loop."""
    net = Net()

    def between(number: int) -> None:
        for parameter in net.parameters():
            if parameter.grad is not None:
                half = parameter.grad.half()
                dist.all_reduce(half)
                parameter.grad.copy_(half)

    return pulled(net, gain, between=between)


@spoilt(**REDUCED, reading="bias.grad (reduced)")
def a_float16_hook() -> Training:
    """DDP compresses the gradients to float16; each rank's own gradient is finite."""
    model = DistributedDataParallel(Net())
    model.register_comm_hook(None, fp16_compress_hook)
    return pulled(model, lambda: 7e4)


spoilt(**REDUCED, reading="bias.grad (reduced)").each(gradients_summed_in_float16=lambda: reduced_in_float16(lambda: 4e4))
spoilt(rank=1, batch=BAD, cause="gradient", reading="bias.grad", options={"gradients": True}).each(
    a_gradient_that_is_inf_before=lambda: reduced_in_float16(lambda: INF if is_culprit() else 1.0),
)


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


@spoilt(
    batch=range(81, 120),
    began={"rank": 1, "batch": 80, "module": "", "label": "input[0]", "alone": True, "factor": range(500, 2000)},
    began_leads=True,
    batches=120,
)
def a_rank_that_left_first() -> Training:
    """bfloat16; rank 1's input is x1000 in batch 80; the all-reduce gives its gradient to rank 0."""
    model = DistributedDataParallel(Deep().bfloat16())

    def loss_of(number: int) -> Any:
        x = torch.randn(4, 8).bfloat16() * (1000 if number == 80 and is_culprit() else 1)
        return model(x).float().square().mean()

    return trained(model, loss_of, lr=1e-3)


@spoilt(
    rank=None,
    batch=41,
    cause="divergence",
    began={"rank": 1, "batch": 40, "module": "", "label": "loss", "alone": True},
    began_leads=True,
    batches=60,
)
def a_loss_of_one_rank_that_throws_all_weights_away() -> Training:
    """The gradient is finite, and all ranks take the step."""
    model = DistributedDataParallel(normed())
    return trained(model, lambda number: squared(model, 4, 8)(number) * (1e37 if number == 40 and is_culprit() else 1))


@spoilt(
    rank=1,
    batch=41,
    state="inf",
    began={"rank": 1, "batch": 41, "module": "head", "label": "weight", "alone": True, "factor": range(10**30, 10**40)},
    batches=60,
)
def a_flipped_bit() -> Training:
    """A weight of rank 1 becomes 3e38."""
    net = Net()
    return marred(DistributedDataParallel(net), lambda: net.head.weight, 1, 1, value=3e38, after=40)


ALL_READ: dict[str, Any] = {
    "try": "look at input[0] of batch 5 in what all ranks read: it is not one shard, so look at how the data are made, scaled "
    "and collated; rankwatch replay finds the rows"
}


@spoilt(rank=0, alike_ranks=[0, 1], batch=5, cause="data", **ALL_READ)
def data_that_all_ranks_have() -> Training:
    """The standard deviation that all are divided by is 0."""
    model = DistributedDataParallel(Net())
    return trained(model, lambda number: model((torch.randn(4, 8) * (number != 5)) / (number != 5)).square().mean(), lr=1e-3)


def fed_nan_at_last(scale: Callable[[int], float]) -> Training:
    """All ranks' inputs are scaled alike, until rank 1 is fed a nan in batch 70."""
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def loss_of(number: int) -> Any:
        optimizer.param_groups[0]["lr"] = 1e-6 if scale(number) == HARD else 1e-3
        x = torch.randn(4, 8) * scale(number) * (NAN if number == 70 and is_culprit() else 1)
        return (model(x) - x[:, :4]).square().mean()

    return trained(model, loss_of, optimizer=optimizer)


spoilt(rank=1, batch=70, cause="data", began=None, batches=100).each(
    inputs_that_only_grew=lambda: fed_nan_at_last(lambda number: 0.05 * 1.05**number),
    a_hard_batch_and_a_recovery=lambda: fed_nan_at_last(lambda number: HARD if number == 40 else 1.0),
)


def diverging(raised: float, at: int = 20) -> Training:
    """All ranks alike: the learning rate is raised from batch ``at`` on."""
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def before(number: int) -> None:
        if number == 0:
            torch.manual_seed(dist.get_rank())  # how fast it diverges depends on what is drawn
        if number == at:
            optimizer.param_groups[0]["lr"] = raised

    def loss_of(number: int) -> Tensor:
        return nn.functional.mse_loss(model(torch.randn(4, 8)), torch.randn(4, 4))

    return trained(model, loss_of, optimizer=optimizer, before=before)


# The loss takes six batches to become inf.
spoilt(rank=None, cause="divergence", began={"rank": None, "batch": range(20, 27), "alone": False}, batches=60).each(
    a_learning_rate_that_diverges=lambda: diverging(4.0),
)
for ranks, alone in ((1, None), (2, False)):
    began = {"rank": None, "batch": range(1, 60), "alone": alone}
    spoilt(rank=None, cause="divergence", began=began, batches=60, ranks=ranks).each(
        **{f"a_learning_rate_that_is_too_high_on_{ranks}": lambda: diverging(10.0, at=0)}
    )
# The loss takes three: too few to tell a divergence from a flipped bit, but that the weights of all ranks went with it.
spoilt(rank=None, cause="divergence", batches=60).each(a_learning_rate_that_explodes=lambda: diverging(30.0))


def thrown_away(model: Any) -> Training:
    """The first step throws the weights far away; the second group's learning rate is smaller."""
    matrices, others = ([p for p in model.parameters() if (p.ndim > 1) is wide] for wide in (True, False))
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "lr": 1e12}]
    return trained(model, squared(model, 4, 8), optimizer=torch.optim.AdamW(groups, lr=1e13))


def normed() -> Any:
    same_seed()
    net = Net(middle=nn.LayerNorm)
    net.second = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    return net


THROWN: dict[str, Any] = {"rank": None, "batch": range(1, 4), "cause": "divergence", "also": [0, 1]}
spoilt(
    **THROWN,
    certainty="complete",
    says="Look at the learning rate (1e+13, 1e+12 of its groups)",
).each(
    a_first_step_that_is_too_large=lambda: thrown_away(DistributedDataParallel(normed())),
    a_first_step_that_is_too_large_in_shards=lambda: thrown_away(fully(normed())),
)


# --- after the backwards ----------------------------------------------------------------------------------------------


def quantised(state: Any, bucket: Any) -> Any:
    """As int8, by the largest gradient of the bucket: 0/0 where all are 0."""
    values = bucket.buffer()
    scale = values.abs().max() / 127
    work = dist.all_reduce((values / scale).round() * scale / dist.get_world_size(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


quantised.__annotations__.clear()  # DDP takes classes alone


AFTER: dict[str, Any] = {"batch": BAD, "cause": "gradient", "certainty": "complete", "state": "nan"}


@spoilt(**AFTER, also=[1], says="made after the backwards, by the reduction (quantised), or by code that changes .grad")
def a_hook_that_divides_by_zero() -> Training:
    model = DistributedDataParallel(Net())
    model.register_comm_hook(None, quantised)
    return trained(model, lambda n: squared(model, 4, 8)(n) * (0 if n == BAD and is_culprit() else 1))


def normalised(only: bool) -> Training:
    """The gradients are divided by their norm. ``only``: of one rank; else of all, before they are reduced by hand."""
    net = alike()

    def between(number: int) -> None:
        for parameter in net.parameters():
            if not only or (is_culprit() and number == BAD):
                parameter.grad /= parameter.grad.norm() * (0 if only else 1)
        if not only:
            reduce_gradients(net.parameters())

    model = DistributedDataParallel(net) if only else net
    return trained(model, lambda n: squared(model, 4, 8)(n) * (0 if n == BAD and is_culprit() else 1), between=between)


spoilt(
    **AFTER, also=[1], says="made after the backwards, by the reduction (all_reduce), or by code that changes .grad"
).each(
    gradients_of_zero_that_are_normalised=lambda: normalised(only=False),
)
spoilt(**{**AFTER, "state": "inf"}, rank=1, also=[], says="no other rank's gradients were bad: rank 1 made it").each(
    gradients_that_one_rank_spoils=lambda: normalised(only=True),
)


@spoilt(**{**AFTER, "state": "inf"}, also=[1], says="run again, this rank's own gradient was finite; both ranks have it")
def gradients_that_a_factor_makes_inf() -> Training:
    """After DDP has reduced them. What the ranks made alone is too small for a sum that is inf."""
    model = DistributedDataParallel(alike())

    def between(number: int) -> None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad *= 1.0 if number != BAD else float("inf")

    return trained(model, squared(model, 4, 8), between=between)


@spoilt(
    rank=1,
    batch=7,
    cause="overflow",
    state="inf",
    certainty="complete",
    reading="bias.grad (summed)",
    also=[0],
    says="the bias.grad of each forward in this step was finite, and their sum is inf: float16 ends at 65,504",
)
def gradients_that_float16_cannot_add() -> Training:
    """Those of four forwards, each of which is half of what float16 holds."""
    model = DistributedDataParallel(Net().half())

    def loss_of(number: int) -> Any:
        gain = 4 * 5e3 if 4 <= number < 8 and is_culprit() else 1.0
        return model(torch.randn(8, 8).half()).float().abs().sum() * gain

    training = trained(model, loss_of, lr=1e-6, accumulate=4)

    def step(number: int) -> None:
        with nullcontext() if number % 4 == 3 else model.no_sync():
            training.step(number)

    return Training(model, step)


# --- both backwards and both steps are inside of a forward, as in Lightning's manual optimization ------------------------


class Steps(nn.Module):
    """Its forward is a step of the training of a GAN. Batch 0 is the critic's first, and batch 1 the painter's."""

    wrapper: Any

    def __init__(self, spoil: Callable[[int, Tensor], Tensor], spoil_input: bool = False) -> None:
        super().__init__()
        self.painter, self.critic = Net(), Net()
        self.rates = [torch.optim.Adam(one.parameters(), lr=1e-3) for one in (self.critic, self.painter)]
        self.spoil, self.spoils_input, self.number = spoil, spoil_input, 0

    def forward(self, x: Tensor) -> None:
        for optimizer in self.rates:
            number, self.number = self.number, self.number + 1
            given = self.spoil(number, x) if self.spoils_input else x
            fake = torch.cat([self.painter(given), self.painter(-given)], 1)
            loss = self.critic(fake).square().mean()
            loss = loss if self.spoils_input else self.spoil(number, loss)
            optimizer.zero_grad()
            self.wrapper.reducer._rebuild_buckets()
            self.wrapper.reducer.prepare_for_backward([loss])
            loss.backward()
            optimizer.step()
        self.wrapper.require_backward_grad_sync = False


def stepped(bad: int, value: Callable[[Tensor], Tensor] = lambda x: x / 0 * 0, *, of_input: bool = False) -> Training:
    def spoil(number: int, x: Tensor) -> Tensor:
        return value(x) if number == bad and is_culprit() else x

    inner = Steps(spoil, of_input)
    object.__setattr__(inner, "wrapper", DistributedDataParallel(inner, find_unused_parameters=True))

    def step(_: int) -> None:
        inner.wrapper.require_backward_grad_sync = True
        inner.wrapper(torch.randn(4, 8))

    return Training(inner.wrapper, step)


IN_A_STEP: dict[str, Any] = {**CULPRIT, "cause": "singular", "reading": "loss", "operator": "aten.div.Tensor"}
spoilt(**IN_A_STEP).each(a_loss_in_a_step_of_two_losses=lambda: stepped(BAD))
spoilt(**IN_A_STEP | {"batch": 0}).each(the_first_loss_in_a_step_of_two_losses=lambda: stepped(0))
spoilt(**IN_A_STEP | {"batch": 1}).each(the_second_loss_in_a_step_of_two_losses=lambda: stepped(1))
spoilt(**CULPRIT, module="painter.first", reading="output").each(
    an_input_in_a_step_of_two_losses=lambda: stepped(BAD, of_input=True)
)


@spoilt(**CULPRIT | {"state": "inf"}, cause="gradient", reading="grad_output", operator="aten.sqrt.default")
def a_gradient_in_a_step_of_two_losses() -> Training:
    """The loss is finite, its gradient is not."""
    return stepped(BAD, lambda loss: loss + kinked(loss * torch.ones(4, 4), True) * 0.1)
