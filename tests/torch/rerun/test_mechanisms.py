"""40 mechanisms that make an inf or nan: the operator, the user's line, recurrence and precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from closeups import line_of, tripped
from models import Calls
from rankwatch.shared.frame import State

NAN, INF = float("nan"), float("inf")
ONES = torch.ones(2, 4)


# --- 40 mechanisms: the operator, and the line -------------------------------------------------------------------------

FINITE, BAD = "finite", "bad"


@dataclass(frozen=True)
class Mechanism:
    """``operator`` is torch's name of it; ``wide`` is whether it is finite in float64."""

    call: Callable[..., Any]
    operator: str
    wide: str
    given: tuple[Any, ...]

    def __str__(self) -> str:
        return self.call.__name__


MECHANISMS: list[Mechanism] = []


def mechanism(operator: str, *given: Any, wide: str = BAD) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(call: Callable[..., Any]) -> Callable[..., Any]:
        MECHANISMS.append(Mechanism(call, f"aten.{operator}", wide, given))
        return call

    return add


HALVES = torch.full((4, 4), 300.0, dtype=torch.float16)


@mechanism("exp.default", ONES * 100, wide=FINITE)
def an_exponential(x: Tensor) -> Tensor:
    scores = x * 2
    return torch.exp(scores)  # an_exponential


@mechanism("log.default", ONES * 0)
def the_log_of_zero(x: Tensor) -> Tensor:
    return (x + 0).log()  # the_log_of_zero


@mechanism("div.Tensor", ONES)
def a_division_by_zero(x: Tensor) -> Tensor:
    spread = x - x.mean()
    return x / spread  # a_division_by_zero


@mechanism("sqrt.default", -ONES)
def the_root_of_a_negative(x: Tensor) -> Tensor:
    return torch.sqrt(x)  # the_root_of_a_negative


@mechanism("rsqrt.default", ONES)
def a_norm_without_an_epsilon(x: Tensor) -> Tensor:
    variance = (x - x.mean(-1, keepdim=True)).square().mean(-1, keepdim=True)
    return x * torch.rsqrt(variance)  # a_norm_without_an_epsilon


@mechanism("pow.Tensor_Scalar", ONES * 1e30, wide=FINITE)
def a_power(x: Tensor) -> Tensor:
    return x**3  # a_power


@mechanism("pow.Tensor_Scalar", -ONES)
def a_broken_power_of_a_negative(x: Tensor) -> Tensor:
    return x.pow(0.5) if x.dim() == 3 else x.pow(0.7)  # a_broken_power_of_a_negative


@mechanism("_softmax.default", ONES)
def a_row_that_is_fully_masked(x: Tensor) -> Tensor:
    mask = torch.zeros_like(x, dtype=torch.bool)
    mask[1] = True
    scores = x.masked_fill(mask, -INF)
    return scores.softmax(-1)  # a_row_that_is_fully_masked


@mechanism("mm.default", HALVES, wide=FINITE)
def a_product_in_half(x: Tensor) -> Tensor:
    return (x @ x.t()).float()  # a_product_in_half


@mechanism("sum.default", HALVES.repeat(4, 4), wide=FINITE)
def a_sum_in_half(x: Tensor) -> Tensor:
    total = x.sum()  # a_sum_in_half
    return total / x.numel()


@mechanism("cumsum.default", HALVES.reshape(-1).repeat(16), wide=FINITE)
def a_running_sum_in_half(x: Tensor) -> Tensor:
    return x.cumsum(0)  # a_running_sum_in_half


@mechanism("prod.default", ONES.flatten() * 1e20, wide=FINITE)
def a_long_product(x: Tensor) -> Tensor:
    return x.prod()  # a_long_product


@mechanism("native_layer_norm.default", ONES)
def a_layer_norm_without_eps(x: Tensor) -> Tensor:
    return F.layer_norm(x, (4,), eps=0.0)  # a_layer_norm_without_eps


@mechanism("nll_loss_forward.default", ONES, torch.full((2,), -100))
def a_cross_entropy_without_labels(x: Tensor, labels: Tensor) -> Tensor:
    hidden = x * 2
    return F.cross_entropy(hidden, labels)  # a_cross_entropy_without_labels


@mechanism("div.Tensor", ONES)
def two_helpers_down(x: Tensor) -> Tensor:
    return _outer(x)


def _outer(x: Tensor) -> Tensor:
    return _inner(x, x * 0)


def _inner(x: Tensor, y: Tensor) -> Tensor:
    return x / y  # two_helpers_down


class Loses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.log()  # a_function_of_the_users

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0]


@mechanism("log.default", ONES * 0)
def a_function_of_the_users(x: Tensor) -> Any:
    return Loses.apply(x)


@mechanism("sqrt_.default", ONES)
def in_place(x: Tensor) -> Tensor:
    y = x - 3
    y.mul_(2)
    y.sqrt_()  # in_place
    return y


@mechanism("mul.Tensor", ONES)
def with_a_number_that_is_inf(x: Tensor) -> Tensor:
    return x * INF  # with_a_number_that_is_inf


