"""Mechanisms that make an inf or nan, each in one call of a tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rankwatch.shared.types.trip import Cause

INF = float("inf")
ONES = torch.ones(2, 4)
ROW = torch.ones(4)
HALVES = torch.full((4, 4), 300.0, dtype=torch.float16)


def of(*values: float) -> Tensor:
    return torch.tensor(values)


@dataclass(frozen=True)
class Mechanism:
    """``operator`` is torch's name of it, ``says`` a part of the evidence.

    ``is_wide``: whether it is finite in float64; None: as its cause lets expect. ``line``: that of the operator in ``call``.
    """

    call: Any
    operator: str
    says: str
    given: Tensor
    is_wide: bool | None
    line: int


def row(
    call: Callable[[Tensor], Any], operator: str, says: str = "", given: Tensor = ONES, *, is_wide: Any = None, line: int = 0
) -> Mechanism:
    return Mechanism(call, operator, says, given, is_wide, line)


# --- of more than one line -----------------------------------------------------------------------------------------------


def before(x: Tensor) -> Tensor:
    scores = x * 2
    return torch.exp(scores)


def after(x: Tensor) -> Tensor:
    total = x.sum()
    return total / x.numel()


def fully_masked(x: Tensor) -> Tensor:
    mask = torch.zeros_like(x, dtype=torch.bool)
    mask[1] = True
    return x.masked_fill(mask, -INF).softmax(-1)


def causal(scores: Tensor) -> Tensor:
    """A usual mask, and an overflow in the scores below it."""
    mask = torch.full(scores.shape, -INF).triu(1)
    return (scores.exp() + mask).softmax(-1)


def two_helpers_down(x: Tensor) -> Tensor:
    return _outer(x)


def _outer(x: Tensor) -> Tensor:
    return _inner(x, x * 0)


def _inner(x: Tensor, y: Tensor) -> Tensor:
    return x / y


def of_a_function(x: Tensor) -> Any:
    return Loses.apply(x)  # type: ignore[no-untyped-call]


class Loses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.log()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0]


def in_place(x: Tensor) -> Tensor:
    y = x - 3
    y.mul_(2)
    y.sqrt_()
    return y


def into(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    torch.log(x, out=out)
    return out


def without_gradients(x: Tensor) -> Tensor:
    with torch.no_grad():
        squares: Tensor = x * x
    return squares


def several_lines(x: Tensor) -> Tensor:
    return torch.where(
        x > 0,
        torch.exp(x),
        x,
    )


def a_generator(x: Tensor) -> Tensor:
    def rows() -> Iterator[Tensor]:
        for row in x:
            yield row / 0

    return torch.stack(list(rows()))


# --- the tables ----------------------------------------------------------------------------------------------------------

OVERFLOWS = {
    "exp": row(lambda x: x.exp(), "exp", "of 93.2 is inf, as float32 ends at 3.4e38: subtract the largest", of(1.0, 93.2)),
    "exp2": row(lambda x: torch.exp2(x), "exp2", "of 200 is inf", of(200.0)),
    "expm1": row(lambda x: torch.expm1(x), "expm1", "of 100", of(100.0)),
    "sinh": row(lambda x: torch.sinh(x), "sinh", "of -100", of(-100.0)),
    "log cosh": row(lambda x: torch.log(torch.cosh(x)), "cosh", given=ONES * 100),
    "product": row(lambda x: x * 1e25, "mul.Tensor", "of 1e+20 and 1e+25 is inf", of(1e20)),
    "long product": row(lambda x: x.prod(), "prod", given=ROW * 1e20),
    "square": row(lambda x: x**2, "pow.Tensor_Scalar", "of 1e+20 and 2 is inf", of(0.0, 1e20)),
    "sum": row(lambda x: x.sum(), "sum", "of abs max 3e38 (self) is inf", of(3e38, 3e38)),
    "bf16 sum": row(lambda x: x.bfloat16().sum(), "sum", "bfloat16 ends at 3.39e38", of(3e38, 3e38)),
    "sum in half": row(after, "sum", given=HALVES.repeat(4, 4), line=1),
    "running sum in half": row(lambda x: x.cumsum(0), "cumsum", given=HALVES.reshape(-1).repeat(16)),
    "half": row(lambda x: x.half(), "_to_copy", "of 100,000 is inf, as float16 ends at 65,504", of(1.0, 1e5)),
    "half matmul": row(lambda x: (x @ x.t()).float(), "mm", "of abs max 300", HALVES),
    "einsum in half": row(lambda x: torch.einsum("bij,bjk->bik", x, x), "bmm", given=HALVES.expand(2, 4, 4)),
    "convolution in half": row(lambda x: F.conv2d(x, x), "convolution", given=HALVES[None, None]),
    "mean of squares": row(lambda x: x.pow(2).mean(-1), "pow.Tensor_Scalar", "of 300 and 2", HALVES),
    "sum of both signs": row(lambda x: x @ of(1e38, -1e38), "mv", given=torch.full((2, 2), 1e20)),
    "scaled past the end": row(lambda x: x / 1e-30, "div.Tensor", "of 1e+20 and 1e-30 is inf", of(1e20)),
    "attention": row(
        lambda x: F.scaled_dot_product_attention(x, x, x),
        "_scaled_dot_product_flash_attention_for_cpu",
        given=ONES[None, None] * 1e30,
    ),
    "a mask is no origin": row(causal, "exp", "of 93.2 is inf", of(1.0, 93.2).expand(2, 2), line=3),
    "manual softmax": row(lambda x: x.exp() / x.exp().sum(), "exp", "of 100 is inf", of(1.0, 100.0)),
    "inf - inf": row(lambda x: x.exp() - x.exp(), "exp", "of 100 is inf", of(100.0)),
    "a number of the code": row(lambda x: x * INF, "mul.Tensor", "the code gives it inf", of(2.0), is_wide=False),
    "sparse": row(lambda x: (x.to_sparse() * 1e20).to_dense(), "mul.Tensor", given=of(1e20, 0.0)),
    "after another line": row(before, "exp", given=ONES * 100, line=2),
    "in a call of several lines": row(several_lines, "exp", given=ONES * 100, line=3),
    "without gradients": row(without_gradients, "mul.Tensor", given=ONES * 1e20, line=2),
}
POLES = {
    "log 0": row(lambda x: (x + 0).log(), "log", "of 0 is inf: clamp what goes in, or add an epsilon", of(1.0, 0.0)),
    "log1p": row(lambda x: torch.log1p(x), "log1p", "of -1", of(-1.0)),
    "1/0": row(lambda x: 1 / x, "reciprocal", "of 0 is inf", of(2.0, 0.0)),
    "x/0": row(lambda x: x / 0.0, "div.Tensor", "of 2 and 0 is inf: add an epsilon to the divisor", of(2.0)),
    "x/tiny": row(lambda x: 3.0 / x, "reciprocal", "of 9.99995e-41", of(1e-40), is_wide=True),
    "rsqrt 0": row(lambda x: torch.rsqrt(x), "rsqrt", "of 0 is inf: add an epsilon below the root", of(0.0)),
    "0 ** -1": row(lambda x: x**-1.5, "pow.Tensor_Scalar", "of 0 and -1.5 is inf", of(4.0, 0.0)),
    "atanh 1": row(lambda x: torch.atanh(x), "atanh", "of 1", of(1.0)),
    "logit 1": row(lambda x: torch.logit(x), "logit", "of 1", of(1.0)),
    "digamma": row(lambda x: torch.digamma(x), "digamma", "of 0", of(0.0)),
    "lgamma": row(lambda x: torch.lgamma(x), "lgamma", given=of(0.0)),
    "entropy of 0": row(lambda x: x * x.log(), "log", "of 0 is inf", of(0.5, 0.0)),
    "step of an optimizer": row(lambda x: torch.addcdiv(x, x, x * 0), "addcdiv"),
    "norm by hand": row(lambda x: (x - x.mean()) * torch.rsqrt(x.var()), "rsqrt", "of 0 is inf"),
    "out=": row(into, "log.out", "of 0 is inf", of(0.0), line=2),
    "views": row(lambda x: x.view(2, 2).t()[1:].log().contiguous().flatten(), "log", "of 0", of(1.0, 0.0, 2.0, 3.0)),
    "tuple": row(lambda x: tuple(torch.max(x.log(), 0)), "log", "of 0", of(0.0)),
    "complex": row(lambda x: (1j * x).exp() / 0, "div.Tensor", "of abs max 1 (self)", of(1.0)),
    "two helpers down": row(two_helpers_down, "div.Tensor", line=9),
    "a Function": row(of_a_function, "log", given=ONES * 0, line=7),
    "in a comprehension": row(lambda x: torch.stack([row / (row - 1) for row in x]), "div.Tensor"),
    "in a generator": row(a_generator, "div.Tensor", line=3),
}
NO_NUMBERS = {
    "inverse": row(lambda x: torch.linalg.inv_ex(x)[0], "linalg_inv_ex", given=torch.zeros(2, 2)),
    "0/0": row(lambda x: x / x, "div.Tensor", "of 0 and 0 is nan: 0 / 0 is nan: add an epsilon", of(1.0, 0.0)),
    "normalize": row(lambda x: F.normalize(x, dim=-1, eps=0.0), "div.Tensor", "of 0 and 0 is nan", ONES * 0),
    "sqrt": row(lambda x: torch.sqrt(x), "sqrt", "of -1 is nan: there is no root of a negative number", of(1.0, -1.0)),
    "log -1": row(lambda x: x.log(), "log", "of -1 is nan: there is no log of a negative number", of(-1.0)),
    "acos": row(lambda x: x.acos(), "acos", "of 2 is nan: it is defined from -1 to 1", of(2.0)),
    "fraction": row(lambda x: x.pow(0.5) if x.dim() == 3 else x.pow(0.7), "pow.Tensor_Scalar", given=of(-4.0)),
    "masked": row(fully_masked, "_softmax", "is nan, as a row of its operand is -inf throughout (fully masked)", line=3),
    "zeros * inf": row(lambda x: (x > 0) * -INF, "mul.Tensor", "of 0 and -inf is nan", of(1.0, 0.0)),
    "logsumexp": row(lambda x: x.new_full((4,), -INF).log_softmax(0), "_log_softmax", "fully masked"),
    "difference of infinities": row(lambda x: x.new_full((4,), -INF) - -INF, "sub.Tensor"),
    "layer norm": row(lambda x: F.layer_norm(x, (4,), eps=0.0), "native_layer_norm", "its eps is 0"),
    "std": row(lambda x: x.std(), "std.correction", "one element has no", of(3.0)),
    "mean": row(lambda x: x[x > 1].mean(), "mean", "no elements"),
    "cross entropy": row(
        lambda x: F.cross_entropy(x * 2, torch.tensor([-100, -100])), "nll_loss_forward", "all labels are ignored"
    ),
    "in place": row(in_place, "sqrt_", "of -4 is nan", of(1.0), line=3),
}
TABLES = {Cause.OVERFLOW: OVERFLOWS, Cause.SINGULAR: POLES, Cause.INVALID: NO_NUMBERS}
