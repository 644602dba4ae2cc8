"""The lowest bit of one weight flips on rank 1, in many ways of training: each must name it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from notebook import take_step
from recorded.truths import Truth
from trainings.case import Training
from trainings.ranks import reduce_gradients
from trainings.truths import desynced

from .parts import WEIGHT, Block, Data, Tower, ddp, flip, following, net, on, sgd

AT = 40
ONE = Truth(("one-rank",), (1,), AT, (WEIGHT,), 1)
BATCHES = 70


def flips(model: nn.Module, name: str = WEIGHT, *, at: int = AT, bit: int = 0) -> Callable[[int], None]:
    return on(1, at, lambda: flip(model.get_parameter(name), bit))


@desynced(ONE, ranks=3, batches=4 * BATCHES)
def accumulation() -> Training:
    """One step of four batches, three of them under ``no_sync``."""
    root, data = ddp(net()), Data()
    optimizer = sgd(root)

    def step(number: int) -> Tensor:
        with nullcontext() if number % 4 == 3 else root.no_sync():
            loss = data.loss(root)
            (loss / 4).backward()
        if number % 4 == 3:
            take_step(optimizer)
        return loss.detach()

    return Training(root, step, flips(root.module, at=4 * AT))


@desynced(ONE, ranks=3, batches=BATCHES)
def a_step_in_the_backward() -> Training:
    """Each parameter has an optimizer of its own, which steps as soon as its gradient is there."""
    model = net()
    root, data = ddp(model), Data()
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.02) for parameter in model.parameters()}

    def update(parameter: Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    waiting: list[Tensor] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(waiting.append)

    def step(number: int) -> Tensor:
        loss = data.loss(root)
        loss.backward()
        while waiting:  # DDP writes what it has reduced at the end of the backward
            update(waiting.pop())
        return loss.detach()

    return Training(root, step, flips(model))


@desynced(ONE, ranks=3, batches=BATCHES)
def half_precision_with_a_scaler() -> Training:
    root, data = ddp(net()), Data()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=20)

    def loss_of(number: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return data.loss(lambda x: root(x).float())

    return following(root, loss_of=loss_of, scaler=scaler, before=flips(root.module))


@desynced(ONE, ranks=3, batches=BATCHES)
def a_compiled_model() -> Training:
    model = net()
    compiled: Any = torch.compile(ddp(model), backend="eager")
    return following(compiled, before=flips(model))


@desynced(ONE, ranks=3, batches=BATCHES)
def a_static_graph_of_bucket_views() -> Training:
    model = net()
    root = ddp(model, static_graph=True, gradient_as_bucket_view=True)
    return following(root, before=flips(model))


@desynced(ONE, ranks=3, batches=BATCHES)
def watched_before_it_is_wrapped() -> Training:
    """The watch is given the model that DDP wraps."""
    model = net()
    root = ddp(model)
    return Training(model, following(root).step, flips(model))


class Checkpointed(Block):
    def forward(self, x: Tensor) -> Any:
        return checkpoint(super().forward, x, use_reentrant=False)


@desynced(ONE, ranks=3, batches=BATCHES)
def activation_checkpoints() -> Training:
    torch.manual_seed(0)
    model = Tower()
    for index in range(3):
        model.blocks[index] = Checkpointed()
    return following(ddp(model), before=flips(model))


@desynced(Truth(("one-rank",), (1,), AT, ("blocks.0.down.weight",), 1), ranks=3, batches=BATCHES)
def a_frozen_parameter() -> Training:
    model = net()
    model.blocks[0].requires_grad_(False)
    return following(ddp(model), before=flips(model, "blocks.0.down.weight"))


@desynced(Truth(("one-rank",), (1,), AT, ("blocks.0.down.weight",), 1), ranks=3, batches=BATCHES)
def the_sign_of_a_zero() -> Training:
    """-0 equals 0, and is another bit."""
    model = net()
    model.blocks[0].requires_grad_(False)
    model.get_parameter("blocks.0.down.weight").data[0, 0] = 0.0
    return following(ddp(model), before=flips(model, "blocks.0.down.weight", bit=31))


@desynced(Truth(("one-rank",), (1,), AT, ("0.weight",), 1), ranks=3, batches=BATCHES)
def a_transposed_weight() -> Training:
    """Its memory is not contiguous."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), Tower())
    weight: Any = model[0].weight
    weight.data = weight.data.t()
    return following(ddp(model), before=on(1, AT, lambda: flip(weight.t())))


@desynced(Truth(("one-rank", "unknown"), (0, 1, 2, 3), AT, (WEIGHT,), 1), ranks=4, batches=BATCHES)
def two_of_four_ranks() -> Training:
    """Alike on ranks 2 and 3: there is no majority."""
    model = net()

    def before(number: int) -> None:
        if number == AT and dist.get_rank() >= 2:
            flip(model.get_parameter(WEIGHT))

    return following(ddp(model), before=before)


@desynced(Truth(("one-rank",), (1,), AT, (WEIGHT,), 1, within=56, is_declared=False), ranks=3, batches=120)
def gradients_averaged_by_hand() -> Training:
    """A plain model: that its replicas are equal is learned, so a flip is named once it has lasted."""
    model = net()
    parameters = list(model.parameters())
    return following(model, before=on(1, AT, lambda: flip(parameters[10])), between=lambda _: reduce_gradients(parameters))


@desynced(ONE, ranks=3, batches=BATCHES, every=8)
def every_eighth_batch() -> Training:
    """The watch measures one batch of eight; replicas are compared at each step all the same."""
    model = net()
    return following(ddp(model), before=flips(model))


@desynced(ONE, ranks=3, batches=BATCHES)
def an_evaluation_now_and_then() -> Training:
    """Rank 0 evaluates alone, and with other weights for the time being."""
    model = net()
    root = ddp(model)
    trained = following(root, before=flips(model))

    def step(number: int) -> Any:
        if number % 10 == 9 and dist.get_rank() == 0:
            own = {name: value.clone() for name, value in model.state_dict().items()}
            model.eval()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.9)
                model(torch.randn(2, 8))
                for name, value in model.state_dict().items():
                    value.copy_(own[name])
            model.train()
        return trained.step(number)

    return Training(root, step, trained.before)
