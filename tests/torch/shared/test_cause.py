"""Real forwards that go bad: which module trips, for which cause, with which evidence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import notebook
from notebook import model_of, watched
from rankwatch.errors import OverflowDetected
from rankwatch.shared.cause import Cause, Trip, classify


@pytest.fixture(autouse=True)
def _unwatch() -> Iterator[None]:
    yield
    notebook.unwatch()


class Do(nn.Module):
    """x -> what ``function`` makes of it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def trip_of(model: nn.Module, *args: Any, good: tuple[Any, ...] = (), **options: Any) -> Trip:
    """The trip of a training that runs forwards with ``good`` arguments first, then one with ``args``."""
    kwargs = options.pop("kwargs", {})
    _, notes = watched(model, **options)
    for one in good:
        model(*one)
    with pytest.raises(OverflowDetected):
        model(*args, **kwargs)
    return notes.trips[-1]


@dataclass(frozen=True)
class Case:
    name: str
    function: Callable[[Tensor], Any]
    given: Tensor = field(default_factory=lambda: torch.ones(2, 4))
    cause: Cause = Cause.INVALID
    says: str = ""

    def __str__(self) -> str:
        return self.name


def of(*values: float) -> Tensor:
    return torch.tensor(values)


def masked(scores: Tensor) -> Tensor:
    return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool), float("-inf")).softmax(-1)


def causal(scores: Tensor) -> Tensor:
    """A usual mask, and an overflow in the scores below it."""
    mask = torch.full(scores.shape, float("-inf")).triu(1)
    return (scores.exp() + mask).softmax(-1)


def in_place(x: Tensor) -> Tensor:
    y = x + 1
    return y.sub_(3).sqrt_()