@mechanism("sub.Tensor", ONES * 0)
def a_difference_of_infinities(x: Tensor) -> Tensor:
    penalty = torch.full_like(x, -INF)
    return penalty - penalty  # a_difference_of_infinities


@mechanism("_to_copy.default", ONES * 1e5, wide=FINITE)
def a_cast_to_half(x: Tensor) -> Tensor:
    return x.half()  # a_cast_to_half


@mechanism("bmm.default", HALVES.expand(2, 4, 4).contiguous(), wide=FINITE)
def an_einsum_in_half(x: Tensor) -> Tensor:
    return torch.einsum("bij,bjk->bik", x, x)  # an_einsum_in_half


@mechanism("std.correction", ONES[:1, 0])
def the_deviation_of_one(x: Tensor) -> Tensor:
    return x.std()  # the_deviation_of_one


@mechanism("mean.default", ONES)
def the_mean_of_nothing(x: Tensor) -> Tensor:
    kept = x[x > 1]
    return kept.mean()  # the_mean_of_nothing


@mechanism("acos.default", ONES * 2)
def an_angle(x: Tensor) -> Tensor:
    return x.acos()  # an_angle


@mechanism("atanh.default", ONES)
def an_inverse_tanh(x: Tensor) -> Tensor:
    return torch.atanh(x)  # an_inverse_tanh


@mechanism("log1p.default", -ONES)
def a_log_at_its_pole(x: Tensor) -> Tensor:
    return torch.log1p(x)  # a_log_at_its_pole


@mechanism("logit.default", ONES)
def a_logit_of_one(x: Tensor) -> Tensor:
    return torch.logit(x)  # a_logit_of_one


@mechanism("reciprocal.default", ONES * 0)
def a_reciprocal(x: Tensor) -> Tensor:
    return x.reciprocal()  # a_reciprocal


@mechanism("div.Tensor", ONES * 0)
def a_unit_vector_of_zero(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1, eps=0.0)  # a_unit_vector_of_zero


@mechanism("addcdiv.default", ONES)
def a_step_of_an_optimizer_by_hand(x: Tensor) -> Tensor:
    return torch.addcdiv(x, x, x * 0)  # a_step_of_an_optimizer_by_hand


@mechanism("expm1.default", ONES * 100, wide=FINITE)
def an_expm1(x: Tensor) -> Tensor:
    return torch.expm1(x)  # an_expm1


@mechanism("cosh.default", ONES * 100, wide=FINITE)
def a_log_cosh(x: Tensor) -> Tensor:
    return torch.log(torch.cosh(x))  # a_log_cosh


@mechanism("convolution.default", torch.full((1, 1, 4, 4), 300.0, dtype=torch.float16), wide=FINITE)
def a_convolution_in_half(x: Tensor) -> Tensor:
    return F.conv2d(x, x)  # a_convolution_in_half


@mechanism("lgamma.default", ONES * 0)
def a_log_gamma(x: Tensor) -> Tensor:
    return torch.lgamma(x)  # a_log_gamma


@mechanism("div.Tensor", ONES)
def in_a_comprehension(x: Tensor) -> Tensor:
    return torch.stack([row / (row - 1) for row in x])  # in_a_comprehension


@mechanism("exp.default", ONES * 100, wide=FINITE)
def in_a_call_of_several_lines(x: Tensor) -> Tensor:
    return torch.where(
        x > 0,
        torch.exp(x),  # in_a_call_of_several_lines
        x,
    )


@mechanism("linalg_inv_ex.default", torch.zeros(2, 2))
def an_inverse(x: Tensor) -> Any:
    inverse, _ = torch.linalg.inv_ex(x)  # an_inverse
    return inverse


@mechanism("mul.Tensor", ONES * 1e20, wide=FINITE)
def without_gradients(x: Tensor) -> Tensor:
    with torch.no_grad():
        squares: Tensor = x * x  # without_gradients
    return squares


@mechanism("_scaled_dot_product_flash_attention_for_cpu.default", ONES[None, None] * 1e30, wide=FINITE)
def attention(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x)  # attention


@mechanism("div.Tensor", ONES)
def a_generator(x: Tensor) -> Tensor:
    def rows() -> Iterator[Tensor]:
        for row in x:
            yield row / 0  # a_generator

    return torch.stack(list(rows()))


@pytest.mark.parametrize("one", MECHANISMS, ids=str)
def test_operator_line_recurrence_and_precision(one: Mechanism) -> None:
    trip, found = tripped(nn.Sequential(Calls(one.call)) if len(one.given) == 1 else Calls(one.call), *one.given)
    operator = found.operator
    assert operator is not None
    assert operator.source is not None
    assert (operator.name, operator.source.line) == (one.operator, line_of(str(one), __file__))
    assert operator.source.file == __file__
    assert operator.source.text.endswith(f"# {one}")
    assert trip.operator == operator
    assert (trip.recurs, found.recurred, found.of, found.note) == (True, 3, 3, "")
    wide = {row.dtype: row.state for row in found.precision}["float64"]
    assert (wide is State.FINITE) == (one.wide == FINITE)
