"""The lowest bit of one weight flips on rank 1, in many ways of training: each must name it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .case import Block, Data, Faulty, Net, Truth, average_gradients, ddp, desynced, flip, net, sgd, taught

WEIGHT = "blocks.1.up.weight"
AT = 40
ONE = Truth(("one-rank",), (1,), AT, (WEIGHT,), 1)
BATCHES = 70


def flips(parameter: Callable[[], Tensor], rank: int, *, at: int = AT, bit: int = 0) -> Callable[[int], None]:
    def before(number: int) -> None:
        if number == at and rank == 1:
            flip(parameter(), bit)

    return before


@desynced(ONE, ranks=3, batches=4 * BATCHES)
def accumulation(rank: int) -> Faulty:
    """One step of four batches, three of them under ``no_sync``."""
    root, data = ddp(net()), Data(rank)
    optimizer, weight = sgd(root), root.module.get_parameter(WEIGHT)

    def step(number: int) -> Tensor:
        x, y = data.batch()
        with nullcontext() if number % 4 == 3 else root.no_sync():
            loss = nn.functional.mse_loss(root(x), y)
            (loss / 4).backward()
        if number % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return Faulty(root, step, flips(lambda: weight, rank, at=4 * AT))


@desynced(ONE, ranks=3, batches=BATCHES)
def a_step_in_the_backward(rank: int) -> Faulty:
    """Each parameter has an optimizer of its own, which steps as soon as its gradient is there."""
    model = net()
    root, data = ddp(model), Data(rank)
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.02) for parameter in model.parameters()}

    def update(parameter: Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    waiting: list[Tensor] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(waiting.append)

    def step(number: int) -> Tensor:
        x, y = data.batch()
        loss = nn.functional.mse_loss(root(x), y)
        loss.backward()
        while waiting:  # DDP writes what it has reduced at the end of the backward
            update(waiting.pop())
        return loss.detach()

    return Faulty(root, step, flips(lambda: model.get_parameter(WEIGHT), rank))


@desynced(ONE, ranks=3, batches=BATCHES)
def half_precision_with_a_scaler(rank: int) -> Faulty:
    root, data = ddp(net()), Data(rank)
    optimizer, scaler = sgd(root), torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=20)

    def step(number: int) -> Tensor:
        x, y = data.batch()
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.mse_loss(root(x).float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    return Faulty(root, step, flips(lambda: root.module.get_parameter(WEIGHT), rank))


@desynced(ONE, ranks=3, batches=BATCHES)
def a_compiled_model(rank: int) -> Faulty:
    model = net()
    compiled: Any = torch.compile(ddp(model), backend="eager")
    return taught(compiled, Data(rank), before=flips(lambda: model.get_parameter(WEIGHT), rank))


@desynced(ONE, ranks=3, batches=BATCHES)
def a_static_graph_of_bucket_views(rank: int) -> Faulty:
    model = net()
    root = ddp(model, static_graph=True, gradient_as_bucket_view=True)
    return taught(root, Data(rank), before=flips(lambda: model.get_parameter(WEIGHT), rank))


@desynced(ONE, ranks=3, batches=BATCHES)
def watched_before_it_is_wrapped(rank: int) -> Faulty:
    """The watch is given the model that DDP wraps."""
    model = net()
    root = ddp(model)
    return Faulty(model, taught(root, Data(rank)).step, flips(lambda: model.get_parameter(WEIGHT), rank))


class Checkpointed(Block):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return out


@desynced(ONE, ranks=3, batches=BATCHES)
def activation_checkpoints(rank: int) -> Faulty:
    torch.manual_seed(0)
    model = Net()
    for index in range(3):
        model.blocks[index] = Checkpointed()
    return taught(ddp(model), Data(rank), before=flips(lambda: model.get_parameter(WEIGHT), rank))


@desynced(Truth(("one-rank",), (1,), AT, ("blocks.0.down.weight",), 1), ranks=3, batches=BATCHES)
def a_frozen_parameter(rank: int) -> Faulty:
    model = net()
    model.blocks[0].requires_grad_(False)
    return taught(ddp(model), Data(rank), before=flips(lambda: model.get_parameter("blocks.0.down.weight"), rank))


@desynced(Truth(("one-rank",), (1,), AT, ("blocks.0.down.weight",), 1), ranks=3, batches=BATCHES)
def the_sign_of_a_zero(rank: int) -> Faulty:
    """-0 equals 0, and is another bit."""
    model = net()
    model.blocks[0].requires_grad_(False)
    weight = model.get_parameter("blocks.0.down.weight")
    weight.data[0, 0] = 0.0
    return taught(ddp(model), Data(rank), before=flips(lambda: weight, rank, bit=31))


@desynced(Truth(("one-rank",), (1,), AT, ("0.weight",), 1), ranks=3, batches=BATCHES)
def a_transposed_weight(rank: int) -> Faulty:
    """Its memory is not contiguous."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), Net())
    weight: Any = model[0].weight
    weight.data = weight.data.t()
    return taught(ddp(model), Data(rank), before=flips(lambda: weight.t(), rank))


@desynced(Truth(("one-rank", "unknown"), (0, 1, 2, 3), AT, (WEIGHT,), 1), ranks=4, batches=BATCHES)
def two_of_four_ranks(rank: int) -> Faulty:
    """Alike on ranks 2 and 3: there is no majority."""
    model = net()

    def before(number: int) -> None:
        if number == AT and rank >= 2:
            flip(model.get_parameter(WEIGHT))

    return taught(ddp(model), Data(rank), before=before)


@desynced(Truth(("one-rank",), (1,), AT, (WEIGHT,), 1, within=56, is_declared=False), ranks=3, batches=120)
def gradients_averaged_by_hand(rank: int) -> Faulty:
    """A plain model: that its replicas are equal is learned, so a flip is named once it has lasted."""
    model = net()
    parameters = list(model.parameters())
    return taught(
        model, Data(rank), before=flips(lambda: parameters[10], rank), between=lambda _: average_gradients(parameters)
    )


@desynced(ONE, ranks=3, batches=BATCHES, every=8)
def every_eighth_batch(rank: int) -> Faulty:
    """The watch measures one batch of eight; replicas are compared at each step all the same."""
    model = net()
    return taught(ddp(model), Data(rank), before=flips(lambda: model.get_parameter(WEIGHT), rank))


@desynced(ONE, ranks=3, batches=BATCHES)
def an_evaluation_now_and_then(rank: int) -> Faulty:
    """Rank 0 evaluates alone, and with other weights for the time being."""
    model = net()
    root = ddp(model)
    trained = taught(root, Data(rank), before=flips(lambda: model.get_parameter(WEIGHT), rank))

    def step(number: int) -> Tensor:
        if number % 10 == 9 and rank == 0:
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

    return Faulty(root, step, trained.before)