def into(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    torch.log(x, out=out)
    return out


OVERFLOW, SINGULAR, INVALID = Cause.OVERFLOW, Cause.SINGULAR, Cause.INVALID

CASES = [
    Case(
        "exp",
        torch.exp,
        of(1.0, 93.2),
        OVERFLOW,
        "aten.exp of 93.2 is inf, as float32 ends at 3.40e+38: subtract the largest",
    ),
    Case("exp2", torch.exp2, of(200.0), OVERFLOW, "aten.exp2 of 200 is inf"),
    Case("expm1", torch.expm1, of(100.0), OVERFLOW, "aten.expm1 of 100"),
    Case("sinh", torch.sinh, of(-100.0), OVERFLOW, "aten.sinh of -100"),
    Case("product", lambda x: x * 1e25, of(1e20), OVERFLOW, "aten.mul of 1e+20 and 1e+25 is inf"),
    Case("square", lambda x: x**2, of(0.0, 1e20), OVERFLOW, "aten.pow of 1e+20 and 2 is inf"),
    Case("sum", lambda x: x.sum(), of(3e38, 3e38), OVERFLOW, "aten.sum of abs max 3.00e+38 (self) is inf"),
    Case("bf16 sum", lambda x: x.bfloat16().sum(), of(3e38, 3e38), OVERFLOW, "bfloat16 ends at 3.39e+38"),
    Case("half", lambda x: x.half(), of(1.0, 1e5), OVERFLOW, "aten._to_copy of 100000 is inf, as float16 ends at 6.55e+04"),
    Case(
        "half matmul", lambda x: x.half() @ x.half().t(), torch.full((2, 8), 200.0), OVERFLOW, "aten.mm of abs max 2.00e+02"
    ),
    Case("sum of both signs", lambda x: x @ of(1e38, -1e38), torch.full((2, 2), 1e20), OVERFLOW, ""),
    Case("scaled past the end", lambda x: x / 1e-30, of(1e20), OVERFLOW, "aten.div of 1e+20 and 1e-30 is inf"),
    Case("log 0", torch.log, of(1.0, 0.0), SINGULAR, "aten.log of 0 is inf: clamp what goes in, or add an epsilon"),
    Case("log1p", torch.log1p, of(-1.0), SINGULAR, "aten.log1p of -1"),
    Case("1/0", lambda x: 1 / x, of(2.0, 0.0), SINGULAR, "aten.reciprocal of 0 is inf"),
    Case("x/0", lambda x: x / 0.0, of(2.0), SINGULAR, "aten.div of 2 and 0 is inf: add an epsilon to the divisor"),
    Case("x/tiny", lambda x: 3.0 / x, of(1e-40), SINGULAR, "aten.reciprocal of 9.99995e-41"),
    Case("rsqrt 0", torch.rsqrt, of(0.0), SINGULAR, "aten.rsqrt of 0 is inf: add an epsilon below the root"),
    Case("0 ** -1", lambda x: x**-1.5, of(4.0, 0.0), SINGULAR, "aten.pow of 0 and -1.5 is inf"),
    Case("atanh 1", torch.atanh, of(1.0), SINGULAR, "aten.atanh of 1"),
    Case("logit 1", torch.logit, of(1.0), SINGULAR, "aten.logit of 1"),
    Case("digamma", torch.digamma, of(0.0), SINGULAR, "aten.digamma of 0"),
    Case("entropy of 0", lambda x: x * x.log(), of(0.5, 0.0), SINGULAR, "aten.log of 0 is inf"),
    Case("0/0", lambda x: x / x, of(1.0, 0.0), INVALID, "aten.div of 0 and 0 is nan: 0 / 0 is nan: add an epsilon"),
    Case("normalize", lambda x: F.normalize(x, dim=-1, eps=0.0), torch.zeros(2, 4), INVALID, "aten.div of 0 and 0 is nan"),
    Case("sqrt", torch.sqrt, of(1.0, -1.0), INVALID, "aten.sqrt of -1 is nan: there is no root of a negative number"),
    Case("log -1", torch.log, of(-1.0), INVALID, "aten.log of -1 is nan: there is no log of a negative number"),
    Case("acos", torch.acos, of(2.0), INVALID, "aten.acos of 2 is nan: it is defined from -1 to 1"),
    Case("fraction", lambda x: x**0.5, of(-4.0), INVALID, ""),
    Case(
        "masked", masked, cause=INVALID, says="aten._softmax is nan, as a row of its self is -inf throughout (fully masked)"
    ),
    Case("zeros * inf", lambda x: (x > 0) * float("-inf"), of(1.0, 0.0), INVALID, "aten.mul of 0 and -inf is nan"),
    Case("a mask is no origin", causal, of(1.0, 93.2).expand(2, 2), OVERFLOW, "aten.exp of 93.2 is inf"),
    Case("manual softmax", lambda x: x.exp() / x.exp().sum(), of(1.0, 100.0), OVERFLOW, "aten.exp of 100 is inf"),
    Case("logsumexp", lambda x: x.new_full((4,), float("-inf")).log_softmax(0), cause=INVALID, says="fully masked"),
    Case("layer norm", lambda x: F.layer_norm(x, (4,), eps=0.0), cause=INVALID, says="its eps is 0"),
    Case("std", lambda x: x.std(), of(3.0), INVALID, "one element has no"),
    Case("mean", lambda x: x[:0].mean(), cause=INVALID, says="no elements"),
    Case(
        "cross entropy",
        lambda x: F.cross_entropy(x, torch.tensor([-100, -100])),
        cause=INVALID,
        says="all labels are ignored",
    ),
    Case("in place", in_place, of(1.0), INVALID, "aten.sqrt_ of -1 is nan"),
    Case("out=", into, of(0.0), SINGULAR, "aten.log of 0 is inf"),
    Case(
        "views",
        lambda x: x.view(2, 2).t()[1:].log().contiguous().flatten(),
        of(1.0, 0.0, 2.0, 3.0),
        SINGULAR,
        "aten.log of 0",
    ),
    Case("tuple", lambda x: tuple(torch.max(x.log(), 0)), of(0.0), SINGULAR, "aten.log of 0"),
    Case("inf - inf", lambda x: x.exp() - x.exp(), of(100.0), OVERFLOW, "aten.exp of 100 is inf"),
    Case("a number of the code", lambda x: x * float("inf"), of(2.0), OVERFLOW, "the code gives it inf"),
    Case(
        "float16 mean of squares",
        lambda x: x.half().pow(2).mean(-1),
        torch.full((2, 4), 300.0),
        OVERFLOW,
        "aten.pow of 300 and 2",
    ),
    Case("complex", lambda x: (1j * x).exp() / 0, of(1.0), SINGULAR, "aten.div of abs max 1.00e+00 (self)"),
    Case("sparse", lambda x: (x.to_sparse() * 1e20).to_dense(), of(1e20, 0.0), OVERFLOW, "aten.mul"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_operator_is_found_by_repeating_the_forward(case: Case) -> None:
    before = case.given.clone()
    trip = trip_of(model_of(nn.Identity(), Do(case.function)), case.given)
    cause, evidence = classify(trip)
    assert trip.operator is not None
    assert (cause, trip.frame.spec.module) == (case.cause, "1"), evidence
    assert case.says in evidence
    assert torch.equal(case.given, before)
