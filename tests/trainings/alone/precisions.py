"""Healthy: dtypes, loss scales, and how often the watch looks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trainings.case import Training
from trainings.parts import chain, squared, trained
from trainings.truths import LONG, healthy


def pure(dtype: torch.dtype, factor: float = 1.0, lr: float = 0.01) -> Training:
    model = chain().to(dtype)
    return trained(model, lambda n: model(torch.randn(4, 4).to(dtype)).float().square().mean() * factor, lr=lr)


@healthy()
def bfloat16_autocast() -> Training:
    model = chain()

    def loss_of(number: int) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return model(torch.randn(4, 4)).float().square().mean()

    return trained(model, loss_of)


healthy().each(
    pure_bfloat16=lambda: pure(torch.bfloat16),
    pure_float16=lambda: pure(torch.float16, 8, lr=1e-3),
)


@healthy()
def pure_float64() -> Training:
    model = chain().double()
    return trained(model, lambda n: model(torch.randn(4, 4).double()).square().mean())


def scaled(accumulate: int = 1, clip: bool = False) -> Training:
    """float16 autocast; the scale begins at 2**30 and has to find its way down, and is tried upwards every 20 steps."""
    model = chain(nn.Linear(4, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=20)

    def loss_of(number: int) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            return nn.functional.mse_loss(model(torch.randn(4, 4)).float(), torch.randn(4, 4))

    def between(number: int) -> None:
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    return trained(model, loss_of, optimizer=optimizer, scaler=scaler, between=between, accumulate=accumulate)


healthy(batches=LONG).each(a_scaler=scaled, a_scaler_with_clipping=lambda: scaled(clip=True))
healthy(batches=LONG, gradients=True).each(
    a_scaler_with_gradients=scaled,
    a_scaler_with_accumulation=lambda: scaled(accumulate=4),
)


@healthy(batches=LONG)
def a_loss_in_float16_under_a_scaler() -> Training:
    """The scaled loss itself is inf, until the scale has shrunk: the scaler's business."""
    model = chain().half()
    masters = [p.detach().clone().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=50)

    def between(number: int) -> None:
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None

    def after(number: int) -> None:
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)

    return trained(
        model,
        lambda n: model(torch.randn(4, 4).half()).square().mean(),
        optimizer=optimizer,
        scaler=scaler,
        between=between,
        after=after,
    )


@healthy()
def a_scale_of_the_users_own() -> Training:
    """The loss is multiplied by hand, and the gradients divided."""
    model = chain()

    def between(number: int) -> None:
        for parameter in model.parameters():
            parameter.grad /= 65536.0

    return trained(model, lambda n: model(torch.randn(4, 4)).square().mean() * 65536.0, between=between)


def plain() -> Training:
    model = chain(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 4))
    return trained(model, squared(model, 8, 4))


healthy(every=4).each(every_fourth_batch=plain)
healthy(check="batch").each(read_once_a_batch=plain)
healthy(check="async").each(read_later=plain)
healthy(gradients=True).each(with_gradients=plain)
healthy(gradients=True, check="async", every=4).each(with_everything=plain)
healthy(policy="strict").each(under_the_strict_policy=plain)


@healthy()
def underflow_that_stays() -> Training:
    """Activations of 1e-30 are small, not wrong."""
    model = chain(nn.Linear(4, 8), nn.Softmax(-1), nn.Linear(8, 4))
    return trained(model, lambda n: model(torch.randn(4, 4) * 30).square().mean())
