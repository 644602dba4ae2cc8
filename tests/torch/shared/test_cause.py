"""Real forwards that go bad: which module trips, for which cause, with which evidence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import Calls
from notebook import Gain, first_weight, model_of, sgd, unwatch, watched
from rankwatch.errors import OverflowDetected
from rankwatch.shared.cause import Cause, Trip, classify
from trainings.parts import Root


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
    trip = trip_of(model_of(nn.Identity(), Calls(case.function)), case.given)
    cause, evidence = classify(trip)
    assert trip.operator is not None
    assert (cause, trip.frame.spec.module) == (case.cause, "1"), evidence
    assert case.says in evidence
    assert torch.equal(case.given, before)


def test_a_bad_tensor_that_is_neither_input_nor_weight_is_told() -> None:
    cause, evidence = classify(
        trip_of(Root(lambda self, x: x * self.scale, scale=torch.tensor(float("nan"))), torch.ones(2))
    )
    assert cause is Cause.UPSTREAM
    assert evidence.startswith("aten.mul was given nan (other) that is neither an input nor a weight of this module")


def test_an_operator_in_a_hook_of_the_user_is_found() -> None:
    model = model_of(nn.Linear(4, 4))
    model[0].register_forward_hook(lambda module, args, output: output * 1e39)
    cause, evidence = classify(trip_of(model, torch.ones(2, 4)))
    assert (cause, "1e+39 is inf" in evidence) == (Cause.OVERFLOW, True)


def test_an_input_that_is_overwritten_with_the_output_was_finite_before() -> None:
    trip = trip_of(model_of(nn.Linear(4, 4), Calls(lambda x: x.exp_())), torch.full((2, 4), 1e4))
    cause, evidence = classify(trip)  # by the root's forward, in which the module gets the input that it overwrites
    assert (cause, trip.frame.spec.module) == (Cause.OVERFLOW, "1"), evidence
    assert evidence.startswith("aten.exp_ of ")
    alone = trip_of(Calls(lambda x: x.exp_()), torch.full((2, 4), 1e4))  # there is no forward around it
    cause, evidence = classify(alone)
    assert (cause, alone.operator) == (Cause.OVERFLOW, None)
    assert "inputs and weights were finite; input abs max" in evidence
    model = model_of(nn.Linear(4, 4), Calls(lambda x: x.div_(0)), nn.ReLU(inplace=True))
    assert trip_of(model, torch.ones(2, 4)).frame.spec.module == "1"


def test_an_operator_that_only_read_bad_data_is_no_evidence() -> None:
    trip = trip_of(model_of(nn.Linear(4, 4)), torch.full((2, 4), float("nan")))
    assert (classify(trip)[0], trip.operator) == (Cause.DATA, None)


# --- weights ----------------------------------------------------------------------------------------------------------


def broken(model: nn.Module, name: str, value: float = float("nan")) -> nn.Module:
    """The model with one element of a parameter or buffer broken."""
    tensor = {**dict(model.named_parameters()), **dict(model.named_buffers())}[name]
    with torch.no_grad():
        tensor.view(-1)[0] = value
    return model


class Embedded(nn.Module):
    """As in a ViT of transformers: a parameter of a module around the one that its nan comes to first."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Linear(4, 4)
        self.position_embeddings = nn.Parameter(torch.zeros(1, 4))
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.patches(x) + self.position_embeddings)  # type: ignore[no-any-return]


def attention() -> nn.Module:
    return Root(
        lambda self, x: self.attention(x[None], x[None], x[None])[0], attention=nn.MultiheadAttention(4, 2, batch_first=True)
    )


def listed() -> nn.Module:
    scales = nn.ParameterList([nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))])
    named = nn.ParameterDict({"bias": nn.Parameter(torch.zeros(4))})
    return Root(lambda self, x: x * self.scales[1] + self.named["bias"], scales=scales, named=named)


def tied() -> nn.Module:
    """The embedding is also the head, by a function that no hook sees."""
    embed, head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
    head.weight = embed.weight
    body = nn.Linear(4, 4)
    return Root(
        lambda self, tokens: F.linear(self.body(self.embed(tokens)), self.embed.weight), embed=embed, body=body, head=head
    )


def recurrent(cells: nn.Module) -> nn.Module:
    return Root(lambda self, x: self.cells(x)[0], cells=cells)


def normed() -> nn.Module:
    model: nn.Module = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    return model


