"""A gradient is the first bad number. ``gradients=True``, unless a test says otherwise."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainings import Root, Training, chain, trained

from .case import BAD, INF, NAN, hostile, put, spoiled

GRADIENT: dict[str, Any] = {"cause": "gradient", "gradients": True}


class Poisoned(torch.autograd.Function):
    """Passes its input on; in one backward the gradient is multiplied."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: float) -> Tensor:
        ctx.gain = gain
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.gain, None


class Through(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Poisoned.apply(x, self.gain)  # type: ignore[no-untyped-call]
        return out


@hostile(module="1", **GRADIENT)
def a_function_of_the_user() -> Training:
    through = Through()
    model = chain(nn.Linear(4, 8), through, nn.Linear(8, 4))
    return spoiled(model, lambda: setattr(through, "gain", NAN))


@hostile(module="1", **GRADIENT, state="inf")
def a_gradient_overflows() -> Training:
    through = Through()
    model = chain(nn.Linear(4, 8), through, nn.Linear(8, 4))
    return spoiled(model, lambda: setattr(through, "gain", 1e300))


class Root0(nn.Module):
    """The square root of something that is 0 in one batch: a forward of 0, a gradient of inf."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return (x.square() * self.gain).sqrt()


@hostile(module="1", **GRADIENT, state=("nan", "inf"))
def a_root_at_zero() -> Training:
    root = Root0()
    return spoiled(chain(nn.Linear(4, 8), root, nn.Linear(8, 4)), lambda: setattr(root, "gain", 0.0))


class Where(nn.Module):
    """torch.where hides the bad branch in the forward, not in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = 10.0

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.shift
        return torch.where(y > 0, y.sqrt(), torch.zeros_like(y))


@hostile(module="1", **GRADIENT, state=("nan", "inf"))
def a_branch_that_is_not_taken() -> Training:
    where = Where()
    return spoiled(chain(nn.Linear(4, 8), where, nn.Linear(8, 4)), lambda: setattr(where, "shift", -10.0))


@hostile(module="norm", **GRADIENT, state=("nan", "inf"))
def the_norm_of_a_zero_vector() -> Training:
    class Unit(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / (x.square().sum(-1, keepdim=True).sqrt() + 1e-6)

    model = Root(
        lambda root, x: root.head(root.norm(root.first(x))),
        first=nn.Linear(4, 4, bias=False),
        norm=Unit(),
        head=nn.Linear(4, 4),
    )

    def loss_of(number: int) -> Tensor:
        loss: Tensor = model(torch.randn(4, 4) * float(number != BAD)).square().mean()
        return loss

    return trained(model, loss_of)


@hostile(module=("", "2"), **GRADIENT)
def a_gradient_that_is_handed_to_backward() -> Training:
    model = chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(number: int) -> None:
        model(torch.randn(4, 4)).backward(torch.full((4, 4), NAN if number == BAD else 0.1))
        optimizer.step()
        optimizer.zero_grad()

    return Training(model, step)


@hostile(module=("", "2"), **GRADIENT)
def a_finite_loss_with_a_bad_gradient() -> Training:
    """0 * sqrt(0)."""
    model = chain()

    def loss_of(number: int) -> Any:
        out = model(torch.randn(4, 4))
        return out.square().mean() + ((out * 0).square().sum().sqrt() if number == BAD else 0.0)

    return trained(model, loss_of)


@hostile(module="0", **GRADIENT, label="")
def a_hook_on_a_parameter() -> Training:
    """A parameter's hook, not a module, makes it bad."""
    now, model = [1.0], chain()
    model[0].weight.register_hook(lambda gradient: gradient * now[0])
    return spoiled(model, lambda: now.__setitem__(0, NAN))


@hostile(module="1", **GRADIENT)
def a_gradient_under_checkpointing() -> Training:
    through = Through()

    class Whole(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = checkpoint(super().forward, x, use_reentrant=False)
            return out

    return spoiled(Whole(nn.Linear(4, 8), through, nn.Linear(8, 4)), lambda: setattr(through, "gain", NAN))


@hostile(module="1", **GRADIENT)
def in_a_micro_batch() -> Training:
    through = Through()
    model = chain(nn.Linear(4, 8), through, nn.Linear(8, 4))
    return trained(
        model,
        lambda n: model(torch.randn(4, 4)).square().mean(),
        before=lambda n: setattr(through, "gain", NAN if n == BAD else 1.0),
        accumulate=4,
    )


@hostile(module=("2", ""), **GRADIENT, state=("inf", "nan"), batch=range(14, 17), says="batch 5", batches=40)
def no_scale_helps() -> Training:
    """The gradient is inf from batch 5 on, whatever the scale."""
    model = chain()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), torch.amp.GradScaler("cpu", init_scale=2.0**16)

    def step(number: int) -> None:
        out = model(torch.randn(4, 4))
        loss = out.square().mean() + ((out * 0).square().sum().sqrt() if number >= BAD else 0.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return Training(model, step)


@hostile(module="0", **GRADIENT, state=("inf", "nan"))
def clipping_spreads_it() -> Training:
    """clip_grad_norm_ with a norm of inf turns one inf to nan. The first is the gradient."""
    now, model = [1.0], chain()
    model[0].weight.register_hook(lambda gradient: gradient * now[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(number: int) -> None:
        now[0] = INF if number == BAD else 1.0
        model(torch.randn(4, 4)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return Training(model, step)


@hostile(module="1", **GRADIENT)
def in_the_second_of_two_models() -> Training:
    """Two optimizers; the bad gradient is in the first part's backward."""
    through = Through()
    model = chain(nn.Linear(4, 8), through, nn.Linear(8, 4))
    optimizers = [torch.optim.SGD(model[index].parameters(), lr=0.01) for index in (0, 2)]

    def step(number: int) -> None:
        through.gain = NAN if number == BAD else 1.0
        model(torch.randn(4, 4)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return Training(model, step)


@hostile(module=("2", ""), **GRADIENT, state=("nan", "inf"))
def a_hook_on_the_output() -> Training:
    """It makes the gradient bad that the loss gives."""
    model = chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(number: int) -> None:
        out = model(torch.randn(4, 4))
        if number == BAD:
            out.register_hook(lambda gradient: gradient * NAN)
        out.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return Training(model, step)


@hostile(module="1", cause="gradient", says="PoisonedBackward")
def a_gradient_without_gradients() -> Training:
    """In the default mode the step is not taken, and the batch is run again."""
    through = Through()
    model = chain(nn.Linear(4, 8), through, nn.Linear(8, 4))
    return spoiled(model, lambda: setattr(through, "gain", NAN))


@hostile(module="0", cause="weight", batch=BAD + 1, says=f"batch {BAD}", guard=False)
def a_gradient_without_the_guard() -> Training:
    """The weight says when: finite in batch 5, bad in 6."""
    through = Through()
    model = chain(nn.Linear(4, 8), through, nn.Linear(8, 4))
    return spoiled(model, lambda: setattr(through, "gain", NAN))


@hostile(module="0", cause="weight", batch=BAD + 1, says=f"batch {BAD}")
def an_optimizer_that_writes_nan() -> Training:
    model = chain()
    training = trained(model, lambda n: model(torch.randn(4, 4)).square().mean())

    def step(number: int) -> None:
        training.step(number)
        if number == BAD:
            put(model[0].weight, NAN, 1, 1)

    return Training(model, step)
