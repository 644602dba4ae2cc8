"""A module's forward makes the first bad number, of finite inputs and weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from models import Calls
from trainings import Root, Scaled, Square, Training, chain, trained

from .case import BAD, INF, NAN, fed, hostile, put, spoiled


def middle(module: nn.Module) -> Any:
    return chain(nn.Linear(4, 8), module, nn.Linear(8, 4))


def switched(good: Any, bad: Any) -> tuple[nn.Sequential, Training]:
    """A model whose module ``1`` computes something else in one batch."""
    now = [good]
    model = middle(Calls(lambda x: now[0](x)))
    return model, spoiled(model, lambda: now.__setitem__(0, bad))


def same(x: Tensor) -> Tensor:
    return x


@hostile(module="1", cause="overflow", state="inf")
def a_square() -> Training:
    return fed(middle(Square()), lambda x: x.mul_(1e30))


@hostile(module="1", cause="overflow", state="inf", never="1 %")
def an_exponential() -> Training:
    return switched(same, lambda x: (x.abs() * 0 + 100).exp())[1]


@hostile(module="1", cause="overflow", state="inf")
def a_gain() -> Training:
    scaled = Scaled()
    return spoiled(middle(scaled), lambda: setattr(scaled, "gain", 1e30))


@hostile(module="1", cause="overflow", state="inf")
def twice_a_gain() -> Training:
    return switched(same, lambda x: x * 1e30 * 1e30)[1]


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


@hostile(module="1", cause="overflow", state="inf")
def a_product_of_two_large_numbers() -> Training:
    """1e20 x 1e25: neither is near the end."""
    weighted = Weighted()
    model = middle(weighted)

    def spoil() -> None:
        put(weighted.weight, 1e25, 2)
        put(model[0].weight, 1e20, 2, 0)

    return spoiled(model, spoil)


@hostile(module="1", cause="overflow", state="nan")
def a_difference_of_two_overflows() -> Training:
    """The module's own inf is nan as it leaves."""
    return switched(same, lambda x: (x * 1e20) * 1e25 - (x * 1e20) * 1e25)[1]


