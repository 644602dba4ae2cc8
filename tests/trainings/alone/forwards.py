"""A module's forward makes the first bad number, of finite inputs and weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from models import Calls
from trainings.case import Training
from trainings.parts import (
    BAD,
    INF,
    NAN,
    Gain,
    Root,
    Scaled,
    Square,
    chain,
    fed,
    gained,
    headed,
    middle,
    overflowing,
    put,
    spoiled,
    trained,
    turned,
)
from trainings.truths import hostile

# --- operators ---------------------------------------------------------------------------------------------------------

Function = Callable[[Tensor], Tensor]


def same(x: Tensor) -> Tensor:
    return x


def switched(bad: Function, good: Function = same) -> Training:
    """Module ``1`` computes something else in one batch."""
    part = Gain(lambda x, call: call(x), good)
    return turned(part, bad, middle(part))


def operators(cause: str | tuple[str, ...], state: str = "nan", **bad: Function) -> None:
    """In one batch module ``1`` computes such a function."""
    hostile("1", cause, state).each(**{name: partial(switched, call) for name, call in bad.items()})


operators(
    "overflow",
    "inf",
    twice_a_gain=lambda x: x * 1e30 * 1e30,
    a_high_power=lambda x: (x.abs() + 20) ** 40,
    an_exponential_in_float16=lambda x: ((x.abs() + 12).half()).exp().float(),
    a_running_product=lambda x: (x.abs() + 1e8).cumprod(-1),
    a_variance_of_large_numbers=lambda x: x + (x * 1e25).var(),
    # Each of what is summed is finite.
    a_sum_of_many=lambda x: x * 0 + (x * 0 + 3e37).sum(-1, keepdim=True) * torch.ones(8) * 2,
)
operators(
    "overflow",
    # The module's own inf is nan as it leaves.
    a_difference_of_two_overflows=lambda x: (x * 1e20) * 1e25 - (x * 1e20) * 1e25,
    # A softmax by hand.
    infinities_that_cancel=lambda x: (x * 0 + 100).exp() / (x * 0 + 100).exp().sum(-1, keepdim=True),
)
operators(
    "singular",
    "inf",
    a_division_by_zero=lambda x: (x.abs() + 1) / (x * 0).abs(),
    zero_to_a_negative_power=lambda x: (x * 0) ** -1.5,
    a_reciprocal_square_root_of_zero=lambda x: (x * 0).rsqrt(),
    the_log1p_of_minus_one=lambda x: (x * 0 - 1).log1p(),
)
operators(("overflow", "singular"), "inf", the_reciprocal_of_a_tiny_number=lambda x: 1 / (x * 0 + 1e-39))
operators(
    ("invalid", "singular"),
    zero_by_zero=lambda x: (x * 0) / (x * 0),
    the_standard_deviation_of_one_sample=lambda x: x / x[:1].std(0),
    a_mean_of_nothing=lambda x: x - x[:0].mean(),
)
operators(
    "invalid",
    the_root_of_a_negative=lambda x: (-x.abs() - 1).sqrt(),
    the_log_of_a_negative=lambda x: (-x.abs() - 1).log(),
    an_arc_cosine_past_one=lambda x: (x * 0 + 1.001).acos(),
    a_power_of_a_negative=lambda x: (-x.abs() - 1) ** 0.5,
)
hostile("1", "singular", "inf").each(
    the_log_of_zero=lambda: switched(lambda x: (x * 0).log(), good=lambda x: x.sigmoid().log()),
    an_inverse_hyperbolic_tangent_of_one=lambda: switched(lambda x: (x * 0 + 1).atanh(), good=torch.tanh),
)


def written_over(call: Function, how: Callable[[Tensor], Any], good: Function = torch.sigmoid) -> Training:
    """What the bad operator made is changed in place by one that was given nothing worse."""

    def changed(x: Tensor) -> Tensor:
        out = call(x)
        how(out)
        return out

    return switched(changed, good)


def zero_log(x: Tensor) -> Tensor:
    return (x * 0).log()


hostile("1", "singular", says="aten.log of 0").each(
    a_log_of_zero_below_tanh_in_place=lambda: written_over(lambda x: zero_log(x) * 0, Tensor.tanh_),
    a_log_of_zero_below_a_clamp_in_place=lambda: written_over(lambda x: zero_log(x) * 0, lambda y: y.clamp_(-9, 9)),
    a_log_of_zero_in_a_part_that_is_changed=lambda: written_over(lambda x: zero_log(x) * 0, lambda y: y[:, :2].sigmoid_()),
)
hostile("1", "singular", "inf", says="aten.log of 0").each(
    a_log_of_zero_that_is_scaled_in_place=lambda: written_over(zero_log, lambda y: y.mul_(0.5).add_(1)),
)
hostile("1", "invalid", says="aten.div of 0 and 0").each(
    zero_by_zero_below_relu_in_place=lambda: written_over(lambda x: (x * 0) / (x * 0), Tensor.relu_),
)


@hostile("1", "invalid", says="add an epsilon of at least 6.1e-05 (1e-8 is 0 in float16) to the divisor")
def an_epsilon_that_is_0_in_float16() -> Training:
    """A row of zeros, and its norm."""
    part = Gain(lambda x, gain: x * gain / ((x * gain).norm(dim=-1, keepdim=True) + 1e-8))
    model = middle(part).half()
    return turned(part, 0.0, model, lambda n: model(torch.randn(4, 4).half()).float().square().mean())


hostile("1", "invalid", says="aten.sqrt_ of -1").each(
    a_root_after_what_was_bad_is_written_over=lambda: written_over(
        lambda x: zero_log(x) * 0, lambda y: y.nan_to_num_(0).sub_(1).sqrt_()
    ),
)
hostile("1", ("invalid", "singular")).each(
    # Every score is masked.
    a_softmax_over_nothing=lambda: switched(lambda x: x.masked_fill(x == x, -INF).softmax(-1), lambda x: x.softmax(-1)),
)
hostile("1", "overflow", "inf", never="1 %").each(an_exponential=lambda: switched(lambda x: (x.abs() * 0 + 100).exp()))
hostile("1", "singular", ("inf", "nan")).each(
    gumbel_noise_of_zero=lambda: switched(lambda x: x - (-(x * 0).log()).log() * 0 - (x * 0).log()),
)


@hostile("1", ("invalid", "upstream"))
def a_nan_that_a_module_writes() -> Training:
    def write(x: Tensor) -> Tensor:
        out = x.clone()
        out[2, 3] = NAN
        return out

    return switched(write)


@hostile("1", "singular", "inf")
def the_reciprocal_of_one_zero() -> Training:
    """One element of 32."""
    gate = torch.ones(8)
    return spoiled(middle(Calls(lambda x: x + (gate + 0).reciprocal())), lambda: put(gate, 0.0, 3))


# --- overflows ---------------------------------------------------------------------------------------------------------


def squares(at: int = BAD, size: float = 1e30) -> Training:
    return fed(middle(Square()), lambda x: x.mul_(size), at)


def large(size: float, dtype: torch.dtype) -> Training:
    """The input of one batch is large."""
    model = middle(Square()).to(dtype)
    return trained(model, lambda n: model(torch.randn(4, 4).to(dtype) * (size if n == BAD else 1)).float().mean())


hostile("1", "overflow", "inf").each(
    a_square=squares,
    a_gain=overflowing,
    bfloat16_at_its_end=lambda: large(1e25, torch.bfloat16),
    float64_at_its_end=lambda: large(1e200, torch.float64),
    # Finite in float32, inf as the module casts it.
    a_cast_to_float16=lambda: gained(lambda x, gain: (x * gain).half().float(), 1e6),
    # The next module makes nan of it, or hides it: the first is the culprit.
    an_inf_that_turns_to_nan=lambda: overflowing(followed_by(Calls(lambda x: x - x))),
    an_inf_that_is_swallowed=lambda: overflowing(followed_by(nn.Tanh())),
    # One row of the batch is an outlier: finite as it comes.
    a_large_sample_among_small_ones=lambda: fed(middle(Square()), lambda x: x[3].mul_(1e25)),
)
hostile("1", "overflow", "inf", batch=0).each(an_overflow_in_the_first_batch=lambda: squares(0))
hostile("1", "overflow", "inf", batch=8, every=4).each(in_a_full_batch_of_every=lambda: squares(8))
hostile("1", "overflow", "inf", batch=6, every=4).each(between_the_full_batches=lambda: squares(6))
hostile("1", "overflow", "inf", check="async").each(read_later=squares)
hostile("1", "overflow", "inf", check="batch").each(read_once_a_batch=squares)


def followed_by(module: nn.Module) -> Callable[[nn.Module], Any]:
    return lambda part: chain(nn.Linear(4, 8), part, module, nn.Linear(8, 4))


class Weighted(nn.Module):
    """``times``: how often it computes the product, which it subtracts from itself the second time."""

    def __init__(self, is_subtracted: bool) -> None:
        super().__init__()
        self.weight, self.is_subtracted = nn.Parameter(torch.ones(8)), is_subtracted

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight - x * self.weight if self.is_subtracted else x * self.weight


def a_large_product(is_subtracted: bool) -> Training:
    """1e20 x 1e25: neither is near the end."""
    weighted = Weighted(is_subtracted)
    model = middle(weighted)
    return spoiled(model, lambda: (put(weighted.weight, 1e25, 2), put(model[0].weight, 1e20, 2, 0)))


hostile("1", "overflow", "inf").each(a_product_of_two_large_numbers=lambda: a_large_product(False))
hostile("1", "overflow", "nan").each(a_difference_of_two_large_products=lambda: a_large_product(True))


@hostile("0", "overflow", ("inf", "nan"))
def a_matrix_product_of_two_large_numbers() -> Training:
    model = chain()
    return fed(model, lambda x: (x.mul_(1e20), model[0].weight.data.mul_(1e25)))


@hostile("0", "overflow", "inf")
def a_float16_product() -> Training:
    model = chain().half()

    def loss_of(number: int) -> Any:
        return model(torch.full((4, 4), 6e4 if number == BAD else 1.0).half()).float().mean()

    return spoiled(model, lambda: put(model[0].weight, 60.0), loss_of, lr=1e-4)


def under_autocast(model: Any, inputs: Callable[[], Tensor]) -> Callable[[int], Any]:
    def loss_of(number: int) -> Any:
        with torch.autocast("cpu", torch.float16):
            return model(inputs()).float().square().mean()

    return loss_of


@hostile("0", "overflow", "inf", never="less than 1%")
def a_large_weight_under_autocast() -> Training:
    """8e3 is nothing in float32, and much in float16, in which the product is computed."""
    model = chain()
    loss_of = under_autocast(model, lambda: torch.full((4, 4), 2.33))
    return spoiled(model, lambda: model[0].weight.data.fill_(8e3), loss_of, lr=1e-4)


@hostile("0", "overflow", "inf")
def a_weight_past_float16_under_autocast() -> Training:
    """A float32 weight of 1e5 is inf as autocast casts it."""
    model = chain()
    loss_of = under_autocast(model, lambda: torch.rand(4, 4) + 0.1)
    return spoiled(model, lambda: put(model[0].weight, 1e5), loss_of, lr=1e-4)


@hostile("1", "overflow", "inf", never="weight was already")
def a_huge_but_finite_weight() -> Training:
    """A flipped exponent bit."""
    model = chain(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 4))
    return spoiled(model, lambda: (put(model[1].weight, 3e38, 1, 1), put(model[0].bias, 100.0, 1)))


@hostile("0", ("singular", "invalid"))
def a_norm_without_an_epsilon() -> Training:
    """A padded row of zeros: 0 * rsqrt(0)."""
    norm = Calls(lambda x: x * x.square().mean(-1, keepdim=True).rsqrt())
    return fed(chain(norm, nn.Linear(4, 4)), lambda x: x[3].zero_())


@hostile("0", ("singular", "invalid"))
def a_normalisation_of_a_constant() -> Training:
    """(x - mean) / std, where all are the same."""
    norm = Calls(lambda x: (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True))
    return fed(chain(norm, nn.Linear(4, 4)), lambda x: x[1].fill_(2.0))


@hostile("1", ("invalid", "singular"))
def a_layer_norm_without_an_epsilon() -> Training:
    model = middle(nn.LayerNorm(8, eps=0.0))
    return spoiled(model, lambda: (model[0].weight.data.zero_(), model[0].bias.data.zero_()))


def hooked(call: Callable[[Tensor, float], Tensor], gain: float) -> Training:
    """A hook of the user changes the output of module ``1``."""
    part = Gain(lambda x, _: x.tanh())
    part.register_forward_hook(lambda module, args, output: call(output, part.gain))
    return turned(part, gain, middle(part))


hostile("1", "overflow", "inf").each(a_hook_multiplies=lambda: hooked(lambda out, gain: (out.abs() + 1) * gain * gain, 1e30))
hostile("1", "invalid").each(a_hook_poisons=lambda: hooked(lambda out, gain: out * gain, NAN))


@hostile(("0", "1"), "overflow", "inf")
def a_convolution() -> Training:
    model = chain(nn.Conv1d(2, 4, 3), Square(), nn.Flatten(), nn.Linear(40, 2))
    return trained(model, lambda n: model(torch.randn(3, 2, 12) * (1e30 if n == BAD else 1)).square().mean())


@hostile("0", "overflow", "inf")
def a_finite_but_huge_input() -> Training:
    """Uninitialised memory: 3e38 is finite."""
    model = chain()
    model[0].weight.data.fill_(1.0)
    return fed(model, lambda x: x.fill_(3e38))


# --- within a root -----------------------------------------------------------------------------------------------------


def rooted(forward: Callable[..., Any], call: Callable[[Tensor, Any], Any], gain: float) -> Training:
    """``forward`` uses a ``part`` that computes something else in one batch, and a head."""
    return gained(call, gain, lambda part: headed(forward, part=part))


@hostile("part", "invalid")
def a_nan_that_the_root_swallows() -> Training:
    return rooted(lambda root, x: root.head(root.part(x).nan_to_num()), lambda x, gain: (x.abs() * gain).sqrt(), -1.0)


@hostile("block", "overflow", "inf")
def the_second_call_of_a_shared_module() -> Training:
    return overflowing(
        lambda block: headed(lambda root, x: root.head(root.block(root.block(x)).tanh()), block=block), gain=1e15
    )


@hostile(("attention", "attention.softmax"), "overflow", "inf")
def a_score_in_float16() -> Training:
    """Attention without a scale."""
    attention = Root(lambda own, x: own.q(x) @ own.k(x).transpose(-1, -2), q=nn.Linear(16, 16), k=nn.Linear(16, 16))
    model = Root(lambda root, x: root.attention(x).float().tanh(), attention=attention).half()
    return trained(model, lambda n: model((torch.randn(4, 6, 16) * (800 if n == BAD else 1)).half()).mean(), lr=1e-3)


@hostile("head", "upstream")
def between_two_modules() -> Training:
    """The root's own code makes a nan."""
    model = headed(lambda root, x: root.head((root.first(x).abs() * root.gain).sqrt()), first=nn.Linear(4, 4), gain=1.0)
    return turned(model, -1.0, model)


