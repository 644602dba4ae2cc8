"""A gradient is the first bad number. ``gradients=True``, unless a training says otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from models import Calls
from notebook import take_step
from trainings.case import Training
from trainings.parts import (
    BAD,
    INF,
    NAN,
    Checkpointed,
    Coder,
    Root,
    Through,
    chain,
    gained,
    headed,
    kinked,
    middle,
    multiplied,
    put,
    squared,
    trained,
    turned,
)
from trainings.truths import BATCHES, hostile

BORN_IN_1 = hostile("1", "gradient", gradients=True)


def through(gain: float = NAN, model_of: Callable[[Any], Any] = middle, **options: Any) -> Training:
    """The gradient turns bad on its way through a part, in the backward of one batch."""
    part = Through()
    return turned(part, gain, model_of(part), **options)


BORN_IN_1.each(
    a_function_of_the_user=through,
    a_gradient_under_checkpointing=lambda: through(
        model_of=lambda part: Checkpointed(nn.Linear(4, 8), part, nn.Linear(8, 4))
    ),
)
hostile("1", "gradient", "inf", gradients=True).each(a_gradient_overflows=lambda: through(1e300))
hostile("1", "gradient", batch=BATCHES - 1, gradients=True).each(
    a_gradient_of_the_last_batch=lambda: through(at=BATCHES - 1)
)
# In the default mode the step is not taken, and the batch is run again.
hostile("1", "gradient", says="PoisonedBackward").each(a_gradient_without_gradients=through)
# The weight says when: finite in batch 5, bad in 6.
hostile("0", "weight", batch=BAD + 1, says=f"batch {BAD}", guard=False).each(a_gradient_without_the_guard=through)


def hidden_root(x: Tensor, gain: float) -> Tensor:
    """torch.where hides the bad branch in the forward, not in the backward."""
    y = x + gain * 10.0
    return torch.where(y > 0, y.sqrt(), torch.zeros_like(y))


hostile("1", "gradient", ("nan", "inf"), gradients=True).each(
    a_root_at_zero=lambda: gained(lambda x, gain: (x.square() * gain).sqrt(), 0.0),
    a_branch_that_is_not_taken=lambda: gained(hidden_root, -1.0),
)


@hostile("norm", "gradient", ("nan", "inf"), gradients=True)
def the_norm_of_a_zero_vector() -> Training:
    norm = Calls(lambda x: x / (x.square().sum(-1, keepdim=True).sqrt() + 1e-6))
    model = headed(lambda root, x: root.head(root.norm(root.first(x))), first=nn.Linear(4, 4, bias=False), norm=norm)
    return trained(model, lambda n: model(torch.randn(4, 4) * float(n != BAD)).square().mean())


@hostile(("first", "second"), "gradient", gradients=True, never="born in the backward of this module")
def a_second_use_of_an_input() -> Training:
    """What `second` is fed is also used by the root's own code, whose gradient is nan."""

    def forward(root: Root, x: Tensor) -> Tensor:
        y = root.first(x)
        extra = (y * 0).square().sum().sqrt() if root.gain else 0.0
        return torch.as_tensor(root.second(y) + extra)

    model = Root(forward, first=nn.Linear(4, 4), second=nn.Linear(4, 4), gain=0.0)
    return turned(model, 1.0, model)


