"""Real forwards that go bad: which module trips, for which cause, with which evidence.

``rerun/test_mechanisms.py`` has what each operator's evidence is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import Calls
from notebook import Gain, first_weight, model_of, sgd, unwatch, watched
from rankwatch.shared.types.trip import Cause, Trip
from rankwatch.shared.words.cause import classify
from trainings.parts import Root


def trip_of(model: nn.Module, *args: Any, good: tuple[Any, ...] = (), **options: Any) -> Trip:
    """The trip of a training that runs forwards with ``good`` arguments first, then one with ``args``."""
    kwargs = options.pop("kwargs", {})
    _, notes = watched(model, **options)
    for one in good:
        model(*one)
    return notes.trip_of(partial(model, **kwargs), *args)


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
    trip = notes.trip_of(model, torch.ones(2, 4))
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
    assert classify(notes.trip_of(model, torch.ones(2, 4)))[1].startswith(
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
    cause, evidence = classify(notes.trip_of(model, torch.ones(3, 4) * 10, bias()))
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
    cause, evidence = classify(notes.trip_of(lambda: (model(x, x * 0), model(x, x))))
    assert (cause, "aten.div of" in evidence) == (Cause.SINGULAR, True), evidence
    assert "(every=K)" not in evidence