WEIGHTS = [
    ("ViT", Embedded, "position_embeddings", "dropout", "position_embeddings of (root) (Embedded) was already nan"),
    ("out_proj", attention, "attention.out_proj.weight", "attention", "weight of attention.out_proj (NonDynamically"),
    ("in_proj", attention, "attention.in_proj_weight", "attention", "in_proj_weight was already nan before this forward"),
    ("ParameterList", listed, "scales.1", "", "1 of scales (ParameterList) was already nan"),
    ("ParameterDict", listed, "named.bias", "", "bias of named (ParameterDict) was already nan"),
    ("GRU", lambda: recurrent(nn.GRU(4, 4)), "cells.weight_hh_l0", "cells", "weight_hh_l0 was already nan"),
    ("LSTM", lambda: recurrent(nn.LSTM(4, 4)), "cells.bias_ih_l0", "cells", "bias_ih_l0 was already nan"),
    ("parametrization", lambda: model_of(normed()), "0.parametrizations.weight.original0", "0.parametrizations.weight", ""),
]


@pytest.mark.parametrize(("model", "name", "module", "says"), [row[1:] for row in WEIGHTS], ids=[row[0] for row in WEIGHTS])
def test_a_bad_weight_is_found_wherever_it_belongs(
    model: Callable[[], nn.Module], name: str, module: str, says: str
) -> None:
    trip = trip_of(broken(model(), name), torch.ones(3, 4))
    cause, evidence = classify(trip)
    assert (cause, trip.frame.spec.module.startswith(module)) == (Cause.WEIGHT, True), (trip.frame.spec.module, evidence)
    assert says in evidence
    assert [one.finite_in for one in trip.weights] == [-1]


def test_a_tied_weight_has_one_name() -> None:
    trip = trip_of(broken(tied(), "embed.weight"), torch.tensor([[2, 3]]), policy="first", modules=("body",))
    cause, evidence = classify(trip)
    assert (cause, [one.module for one in trip.weights]) == (Cause.WEIGHT, ["embed"]), evidence


@pytest.mark.parametrize("check", ["frame", "batch"])
def test_a_weight_of_a_module_that_is_never_called_was_last_finite_in_some_batch(check: str) -> None:
    model = listed()
    _, notes = watched(model, check=check, weights_every=2)
    optimizer = sgd(model)
    for _ in range(5):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    broken(model, "scales.0", float("inf"))
    broken(model, "scales.1", float("nan"))
    with pytest.raises(OverflowDetected):
        model(torch.ones(2, 4))
    (trip,) = notes.trips
    assert [(one.reading.label, one.finite_in) for one in trip.weights] in (
        [("1", 4), ("0", 4)], [("1", 3), ("0", 3)], [("0", 4), ("1", 4)], [("0", 3), ("1", 3)]
    )  # fmt: skip
    assert "last seen finite in batch" in classify(trip)[1]
    assert "bad in batch 5" in classify(trip)[1]