class Whitening(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(x @ torch.linalg.eigh(x.T @ x)[1])


@hostile("1", "gradient", ("nan", "inf"), says="two eigenvalues or singular values are equal", never="add an epsilon")
def directions_of_equal_variance() -> Training:
    first = nn.Linear(4, 4, bias=False)
    nn.init.eye_(first.weight)
    model = chain(first, Whitening(), nn.Linear(4, 4))
    return trained(model, lambda n: model(torch.eye(4) if n == BAD else torch.randn(4, 4)).square().sum(), lr=0.0)


# --- the gradient of the loss ------------------------------------------------------------------------------------------


def with_a_kink(accumulate: int = 1, lr: float = 0.01) -> Training:
    """The loss is 0 + sqrt(0): finite, and its gradient is not. The step is not taken."""
    model = chain()
    return trained(model, lambda n: kinked(model(torch.randn(4, 4)), n == BAD), accumulate=accumulate, lr=lr)


hostile(("", "2"), "gradient", gradients=True).each(a_finite_loss_with_a_bad_gradient=with_a_kink)
hostile("", "gradient", label="grad_output", says="gradient of the loss with respect to").each(
    a_gradient_of_nan=with_a_kink,
    # Batch 5 of 4 to 7 spoils the sum; the step comes after batch 7, and is not taken.
    a_gradient_among_accumulated_ones=lambda: with_a_kink(accumulate=4, lr=0.1),
)


def of_the_loss(loss: Callable[[Any, bool], Any]) -> Training:
    """The loss, a function of the output and of whether the batch is the bad one, is finite in each batch."""
    model = chain()
    return trained(model, lambda n: loss(model(torch.randn(4, 4)), n == BAD))


def likelihood_ratio(out: Any, is_bad: bool) -> Any:
    """PPO: the smaller one of two objectives is taken, and the other one is inf."""
    ratio = (out - out.detach() + (200.0 if is_bad else 0.0)).exp()
    return -torch.min(ratio, ratio.clamp(0.8, 1.2)).mean()


FROM_THE_LOSS: dict[str, Any] = {"label": "grad_output", "never": "look at the loss function and the loss scale"}
hostile("", "gradient", ("nan", "inf"), **FROM_THE_LOSS, says=("in ExpBackward0", "a clamp, min or where hid that")).each(
    a_ratio_behind_a_min=lambda: of_the_loss(likelihood_ratio),
)


def known_targets_alone(out: Any, is_bad: bool) -> Any:
    """A target that is missing is nan: the mean leaves it out, its gradient does not."""
    targets = put(torch.zeros(4, 4), NAN if is_bad else 0.0, 1, 2)
    return ((out - targets) ** 2).nanmean()


GIVEN_NAN: dict[str, Any] = {**FROM_THE_LOSS, "never": "the slope of this power"}
hostile("", "gradient", **GIVEN_NAN, says=("in PowBackward0", "it was given nan, and a nanmean", "0 * nan")).each(
    a_missing_target_behind_a_nanmean=lambda: of_the_loss(known_targets_alone),
)
hostile("", "gradient", ("nan", "inf"), **FROM_THE_LOSS, says=("in LogBackward0", "its slope at 0 is infinite")).each(
    a_log_behind_a_where=lambda: of_the_loss(
        lambda out, is_bad: torch.where(out > 9.0, out, (out.abs() * (not is_bad)).log().clamp(min=-1.0)).mean()
    ),
)
hostile("", "gradient", ("nan", "inf"), **FROM_THE_LOSS, says=("in ReciprocalBackward0", "its slope at 0 is")).each(
    a_division_behind_a_where=lambda: of_the_loss(
        lambda out, is_bad: torch.where(out < 9.0, out, 1.0 / (out * (not is_bad))).mean()
    ),
)
hostile("", "gradient", ("nan", "inf"), **FROM_THE_LOSS, says="in AcosBackward0, the gradient of aten.acos of 1 is").each(
    an_angle_of_0=lambda: of_the_loss(lambda out, is_bad: (out / out.detach() / (1 if is_bad else 2)).acos().mean()),
)
hostile("", "gradient", "nan", **FROM_THE_LOSS, says="in PoisonedBackward").each(
    a_function_of_the_loss=lambda: of_the_loss(lambda out, is_bad: multiplied(out, NAN if is_bad else 1.0).mean()),
)


@hostile("", "gradient", label="grad_output")
def a_sparse_gradient() -> Training:
    """The rows that were read would turn bad in the step of batch 5."""
    model = Root(lambda root, tokens: root.table(tokens), table=nn.Embedding(20, 4, sparse=True))
    return trained(model, lambda n: kinked(model(torch.arange(8)), n == BAD))


@hostile("0", "weight", ("nan", "inf"), batch=BAD + 1, says=f"batch {BAD}")
def a_step_without_backward() -> Training:
    """torch.autograd.grad and a step by hand: the loss is handed to nobody."""
    model = chain()

    def step(number: int) -> None:
        gradients = torch.autograd.grad(kinked(model(torch.randn(4, 4)), number == BAD), list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= 0.01 * gradient

    return Training(model, step)


# --- whoever makes it bad ----------------------------------------------------------------------------------------------


@hostile(("", "2"), "gradient", gradients=True)
def a_gradient_that_is_handed_to_backward() -> Training:
    model = chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(number: int) -> None:
        model(torch.randn(4, 4)).backward(torch.full((4, 4), NAN if number == BAD else 0.1))
        take_step(optimizer)

    return Training(model, step)


@hostile(("2", ""), "gradient", ("nan", "inf"), gradients=True)
def a_hook_on_the_output() -> Training:
    """The hook makes the gradient bad that the loss gives."""
    model = chain()

    def loss_of(number: int) -> Any:
        out = model(torch.randn(4, 4))
        if number == BAD:
            out.register_hook(lambda gradient: gradient * NAN)
        return out.square().mean()

    return trained(model, loss_of)


def hooked_parameter(gain: float, clip: Callable[..., object] = lambda *_: None) -> Training:
    """A parameter's hook, not a module, makes the gradient bad."""
    model, now = chain(), Through()
    model[0].weight.register_hook(lambda gradient: gradient * now.gain)
    return turned(now, gain, model, between=lambda n: clip(model.parameters(), 1.0))


hostile("0", "gradient", gradients=True).each(a_hook_on_a_parameter=lambda: hooked_parameter(NAN))
hostile("0", "gradient", label="weight.grad", never="came by a way").each(
    a_hook_on_a_parameter_by_default=lambda: hooked_parameter(NAN),
)
hostile("0", "gradient", ("inf", "nan"), gradients=True).each(
    # A norm of inf turns one inf to nan. The first is the gradient.
    clipping_spreads_it=lambda: hooked_parameter(INF, nn.utils.clip_grad_norm_),
)


@BORN_IN_1
def in_a_micro_batch() -> Training:
    """The next batches have another gain, so that the one that is run again is finite."""
    model = middle(Through())
    return trained(model, before=lambda n: setattr(model[1], "gain", NAN if n == BAD else 1.0), accumulate=4)


@BORN_IN_1
def in_the_second_of_two_models() -> Training:
    """Two optimizers; the bad gradient is in the first part's backward."""
    model = middle(Through())
    first, second = (torch.optim.SGD(model[index].parameters(), lr=0.01) for index in (0, 2))

    def after(number: int) -> None:
        take_step(second)

    return turned(model[1], NAN, model, optimizer=first, after=after)


def decoded(clip: Callable[..., object] = lambda *_: None) -> Training:
    """The root is never called, so that nothing is run again."""
    model = Coder(Through)
    return turned(model.decoder[1], NAN, model, squared(model.coded), between=lambda n: clip(model.parameters(), 1.0))


ALL_BAD = "so were all others, as clip_grad_norm_ or a bad loss makes them"
hostile("decoder.1", "gradient", gradients=True).each(a_gradient_of_decode=decoded)
hostile("decoder.0", "gradient", label="weight.grad", says="not run again", never=ALL_BAD).each(
    a_gradient_of_decode_by_default=decoded,
)
hostile("decoder.2", "gradient", label="weight.grad", says=("not run again", ALL_BAD)).each(
    a_clipped_gradient_of_decode=lambda: decoded(nn.utils.clip_grad_norm_),
)


@hostile("0", "gradient", label="weight.grad", says="came by a way that does not lead through the model's outputs")
def a_penalty_of_a_weight() -> Training:
    model = chain()

    def loss_of(number: int) -> Any:
        penalty = (model[0].weight * float(number != BAD)).square().sum().sqrt()
        return model(torch.randn(4, 4)).square().mean() + penalty

    return trained(model, loss_of)


@hostile("0", "weight", batch=BAD + 1, says=f"batch {BAD}")
def an_optimizer_that_writes_nan() -> Training:
    model = chain()
    return trained(model, after=lambda n: put(model[0].weight, NAN, 1, 1) if n == BAD else None)


def overwritten(value: float, which: int = 0) -> Training:
    """A loader writes the next batch into the same memory, by NumPy, before the backward of this one."""
    one, other = nn.Linear(4, 4), nn.Linear(4, 4)
    model = Root(lambda own, x, y: own.one(x) * own.other(y).sigmoid(), one=one, other=other)
    optimizer, buffers = torch.optim.SGD(model.parameters(), 0.01), torch.zeros(2, 4, 4)

    def step(number: int) -> None:
        optimizer.zero_grad()
        buffers.data.copy_(torch.randn(2, 4, 4))
        loss = model(torch.from_numpy(buffers[0].numpy()), y=torch.from_numpy(buffers[1].numpy())).square().mean()
        if number == BAD:
            buffers.numpy()[which, 2, 3] = value
        loss.backward()
        optimizer.step()

    return Training(model, step)


BETWEEN = "of the root was overwritten between its forward and its backward"

hostile("one", "gradient", ("nan", "inf"), label="weight.grad", says=f"input[0] {BETWEEN}").each(
    an_input_that_is_overwritten=lambda: overwritten(NAN)
)
hostile("other", "gradient", ("nan", "inf"), label="weight.grad", says=f"input[y] {BETWEEN}").each(
    a_keyword_that_is_overwritten=lambda: overwritten(NAN, 1)
)
