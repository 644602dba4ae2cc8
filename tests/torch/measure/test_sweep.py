"""A parameter that goes bad is found in the next batch, also if no output shows it."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from notebook import Notebook, watched
from rankwatch.errors import OverflowDetected
from rankwatch.shared.types.frame import Kind
from rankwatch.shared.types.trip import Cause, Trip
from rankwatch.shared.words.cause import classify

BATCHES, FAULT_AFTER = 8, 4


class Swallow(nn.Module):
    """Uses its weight, and hides what is not finite in it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.nan_to_num(functional.linear(x, self.weight), posinf=1.0, neginf=1.0)


class Apart(nn.Module):
    """Its weights are in modules that are never called."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.eye(4)), nn.Parameter(torch.eye(4))])
        self.table = nn.Embedding(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.linear(functional.linear(x, self.parts[0]), self.parts[1])
        return torch.nan_to_num(functional.linear(x, self.table.weight), posinf=1.0, neginf=1.0)


class Attention(nn.Module):
    """The fused attention of the CPU gives a finite output for a query of nan."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Parameter(torch.eye(4)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(0)
        q, k, v = (functional.linear(x, weight) for weight in (self.q, self.k, self.v))
        return torch.nan_to_num(functional.scaled_dot_product_attention(q, k, v)).squeeze(0)


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(100, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.table(torch.tensor([0, 1, 2]))
        return out


class Model(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 4), inner, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.inner(self.first(x)))
        return out


def train(model: nn.Module, name: str, bad: float, **options: Any) -> Notebook:
    """One element of the parameter goes bad in the optimizer step after batch FAULT_AFTER."""
    detector, notebook = watched(model, **options)
    optimizer = torch.optim.SGD([model.get_parameter(name)], 1e-3)
    with suppress(OverflowDetected):
        for batch in range(BATCHES):
            model(torch.ones(3, 4)).sum().backward()
            if batch == FAULT_AFTER:
                with torch.no_grad():
                    model.get_parameter(name)[-1, -1] = bad
            optimizer.step()
            optimizer.zero_grad()
    assert detector.fault == ""
    return notebook


def trip_of(model: nn.Module, name: str, bad: float, **options: Any) -> Trip:
    (trip,) = train(model, name, bad, **options).trips
    return trip


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("inner", "name", "module"),
    [
        (Swallow, "inner.weight", "inner"),
        (Apart, "inner.parts.1", "inner.parts"),
        (Apart, "inner.table.weight", "inner.table"),
        (Attention, "inner.q", "inner"),
        (Rows, "inner.table.weight", "inner.table"),
    ],
)
def test_a_weight_that_no_output_shows(inner: type[nn.Module], name: str, module: str, bad: float) -> None:
    trip = trip_of(Model(inner()), name, bad)
    assert (trip.position.batch, trip.frame.spec.module) == (FAULT_AFTER + 1, module)
    assert (trip.culprit.kind, trip.culprit.label) == (Kind.PARAMETER, name.rpartition(".")[2])
    assert classify(trip)[0] is Cause.WEIGHT


@pytest.mark.parametrize("options", [{"check": "batch"}, {"weights_every": 0}, {"weights_every": 1000}], ids=str)
@pytest.mark.parametrize(("inner", "name"), [(Swallow, "inner.weight"), (Apart, "inner.table.weight")])
def test_in_the_next_batch_however_it_is_watched(inner: type[nn.Module], name: str, options: dict[str, Any]) -> None:
    trip = trip_of(Model(inner()), name, math.nan, **options)
    assert (trip.position.batch, trip.frame.spec.module) == (FAULT_AFTER + 1, name.rpartition(".")[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64], ids=str)
def test_in_each_dtype(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Identity())
    model.register_parameter("unseen", nn.Parameter(torch.full((3, 4), 6e4).to(dtype)))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    _, notebook = watched(model, weights_every=1000)
    for _ in range(3):
        model(torch.ones(1))
        optimizer.step()
    assert not notebook.trips
    with torch.no_grad():
        model.get_parameter("unseen")[-1, -1] = -math.inf
    assert notebook.trip_of(model, torch.ones(1)).culprit.label == "unseen"


def test_at_the_latest_in_the_next_full_batch() -> None:
    trip = trip_of(Model(Swallow()), "inner.weight", math.nan, every=3)
    assert (trip.position.batch, trip.frame.spec.module) == (6, "inner")


def test_with_async_a_batch_later() -> None:
    trip = trip_of(Model(Apart()), "inner.table.weight", math.nan, check="async")
    assert (trip.position.batch, trip.frame.spec.module) == (FAULT_AFTER + 1, "inner.table")


def test_memory_that_is_never_used_does_not_trip() -> None:
    model = Model(nn.Identity())
    model.inner.register_parameter("unused", nn.Parameter(torch.ones(4, 4)))
    model.add_module("never_called", nn.Linear(4, 4))
    with torch.no_grad():
        model.get_parameter("never_called.weight").fill_(math.nan)
    notebook = train(model, "inner.unused", 1.0)
    assert not notebook.trips
    assert {frame.spec.module for frame in notebook.frames()} == {"", "first", "inner", "last"}


def test_where_nothing_trips_it_is_recorded_once() -> None:
    notebook = train(Model(Apart()), "inner.table.weight", math.nan, policy="off")
    seen = [batch for batch in range(BATCHES) if "inner.table" in {f.spec.module for f in notebook.frames(batch)}]
    assert seen == [FAULT_AFTER + 1]


class Many(nn.Module):
    """More small parameters than are looked at together, of three dtypes; the sum of their values is beyond each dtype."""

    def __init__(self) -> None:
        super().__init__()
        dtypes = (torch.float32, torch.bfloat16, torch.float16)
        self.parts = nn.ModuleList(nn.Module() for _ in range(900))
        for number, part in enumerate(self.parts):
            dtype = dtypes[number % 3]
            part.weight = nn.Parameter(torch.full((number % 5,), torch.finfo(dtype).max / 2, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize("number", [1, 767, 768, 899])
def test_a_bad_one_among_many_small_parameters_is_named(number: int) -> None:
    model = Many()
    _, notebook = watched(model)
    model(torch.ones(1))
    assert not notebook.trips
    with torch.no_grad():
        model.get_parameter(f"parts.{number}.weight")[-1] = math.nan
    assert notebook.trip_of(model, torch.ones(1)).frame.spec.module == f"parts.{number}"


@pytest.mark.parametrize("change", ["moved", "wider", "larger", "frozen", "replaced"])
def test_a_parameter_that_is_not_as_it_was_is_looked_at_still(change: str) -> None:
    model = nn.Sequential(nn.Identity())
    model.register_parameter("unseen", nn.Parameter(torch.ones(8)))
    other = nn.Parameter(torch.ones(8))
    model.register_parameter("other", other)
    detector, notebook = watched(model, weights_every=1000)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with suppress(OverflowDetected):
        for batch in range(8):
            if batch == 3:
                new = {"wider": torch.ones(8, dtype=torch.float64), "larger": torch.ones(100, 100)}.get(
                    change, torch.ones(8)
                )
                if change == "replaced":
                    model.unseen = nn.Parameter(new)
                elif change != "frozen":
                    model.get_parameter("unseen").data = new
                other.requires_grad_(change != "frozen")
            if batch == 5:
                with torch.no_grad():
                    model.get_parameter("unseen").view(-1)[-1] = math.nan
            optimizer.step()
            model(torch.ones(2, requires_grad=True)).sum().backward()
    assert detector.fault == ""
    (trip,) = notebook.trips
    assert (trip.position.batch, trip.culprit.label) == (5, "unseen")
