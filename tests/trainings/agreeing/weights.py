"""What becomes of the weights beside the steps: teachers, frozen layers, adapters, checkpoints."""

from __future__ import annotations

import copy
import io
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import rankwatch
from trainings.case import Training
from trainings.ranks import EPOCH, Net, broadcast, draw, own_seed, same_seed, taught
from trainings.truths import agreeing

# --- teachers -------------------------------------------------------------------------------------------------------------


class Distilled(nn.Module):
    """A student and a teacher that follows it (DINO, MoCo, mean teacher); as many people write it, the teacher is moved inside
    of the forward. ``is_frozen``: whether the teacher's parameters are marked as not trained."""

    def __init__(self, *, is_frozen: bool, inside: bool) -> None:
        super().__init__()
        self.student = Net()
        self.teacher = copy.deepcopy(self.student)
        self.teacher.requires_grad_(not is_frozen)
        self.inside = inside
        self.register_buffer("queue", torch.randn(4, 16))

    @torch.no_grad()
    def follow(self) -> None:
        for old, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            old.lerp_(new, 0.01)

    def forward(self, x: Tensor) -> Any:
        if self.inside:
            self.follow()
        with torch.no_grad():
            target = self.teacher(x + 0.1)
        return (self.student(x) - target).square().mean() + (self.student(x) - x[:, :4].sin()).square().mean()


@agreeing(compared=12)
def momentum_encoder() -> Training:
    model = DistributedDataParallel(Distilled(is_frozen=True, inside=True))
    return taught(model, lambda n: model(draw()[0]))


@agreeing(compared=12)
def a_teacher_that_follows() -> Training:
    whole = Distilled(is_frozen=True, inside=False)
    model = DistributedDataParallel(whole)
    return taught(model, lambda n: model(draw()[0]), after=lambda n: whole.follow())


@agreeing(compared=12)
def a_teacher_that_stands_still() -> Training:
    """Nobody has marked it as not trained; no gradient ever reaches it."""
    whole = Distilled(is_frozen=False, inside=False)
    model = DistributedDataParallel(whole, find_unused_parameters=True)
    return taught(model, lambda n: model(draw()[0]))


@agreeing(compared=12)
def a_teacher_outside_of_ddp() -> Training:
    """The student is in DDP, the teacher beside it; both are watched as one."""
    same_seed()
    whole = Distilled(is_frozen=True, inside=False)
    own_seed()
    whole.student = DistributedDataParallel(whole.student)  # type: ignore[assignment]
    return taught(whole, lambda n: whole(draw()[0]), after=lambda n: whole.follow())


# --- frozen, adapted ----------------------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """LoRA: ``up`` begins at zero."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, base.in_features) / 4)
        self.up = nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, x: Tensor) -> Any:
        return self.base(x) + x @ self.down.t() @ self.up.t()


def adapted() -> Any:
    net = Net()
    net.requires_grad_(False)
    net.first, net.second = Adapted(net.first), Adapted(net.second)
    return net


@agreeing(compared=10)
def lora() -> Training:
    return taught(DistributedDataParallel(adapted()))


@agreeing(compared=10)
def lora_switched_off_at_times() -> Training:
    """As DPO does for its reference: forwards of the base alone, without gradients."""
    net = adapted()
    model = DistributedDataParallel(net)

    def after(number: int) -> None:
        kept = net.first.up.detach().clone()
        with torch.no_grad():
            net.first.up.zero_()
            net(draw()[0])
            net.first.up.copy_(kept)

    return taught(model, after=after)


@agreeing(compared=10)
def lora_merged_at_times() -> Training:
    """Merged into the base and begun anew, on all ranks alike (ReLoRA)."""
    net = adapted()

    def after(number: int) -> None:
        if number % 40 == 39:
            with torch.no_grad():
                for part in (net.first, net.second):
                    part.base.weight += part.up @ part.down
                    part.up.zero_()

    return taught(DistributedDataParallel(net), after=after)


@agreeing(compared=6)
def frozen_by_its_rate() -> Training:
    """The first layer has gradients, and a learning rate of 0."""
    model = DistributedDataParallel(Net())
    net = model.module
    groups = [{"params": net.first.parameters(), "lr": 0.0}, {"params": [*net.second.parameters(), *net.head.parameters()]}]
    return taught(model, optimizer=torch.optim.Adam(groups, lr=1e-2))


@agreeing(compared=6)
def a_long_warm_up() -> Training:
    """The learning rate is 0 for 60 steps."""
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, min(1.0, (step - 60) / 50)))
    return taught(model, optimizer=optimizer, after=lambda n: schedule.step())