@hostile(module="1", cause="overflow", state="nan")
def a_difference_of_two_large_products() -> Training:
    class Differ(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight - x * self.weight

    differ = Differ()
    model = middle(differ)

    def spoil() -> None:
        put(differ.weight, 1e25, 2)
        put(model[0].weight, 1e20, 2, 0)

    return spoiled(model, spoil)


@hostile(module="0", cause="overflow", state="inf")
def a_float16_product() -> Training:
    model = chain().half()
    return trained(
        model,
        lambda n: model(torch.full((4, 4), 6e4 if n == BAD else 1.0).half()).float().mean(),
        before=lambda n: put(model[0].weight, 60.0) if n == BAD else None,
        lr=1e-4,
    )


@hostile(module="0", cause="overflow", state="inf", never="less than 1%")
def a_large_weight_under_autocast() -> Training:
    """8e3 is nothing in float32, and much in float16, in which the product is computed."""
    model = chain()

    def loss_of(number: int) -> Any:
        with torch.autocast("cpu", torch.float16):
            return model(torch.full((4, 4), 2.33)).float().square().mean()

    def spoil(number: int) -> None:
        if number == BAD:
            with torch.no_grad():
                model[0].weight.fill_(8e3)

    return trained(model, loss_of, before=spoil, lr=1e-4)


@hostile(module="0", cause="overflow", state="inf")
def a_weight_past_float16_under_autocast() -> Training:
    """A float32 weight of 1e5 is inf as autocast casts it."""
    model = chain()

    def loss_of(number: int) -> Any:
        with torch.autocast("cpu", torch.float16):
            return model(torch.rand(4, 4) + 0.1).float().square().mean()

    return trained(model, loss_of, before=lambda n: put(model[0].weight, 1e5) if n == BAD else None, lr=1e-4)


@hostile(module="1", cause="overflow", state="inf")
def bfloat16_at_its_end() -> Training:
    model = middle(Square()).bfloat16()

    def loss_of(number: int) -> Any:
        return model(torch.randn(4, 4).bfloat16() * (1e25 if number == BAD else 1)).float().mean()

    return trained(model, loss_of)


@hostile(module="1", cause="overflow", state="inf")
def float64_at_its_end() -> Training:
    model = middle(Square()).double()
    return trained(model, lambda n: model(torch.randn(4, 4).double() * (1e200 if n == BAD else 1)).mean())


@hostile(module="1", cause="overflow", state="inf")
def a_cast_to_float16() -> Training:
    """Finite in float32, inf as the module casts it."""
    now = [1.0]
    model = middle(Calls(lambda x: (x * now[0]).half().float()))
    return spoiled(model, lambda: now.__setitem__(0, 1e6))


@hostile(module="1", cause="singular", state="inf")
def a_division_by_zero() -> Training:
    return switched(same, lambda x: (x.abs() + 1) / (x * 0).abs())[1]


@hostile(module="1", cause=("singular", "invalid"), state="nan")
def zero_by_zero() -> Training:
    return switched(same, lambda x: (x * 0) / (x * 0))[1]


@hostile(module="1", cause="singular", state="inf")
def the_log_of_zero() -> Training:
    return switched(lambda x: x.sigmoid().log(), lambda x: (x * 0).log())[1]


@hostile(module="1", cause="singular", state="inf")
def the_reciprocal_of_one_zero() -> Training:
    """One element of 32."""
    gate = torch.ones(8)
    model = middle(Calls(lambda x: x + (gate + 0).reciprocal()))
    return spoiled(model, lambda: put(gate, 0.0, 3))


@hostile(module="1", cause="singular", state="inf")
def zero_to_a_negative_power() -> Training:
    return switched(same, lambda x: (x * 0) ** -1.5)[1]


@hostile(module="1", cause="singular", state="inf")
def a_reciprocal_square_root_of_zero() -> Training:
    return switched(same, lambda x: (x * 0).rsqrt())[1]


@hostile(module="0", cause=("singular", "invalid"), state="nan")
def a_norm_without_an_epsilon() -> Training:
    """A padded row of zeros: 0 * rsqrt(0)."""

    class RMS(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x.square().mean(-1, keepdim=True).rsqrt()

    return fed(chain(RMS(), nn.Linear(4, 4)), lambda x: x[3].zero_())


@hostile(module="0", cause=("singular", "invalid"), state="nan")
def a_normalisation_of_a_constant() -> Training:
    """(x - mean) / std, where all are the same."""
    model = chain(Calls(lambda x: (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True)), nn.Linear(4, 4))
    return fed(model, lambda x: x[1].fill_(2.0))


@hostile(module="1", cause="invalid")
def the_root_of_a_negative() -> Training:
    return switched(same, lambda x: (-x.abs() - 1).sqrt())[1]


@hostile(module="1", cause="invalid")
def the_log_of_a_negative() -> Training:
    return switched(same, lambda x: (-x.abs() - 1).log())[1]


@hostile(module="1", cause="invalid")
def an_arc_cosine_past_one() -> Training:
    return switched(same, lambda x: (x * 0 + 1.001).acos())[1]


@hostile(module="1", cause="invalid")
def a_power_of_a_negative() -> Training:
    return switched(same, lambda x: (-x.abs() - 1) ** 0.5)[1]


@hostile(module="1", cause=("invalid", "singular"))
def a_softmax_over_nothing() -> Training:
    """Every score is masked."""
    return switched(lambda x: x.softmax(-1), lambda x: x.masked_fill(x == x, -INF).softmax(-1))[1]


@hostile(module="1", cause=("invalid", "upstream"))
def a_nan_that_a_module_writes() -> Training:
    def write(x: Tensor) -> Tensor:
        out = x.clone()
        out[2, 3] = NAN
        return out

    return switched(same, write)[1]


@hostile(module="1", cause="overflow", state="inf")
def a_hook_multiplies() -> Training:
    now, model = [1.0], middle(nn.Tanh())
    model[1].register_forward_hook(lambda module, args, output: (output.abs() + 1) * now[0] * now[0])
    return spoiled(model, lambda: now.__setitem__(0, 1e30))


@hostile(module="1", cause="invalid")
def a_hook_poisons() -> Training:
    now, model = [1.0], middle(nn.Tanh())
    model[1].register_forward_hook(lambda module, args, output: output * now[0])
    return spoiled(model, lambda: now.__setitem__(0, NAN))


@hostile(module="1", cause="overflow", state="inf")
def an_inf_that_turns_to_nan() -> Training:
    """The next module makes nan of it: the first is the culprit."""
    scaled = Scaled()
    model = chain(nn.Linear(4, 8), scaled, Calls(lambda x: x - x), nn.Linear(8, 4))
    return spoiled(model, lambda: setattr(scaled, "gain", 1e30))


@hostile(module="1", cause="overflow", state="inf")
def an_inf_that_is_swallowed() -> Training:
    """The next module hides it."""
    scaled = Scaled()
    model = chain(nn.Linear(4, 8), scaled, nn.Tanh(), nn.Linear(8, 4))
    return spoiled(model, lambda: setattr(scaled, "gain", 1e30))


@hostile(module="part", cause="invalid")
def a_nan_that_the_root_swallows() -> Training:
    now = [1.0]
    model = Root(
        lambda root, x: root.head(root.part(x).nan_to_num()),
        part=Calls(lambda x: (x.abs() * now[0]).sqrt()),
        head=nn.Linear(4, 4),
    )
    return spoiled(model, lambda: now.__setitem__(0, -1.0))


@hostile(module="block", cause="overflow", state="inf")
def the_second_call_of_a_shared_module() -> Training:
    block = Scaled()
    model = Root(lambda root, x: root.head(root.block(root.block(x)).tanh()), block=block, head=nn.Linear(4, 4))
    return spoiled(model, lambda: setattr(block, "gain", 1e15))


@hostile(module=("attention", "attention.softmax"), cause="overflow", state="inf")
def a_score_in_float16() -> Training:
    """Attention without a scale."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Any:
            return self.q(x) @ self.k(x).transpose(-1, -2)

    model = Root(lambda root, x: root.attention(x).float().tanh(), attention=Attention()).half()
    return trained(model, lambda n: model((torch.randn(4, 6, 16) * (800 if n == BAD else 1)).half()).mean(), lr=1e-3)


@hostile(module="head", cause="upstream")
def between_two_modules() -> Training:
    """The root's own code makes a nan."""
    now = [1.0]
    model = Root(
        lambda root, x: root.head((root.first(x).abs() * now[0]).sqrt()), first=nn.Linear(4, 4), head=nn.Linear(4, 4)
    )
    return spoiled(model, lambda: now.__setitem__(0, -1.0))


@hostile(module="", cause=("overflow", "upstream"), state="inf", label="output")
def after_the_last_module() -> Training:
    now = [1.0]
    model = Root(lambda root, x: root.first(x) * now[0] * now[0], first=nn.Linear(4, 4))
    return spoiled(model, lambda: now.__setitem__(0, 1e30))


@hostile(module="0", cause="overflow", state="inf")
def a_finite_but_huge_input() -> Training:
    """Uninitialised memory: 3e38 is finite."""
    model = chain()
    model[0].weight.data.fill_(1.0)
    return fed(model, lambda x: x.fill_(3e38))


@hostile(module=("0", "1"), cause="overflow", state="inf")
def a_convolution() -> Training:
    model = chain(nn.Conv1d(2, 4, 3), Square(), nn.Flatten(), nn.Linear(40, 2))

    def loss_of(number: int) -> Tensor:
        loss: Tensor = model(torch.randn(3, 2, 12) * (1e30 if number == BAD else 1)).square().mean()
        return loss

    return trained(model, loss_of)


@hostile(module="1", cause="overflow", state="inf", batch=8, every=4)
def in_a_full_batch_of_every() -> Training:
    return fed(middle(Square()), lambda x: x.mul_(1e30), at=8)


@hostile(module="1", cause="overflow", state="inf", batch=6, every=4)
def between_the_full_batches() -> Training:
    return fed(middle(Square()), lambda x: x.mul_(1e30), at=6)


@hostile(module="1", cause="overflow", state="inf", check="async")
def read_later() -> Training:
    return fed(middle(Square()), lambda x: x.mul_(1e30))


@hostile(module="1", cause="overflow", state="inf", check="batch")
def read_once_a_batch() -> Training:
    return fed(middle(Square()), lambda x: x.mul_(1e30))