@hostile("", ("overflow", "upstream"), "inf", label="output")
def after_the_last_module() -> Training:
    model = Root(lambda root, x: root.first(x) * root.gain * root.gain, first=nn.Linear(4, 4), gain=1.0)
    return turned(model, 1e30, model)


# --- two faults at once ------------------------------------------------------------------------------------------------


@hostile("1", "overflow", "inf")
def an_overflow_before_a_bad_weight() -> Training:
    scaled = Scaled()
    model = middle(scaled)

    def spoil() -> None:
        scaled.gain = 1e30
        put(model[2].weight, NAN, 1, 1)

    return spoiled(model, spoil)


@hostile("left", "overflow", "inf")
def two_branches() -> Training:
    """Both overflow; the left one is called first."""
    model = headed(lambda root, x: root.head(root.left(x) + root.right(x)), left=Scaled(), right=Scaled())

    def spoil() -> None:
        model.left.gain = model.right.gain = 1e30

    return spoiled(model, spoil)


# --- tensors that a module keeps, and that are no buffers -------------------------------------------------------------


class Cached(nn.Module):
    """A cache of keys that is read in blocks; ``keep`` makes its memory, which is nan where nobody has written."""

    def __init__(self, keep: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.key, self.read = nn.Linear(8, 8), 4
        self.kept = keep(torch.full((8, 8), NAN))

    def forward(self, x: Tensor) -> Tensor:
        kept = self.kept if isinstance(self.kept, Tensor) else next(iter(self.kept))
        with torch.no_grad():
            kept[:4] = self.key(x)
        return torch.ones(4, self.read).softmax(-1) @ kept[: self.read] + x


def cached(keep: Callable[[Tensor], Any]) -> Training:
    part = Cached(keep)

    def spoil() -> None:
        part.read = 5

    return spoiled(middle(part), spoil)


hostile("1", "upstream", says="a tensor that it keeps as an attribute", never="inputs and weights were finite").each(
    a_cache_that_nobody_wrote=lambda: cached(lambda made: made),
    a_list_of_caches_that_nobody_wrote=lambda: cached(lambda made: [made]),
)