@agreeing(compared=6)
def a_warm_up_in_bfloat16() -> Training:
    """At first the updates are too small for weights near 1."""
    net = Net(middle=nn.LayerNorm).to(torch.bfloat16)
    net.norm = nn.Identity()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1e-6 * 10 ** min(step / 20, 5))

    def loss(number: int) -> Any:
        x, y = draw()
        return (model(x.bfloat16()).float() - y).square().mean()

    return taught(model, loss, optimizer=optimizer, after=lambda n: schedule.step())


@agreeing(compared=6)
def unfrozen_layer_by_layer() -> Training:
    """Without another DDP: it was told of unused parameters."""
    net = Net()
    model = DistributedDataParallel(net, find_unused_parameters=True)
    optimizer = torch.optim.Adam(net.head.parameters(), lr=1e-2)

    def before(number: int) -> None:
        net.first.requires_grad_(number >= 120)
        net.second.requires_grad_(number >= 60)
        if number in (60, 120):
            optimizer.add_param_group({"params": [*(net.second if number == 60 else net.first).parameters()], "lr": 1e-3})

    return taught(model, optimizer=optimizer, before=before)


@agreeing(compared=6)
def in_the_optimizer_late() -> Training:
    """The first layer has gradients from the beginning, and comes to the optimizer at step 80."""
    model = DistributedDataParallel(Net())
    net = model.module
    optimizer = torch.optim.Adam([*net.second.parameters(), *net.head.parameters()], lr=1e-2)

    def before(number: int) -> None:
        if number == 20:
            optimizer.add_param_group({"params": [*net.first.parameters()], "lr": 1e-3})

    return taught(model, optimizer=optimizer, before=before)


class FakeQuantized(nn.Module):
    """Learns its step size, as LSQ does."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear, self.scale = linear, nn.Parameter(torch.tensor(0.05))

    def forward(self, x: Tensor) -> Tensor:
        scaled = self.linear.weight / self.scale
        rounded = (scaled.round() - scaled).detach() + scaled
        return nn.functional.linear(x, rounded * self.scale, self.linear.bias)


@agreeing(compared=8)
def quantization_aware() -> Training:
    net = Net()
    net.first, net.second = FakeQuantized(net.first), FakeQuantized(net.second)
    return taught(DistributedDataParallel(net))


# --- loads ----------------------------------------------------------------------------------------------------------------


def saved(model: nn.Module) -> bytes:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    return file.getvalue()


def load(model: nn.Module, what: bytes, **options: Any) -> None:
    model.load_state_dict(torch.load(io.BytesIO(what)), **options)


def checkpoint_of(rank: int) -> bytes:
    """The bytes of one model, on all ranks: as a file that all read."""
    box: list[Any] = [saved(Net()) if dist.get_rank() == rank else None]
    dist.broadcast_object_list(box, rank)
    return bytes(box[0])


@agreeing(compared=6)
def loaded_on_all_ranks() -> Training:
    model = DistributedDataParallel(Net())
    load(model.module, checkpoint_of(1))
    return taught(model)


@agreeing(compared=6)
def loaded_on_rank_zero_and_wrapped() -> Training:
    """The watch began before, and DDP gives all ranks what rank 0 has loaded."""
    net = Net()
    rankwatch.watch(net)
    what = checkpoint_of(0)
    if dist.get_rank() == 0:
        load(net, what)
    model = DistributedDataParallel(net)
    return replace(taught(model), is_watched=True)


@agreeing(compared=6)
def loaded_on_rank_zero_and_broadcast() -> Training:
    """In mid-run, without DDP's help."""
    model = DistributedDataParallel(Net())
    what = checkpoint_of(0)

    def after(number: int) -> None:
        if number == 77:
            if dist.get_rank() == 0:
                load(model.module, what)
            broadcast(model)

    return taught(model, after=after)


@agreeing(compared=6)
def rolled_back() -> Training:
    """Goes back to what it was, as after a spike of the loss; and loads a part of a checkpoint at another time."""
    model = DistributedDataParallel(Net())
    kept = {"all": b"", "part": checkpoint_of(0)}

    def after(number: int) -> None:
        if number % 30 == 0:
            kept["all"] = saved(model.module)
        if number % 30 == 25:
            load(model.module, kept["all"])
        if number == 55:
            part = {name: value for name, value in torch.load(io.BytesIO(kept["part"])).items() if "first" in name}
            model.module.load_state_dict(part, strict=False)

    return taught(model, after=after)


@agreeing(compared=6)
def best_weights_for_a_while() -> Training:
    """Each epoch, rank 0 alone loads its best weights, evaluates them, and loads the present ones."""
    model = DistributedDataParallel(Net())
    best = saved(model.module)

    def after(number: int) -> None:
        if number % EPOCH == EPOCH - 1 and dist.get_rank() == 0:
            now = saved(model.module)
            load(model.module, best)
            with torch.no_grad():
                model.module(draw()[0])
            load(model.module, now)

    return taught(model, after=after)