def test_a_frozen_weight_that_went_bad_between_two_batches_was_seen_finite() -> None:
    model = model_of(nn.Linear(4, 4), nn.Linear(4, 2))
    first_weight(model).requires_grad_(False)
    _, notes = watched(model, policy="strict")
    model(torch.ones(2, 4))
    model(torch.ones(2, 4))
    broken(model, "0.weight")
    with pytest.raises(OverflowDetected):
        model(torch.ones(2, 4))
    assert classify(notes.trips[0])[1].startswith(
        "weight was already nan before this forward; last seen finite in batch 1, bad in batch 2"
    )


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("check", ["frame", "batch"])
def test_a_bad_running_mean_is_a_bad_weight(check: str, value: float) -> None:
    model = model_of(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    trip = trip_of(broken(model, "1.running_mean", value), torch.ones(3, 4), check=check)
    cause, evidence = classify(trip)
    assert (cause, trip.frame.spec.module) == (Cause.WEIGHT, "1"), evidence
    assert "running_mean" in evidence


def test_statistics_that_this_forward_made_bad_are_no_evidence() -> None:
    model = model_of(nn.Linear(4, 4), nn.BatchNorm1d(4), Calls(torch.nn.functional.relu))
    trip = trip_of(model, torch.full((3, 4), float("nan")))
    assert classify(trip)[0] is Cause.DATA
    assert trip.weights == ()


def test_a_weight_too_large_for_autocast_is_an_overflow() -> None:
    model = model_of(nn.Linear(64, 4))
    with torch.no_grad():
        first_weight(model).fill_(8e3)
    for check in ("frame", "batch"):
        with torch.autocast("cpu", torch.float16):
            trip = trip_of(model, torch.full((2, 64), 2.33), check=check)
        cause, evidence = classify(trip)
        assert cause is Cause.OVERFLOW
        assert "float16" in evidence
        unwatch()


# --- masks and data ---------------------------------------------------------------------------------------------------


def masked_attention() -> Root:
    """Attention with a mask of -inf that comes with the data."""

    def forward(self: Root, x: Tensor, bias: Tensor) -> Any:
        scores = self.gain(self.query(x) @ self.query(x).t())
        return self.soft(scores, bias) @ x

    soft = Calls(lambda scores, mask: (scores + mask).softmax(-1))
    return Root(forward, query=nn.Linear(4, 4), gain=Gain(), soft=soft)


def bias() -> Tensor:
    return torch.full((3, 3), float("-inf")).triu(1)


@pytest.mark.parametrize("options", [{}, {"check": "batch"}, {"every": 5}, {"policy": "first", "max_frames_to_save": 2}])
@pytest.mark.parametrize("good", [0, 2])
def test_a_mask_is_not_the_data_that_made_an_overflow(good: int, options: dict[str, Any]) -> None:
    model = masked_attention()
    _, notes = watched(model, **options)
    for _ in range(good):
        model(torch.ones(3, 4), bias())
    model.gain.gain = 1e38
    with pytest.raises(OverflowDetected):
        model(torch.ones(3, 4) * 10, bias())
    cause, evidence = classify(notes.trips[0])
    if good or "every" not in options:
        assert cause in (Cause.OVERFLOW, Cause.INVALID), evidence


def test_a_fully_masked_row_is_told_of_a_mask_in_the_first_batch() -> None:
    trip = trip_of(masked_attention(), torch.ones(3, 4), torch.full((3, 3), float("-inf")))
    cause, evidence = classify(trip)
    assert (cause, trip.frame.spec.module) == (Cause.INVALID, "soft")
    assert "fully masked" in evidence


def standardised(self: Root, x: Any, mask: Tensor | None = None) -> Any:
    if isinstance(x, dict):
        x = x["deep"]["x"]
    return self.body((x - x.mean()) / x.std())


BAD = torch.tensor([[1.0, 2.0, 3.0, float("inf")]])
DATA = [
    ("positional", (BAD,), {}, "input[0] of the root module was inf"),
    ("keyword", (), {"x": BAD}, "input[x] of the root module was inf"),
    ("nested", ({"deep": {"x": BAD * 0}},), {}, "input[0][deep][x] of the root module was nan"),
]


@pytest.mark.parametrize("options", [{}, {"check": "batch"}, {"every": 2, "first_batch": 1}])
@pytest.mark.parametrize(("args", "kwargs", "says"), [row[1:] for row in DATA], ids=[row[0] for row in DATA])
def test_bad_data_is_data_whatever_state_it_is_in_later(args: Any, kwargs: Any, says: str, options: dict[str, Any]) -> None:
    trip = trip_of(Root(standardised, body=model_of(nn.Linear(4, 4), nn.Linear(4, 4))), *args, kwargs=kwargs, **options)
    cause, evidence = classify(trip)
    assert (cause, says in evidence) == (Cause.DATA, True), evidence


def test_a_mask_with_a_nan_is_bad_data_though_it_had_infs_before() -> None:
    bad = bias()
    bad[2, 0] = float("nan")
    for options in ({}, {"check": "batch"}, {"every": 5}):
        good = (torch.ones(3, 4), bias())
        trip = trip_of(masked_attention(), torch.ones(3, 4), bad, good=(good, good), **options)
        assert classify(trip)[0] is Cause.DATA
        unwatch()


@pytest.mark.parametrize("options", [{"every": 3}, {"check": "batch"}, {"every": 3, "check": "batch"}, {"check": "async"}])
def test_the_operator_in_the_root_is_found_though_its_inputs_are_not_measured_or_it_is_judged_late(options: Any) -> None:
    x = torch.ones(2, 4)
    detector, notes = watched(Root(lambda self, x, y: self.body(x) / y, body=nn.Linear(4, 4)), **options)
    model = detector.root
    model(x, x)
    with pytest.raises(OverflowDetected):
        _ = model(x, x * 0), model(x, x)
    cause, evidence = classify(notes.trips[0])
    assert (cause, "aten.div of" in evidence) == (Cause.SINGULAR, True), evidence
    assert "(every=K)" not in evidence
