"""Dtypes, loss scales, and how often the watch looks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainings import Training, chain, trained

from .case import healthy


@healthy()
def bfloat16_autocast() -> Training:
    model = chain()

    def loss_of(number: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return torch.as_tensor(model(torch.randn(4, 4)).float().square().mean())

    return trained(model, loss_of)


@healthy()
def pure_bfloat16() -> Training:
    model = chain().bfloat16()
    return trained(model, lambda n: model(torch.randn(4, 4).bfloat16()).float().square().mean())


@healthy()
def pure_float64() -> Training:
    model = chain().double()
    return trained(model, lambda n: model(torch.randn(4, 4).double()).square().mean())


@healthy()
def pure_float16() -> Training:
    model = chain().half()
    return trained(model, lambda n: model(torch.randn(4, 4).half()).float().square().mean() * 8, lr=1e-3)


def scaled(accumulate: int = 1, clip: bool = False) -> Training:
    """float16 autocast; the scale begins at 2**30 and has to find its way down, and is tried upwards every 20 steps."""
    model = chain(nn.Linear(4, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=20)

    def step(number: int) -> float:
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.mse_loss(model(torch.randn(4, 4)).float(), torch.randn(4, 4)) / accumulate
        scaler.scale(loss).backward()
        if (number + 1) % accumulate:
            return float(loss)
        if clip:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return float(loss)

    return Training(model, step)


@healthy()
def a_scaler() -> Training:
    return scaled()


@healthy(gradients=True)
def a_scaler_with_gradients() -> Training:
    return scaled()


@healthy()
def a_scaler_with_clipping() -> Training:
    return scaled(clip=True)


@healthy(gradients=True)
def a_scaler_with_accumulation() -> Training:
    return scaled(accumulate=4)


@healthy()
def a_loss_in_float16_under_a_scaler() -> Training:
    """The scaled loss itself is inf, until the scale has shrunk: the scaler's business."""
    model = chain().half()
    masters = [p.detach().clone().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=50)

    def step(number: int) -> float:
        loss = model(torch.randn(4, 4).half()).square().mean()
        scaler.scale(loss).backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float(), None
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
        return float(loss)

    return Training(model, step)


@healthy()
def a_scale_of_the_users_own() -> Training:
    """The loss is multiplied by hand, and the gradients divided."""
    model = chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(number: int) -> float:
        loss = model(torch.randn(4, 4)).square().mean()
        (loss * 65536.0).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= 65536.0
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return Training(model, step)


def plain() -> Training:
    model = chain(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 4))
    return trained(model, lambda n: model(torch.randn(8, 4)).square().mean())


@healthy(every=4)
def every_fourth_batch() -> Training:
    return plain()


@healthy(check="batch")
def read_once_a_batch() -> Training:
    return plain()


@healthy(check="async")
def read_later() -> Training:
    return plain()


@healthy(gradients=True)
def with_gradients() -> Training:
    return plain()


@healthy(gradients=True, check="async", every=4)
def with_everything() -> Training:
    return plain()


@healthy(policy="strict")
def under_the_strict_policy() -> Training:
    return plain()


@healthy()
def underflow_that_stays() -> Training:
    """Activations of 1e-30 are small, not wrong."""
    model = chain(nn.Linear(4, 8), nn.Softmax(-1), nn.Linear(8, 4))
    return trained(model, lambda n: model(torch.randn(4, 4) * 30).square().mean())
