"""What trainings are made of: modules, the usual loop, and the commonest ways to go wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .case import Training, nothing

BAD = 5
"""The batch in which most of the hostile trainings go wrong."""

NAN, INF = float("nan"), float("inf")

# --- modules -----------------------------------------------------------------------------------------------------------


class Root(nn.Module):
    """A module whose forward is a function of itself and of what it is fed."""

    def __init__(self, call: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.call = call
        for name, part in parts.items():
            setattr(self, name, part)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(self, *args, **kwargs)


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x


class Gain(nn.Module):
    """A function of its input and of a number, which a training may change."""

    def __init__(self, call: Callable[[Tensor, Any], Any], gain: Any = 1.0) -> None:
        super().__init__()
        self.call, self.gain = call, gain

    def forward(self, x: Tensor) -> Any:
        return self.call(x, self.gain)


class Scaled(nn.Module):
    """Multiplies twice by a number, which a training may change: 1e30 is finite, and its square is not."""

    def __init__(self, gain: float = 1.0) -> None:
        super().__init__()
        self.gain = gain

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain * self.gain


class Poisoned(torch.autograd.Function):
    """The identity, whose backward multiplies the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: float) -> Tensor:
        ctx.gain = gain
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.gain, None


def multiplied(x: Any, gain: float) -> Any:
    """The same, whose gradient is multiplied."""
    return Poisoned.apply(x, gain)  # type: ignore[no-untyped-call]


class Through(nn.Module):
    """Passes its input on; the gradient is multiplied by a number, which a training may change."""

    def __init__(self, gain: float = 1.0) -> None:
        super().__init__()
        self.gain = gain

    def forward(self, x: Tensor) -> Any:
        return multiplied(x, self.gain)


class Checkpointed(nn.Sequential):
    """Its forward runs again in the backward."""

    def forward(self, x: Tensor) -> Any:
        return checkpoint(super().forward, x, use_reentrant=False)


class Coder(nn.Module):
    """Its parts are called, by a method; itself never."""

    def __init__(self, between: type[nn.Module] = nn.Tanh) -> None:
        super().__init__()
        self.encoder, self.decoder = middle(between(), 4), middle(between(), 4)

    def coded(self, x: Tensor) -> Any:
        return self.decoder(self.encoder(x))


class Pair(nn.Module):
    """A generator and a discriminator; neither this container nor the pair is ever called as a whole."""

    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.generator, self.discriminator = chain(), middle(between, 1)


def chain(*modules: nn.Module) -> Any:
    """Modules one after another; typed as anything, since their attributes are those of many classes."""
    return nn.Sequential(*(modules or (nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))))


def middle(module: nn.Module, width: int = 4) -> Any:
    return chain(nn.Linear(4, 8), module, nn.Linear(8, width))


def headed(call: Callable[..., Any], **parts: Any) -> Root:
    """A root with some parts and a head, which is made last."""
    return Root(call, **parts, head=nn.Linear(4, 4))


# --- the usual loop ----------------------------------------------------------------------------------------------------


def squared(model: Callable[..., Any], *sizes: int) -> Callable[[int], Any]:
    """The loss of noise."""
    return lambda number: model(torch.randn(sizes or (4, 4))).square().mean()


def trained(
    model: Any,
    loss_of: Callable[[int], Any] | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: torch.amp.GradScaler | None = None,
    before: Callable[[int], object] = nothing,
    between: Callable[[int], object] = nothing,
    after: Callable[[int], object] = nothing,
    lr: float = 0.01,
    accumulate: int = 1,
) -> Training:
    """Plain SGD on the loss of noise, unless it is said otherwise.

    ``before`` and ``after`` are called around each batch, ``between`` ahead of the optimizer's step.
    """
    optimizer = optimizer or torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)
    loss_of = loss_of or squared(model)

    def step(number: int) -> float:
        loss = loss_of(number)
        (scaler.scale(loss / accumulate) if scaler else loss / accumulate).backward()
        if (number + 1) % accumulate == 0:
            between(number)
            if scaler:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            optimizer.zero_grad()
        after(number)
        return float(loss.item())

    return Training(model, step, before)


def evaluated(model: nn.Module, times: int) -> None:
    with torch.no_grad():
        for _ in range(times):
            model(torch.randn(4, 4))


# --- the commonest ways to go wrong ------------------------------------------------------------------------------------


def put(tensor: Any, value: float, *where: int) -> Any:
    """Writes one element, outside of autograd."""
    with torch.no_grad():
        tensor[where or (0,) * tensor.dim()] = value
    return tensor


def fed(model: Any, spoil: Callable[[Tensor], object], at: int = BAD, width: int = 4) -> Training:
    """A training whose input is spoiled in one batch."""

    def loss_of(number: int) -> Any:
        x = torch.randn(4, width)
        if number == at:
            spoil(x)
        return model(x).square().mean()

    return trained(model, loss_of)


def spoiled(
    model: Any,
    spoil: Callable[[], object],
    loss_of: Callable[[int], Any] | None = None,
    *,
    at: int = BAD,
    sizes: tuple[int, ...] = (4, 4),
    **options: Any,
) -> Training:
    """A training in which something happens before one batch."""
    return trained(
        model,
        loss_of or squared(model, *sizes),
        before=lambda number: spoil() if number == at else None,
        **options,
    )


def turned(part: Any, gain: Any, model: Any, loss_of: Callable[[int], Any] | None = None, **options: Any) -> Training:
    """A training in which the gain of a part becomes another one before one batch."""
    return spoiled(model, lambda: setattr(part, "gain", gain), loss_of, **options)


def gained(call: Callable[[Tensor, Any], Any], gain: Any, model_of: Callable[[Any], Any] = middle) -> Training:
    """A training of a model with such a part, whose gain becomes another one before one batch."""
    part = Gain(call)
    return turned(part, gain, model_of(part))


def overflowing(model_of: Callable[[Any], Any] = middle, gain: float = 1e30) -> Training:
    """A training of a model with a part that overflows in one batch."""
    part = Scaled()
    return turned(part, gain, model_of(part))


def labels(is_ignored: bool) -> Tensor:
    """Classes of four samples. Cross entropy over nothing is 0/0, and its gradient is 0: no weight ever turns bad."""
    return torch.full((4,), -100) if is_ignored else torch.randint(4, (4,))


def classified(model: Any, at: int = BAD, width: int = 4) -> Callable[[int], Tensor]:
    """The loss of a classifier, all of whose labels are ignored in one batch."""

    def loss_of(number: int) -> Tensor:
        known = labels(number == at)
        return nn.functional.cross_entropy(model(torch.randn(4, width)), known)

    return loss_of


def averaged(model: Any, at: int = BAD, width: int = 4) -> Callable[[int], Tensor]:
    """The same with a mean made by hand, whose gradient is nan where all labels are ignored."""

    def loss_of(number: int) -> Tensor:
        return mean_of_kept(model(torch.randn(4, width)), labels(number == at))

    return loss_of


def mean_of_kept(logits: Tensor, known: Tensor) -> Tensor:
    """A cross entropy made by hand."""
    keep = known >= 0
    chosen = logits.log_softmax(-1).gather(-1, known.clamp(min=0)[:, None])
    return -(chosen[:, 0] * keep).sum() / keep.sum()


def kinked(out: Any, is_bad: bool) -> Any:
    """A loss that is finite; its gradient is 0 * inf where it ``is_bad``."""
    return out.square().mean() + ((out * 0).square().sum().sqrt() if is_bad else 0.0)
