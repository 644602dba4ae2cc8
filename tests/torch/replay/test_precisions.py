"""A replay in another precision gives what the model gives if it is cast by hand, or trained under autocast to that dtype."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from capsules import opened, trial_of
from rankwatch.replay.trial import CPU
from rankwatch.shared.types.frame import State
from trainings.parts import Root

DTYPES = torch.float16, torch.bfloat16, torch.float32, torch.float64


def scaled(self: Root, x: Tensor) -> Any:
    return self.last(self.first(x) * 300.0)


def normed(self: Root, x: Tensor) -> Any:
    return self.norm(self.first(x) * 1e30).mean(-1, keepdim=True) * self.first(x) ** 2


def attending(self: Root, x: Tensor) -> Any:
    some = self.first(x) * 500.0
    return nn.functional.scaled_dot_product_attention(some, some, some) * some


def powers(self: Root, x: Tensor) -> Any:
    return self.first(x).exp() - self.first(x).pow(3)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: Root(scaled, first=nn.Linear(8, 8), last=nn.Linear(8, 4)), (4, 8)),
    "convolution": (lambda: Root(scaled, first=nn.Conv2d(2, 4, 3), last=nn.Conv2d(4, 2, 1)), (2, 2, 6, 6)),
    "turned convolution": (
        lambda: Root(scaled, first=nn.ConvTranspose1d(2, 4, 3), last=nn.Conv1d(4, 2, 1, bias=False)),
        (2, 2, 6),
    ),
    "norm": (lambda: Root(normed, first=nn.Linear(8, 8), norm=nn.LayerNorm(8)), (4, 8)),
    "attention": (lambda: Root(attending, first=nn.Linear(8, 8)), (1, 2, 4, 8)),
    "powers": (lambda: Root(powers, first=nn.Linear(8, 8, bias=False)), (4, 8)),
}
TRAINED = {
    "float32": (torch.float32, None),
    "float16": (torch.float16, None),
    "bfloat16": (torch.bfloat16, None),
    "autocast to float16": (torch.float32, torch.float16),
    "autocast to bfloat16": (torch.float32, torch.bfloat16),
    "bfloat16 under autocast": (torch.bfloat16, torch.bfloat16),
}


@pytest.mark.parametrize("trained", TRAINED)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("size", [1.0, 60.0])
def test_each_precision(name: str, trained: str, size: float, tmp_path: Path) -> None:
    (make, shape), (own, cast) = MODELS[name], TRAINED[trained]
    torch.manual_seed(0)
    module, x = make().to(own), (torch.randn(shape) * size).to(own)

    def by_hand(dtype: torch.dtype) -> Tensor:
        """Autocast takes the trial's dtype if that is one of 16 bits; else it is off. What it casts need not be cast before."""
        is_short = dtype.itemsize == 2
        around = torch.autocast("cpu", dtype) if cast is not None and is_short else nullcontext()
        kept = own if cast is not None and is_short and own.itemsize > 2 else dtype
        with torch.no_grad(), around:
            made: Tensor = copy.deepcopy(module).to(kept)(x.to(kept))
        return made

    with torch.no_grad(), torch.autocast("cpu", cast) if cast is not None else nullcontext():
        capsule = opened(tmp_path, module, x, output=module(x))
        trial = trial_of(capsule)
    for dtype in DTYPES:
        found, made = trial.run(CPU, dtype=dtype), by_hand(dtype)
        assert not found.error, (dtype, found.error)
        finite = made.isfinite().all().item()
        assert found.is_bad is not finite, (dtype, found, made.abs().max())
        if finite:
            assert found.abs_max == pytest.approx(
                made.double().abs().max().item(), rel=0.02 if dtype.itemsize == 2 else 1e-4
            )
    as_trained = trial.run(CPU)
    assert as_trained.state is not State.NONE
    assert trial.is_as_trained(as_trained)
