"""What is not trained runs before the model, or beside it: a VAE, an encoder, a teacher. It is no part of the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from notebook import OUTSIDE
from trainings.case import Training
from trainings.parts import BAD, NAN, put, trained
from trainings.truths import healthy, hostile

INPUTS = [torch.rand(4, 4, generator=torch.Generator().manual_seed(number)) for number in range(32)]
"""They live on, as what a loop has in a variable does until the next batch."""


class Frozen(nn.Module):
    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.call = forward
        nn.init.eye_(self.body.weight)
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        return self.call(self.body, x)


def before(
    name: str, module: nn.Module, *, narrow: bool = False, spoil: Callable[[int, Tensor], object] | None = None
) -> Training:
    """``module`` makes what the model is given."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    OUTSIDE.watch(module, name)

    def loss(number: int) -> Any:
        x = INPUTS[number]
        if spoil is not None:
            x = x.clone()
            spoil(number, x)
        with torch.autocast("cpu", torch.float16, enabled=narrow):
            made = module(x)
        return model(made.float() * 0.5 + 1.0).square().mean()

    return trained(model, loss)


def larger(number: int, x: Tensor) -> None:
    if number == BAD:
        x.mul_(1e4)


def masking() -> Frozen:
    encoder = Frozen(lambda body, x: (body(x), torch.full((4, 4), -torch.inf)))
    OUTSIDE.watch(encoder, "encoder")
    return encoder


@hostile("0", "upstream", says=("vae (Frozen), which is not trained", "aten.mul of ", "float16 ends at"))
def a_vae_that_overflows_under_autocast() -> Training:
    return before("vae", Frozen(lambda body, x: body(x) * body(x)), narrow=True, spoil=larger)


@hostile("0", "upstream", says="text (Frozen), which is not trained and ran before, returned nan")
def an_encoder_that_divides_by_its_norm() -> Training:
    return before("text", Frozen(lambda body, x: x / x.norm()), spoil=lambda number, x: x.zero_() if number == BAD else None)


@hostile("0", "data", says="input[0] of text (Frozen), which is not trained and ran before, was nan")
def an_encoder_that_is_given_bad_data() -> Training:
    return before(
        "text", Frozen(lambda body, x: body(x)), spoil=lambda number, x: put(x, NAN, 1, 1) if number == BAD else None
    )


@hostile("0", "data", says="input[0] of the root module was nan before any module ran")
def an_encoder_that_always_returns_a_mask_too() -> Training:
    """It is finite but for its mask, in good batches as well; the nan comes from the loader."""
    root, encoder = nn.Sequential(nn.Linear(4, 2)), masking()
    return trained(root, lambda number: root(encoder(INPUTS[number])[0] + (NAN if number == BAD else 0.0)).square().mean())


@hostile("", "upstream", label="loss", says="teacher (Frozen), which is not trained and ran before, returned nan")
def a_teacher_whose_logits_are_nan() -> Training:
    model, teacher = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), Frozen(lambda body, x: x.sqrt())
    OUTSIDE.watch(teacher, "teacher")

    def loss(number: int) -> Any:
        x = INPUTS[number]
        wanted = teacher(-x if number == BAD else x)
        return (model(x) - wanted).square().mean()

    return trained(model, loss)


@healthy()
def an_encoder_with_a_mask() -> Training:
    root, encoder = nn.Sequential(nn.Linear(4, 2)), masking()

    def loss(number: int) -> Any:
        made, mask = encoder(INPUTS[number % len(INPUTS)])
        return root((made + mask).softmax(-1).nan_to_num() + made).square().mean()

    return trained(root, loss)
