"""A repeated forward changes nothing, is bounded, and is left alone where it might not be safe."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import notebook
import rankwatch
from models import Calls
from notebook import model_of, watched
from rankwatch.errors import OverflowDetected
from rankwatch.rerun import careful, closeup
from rankwatch.shared.cause import Trip


def trip_of(model: nn.Module, *args: Any) -> Trip:
    _, notes = watched(model)
    with pytest.raises(OverflowDetected):
        model(*args)
    (trip,) = notes.trips
    return trip


RUNS: list[str] = []
"""What forwards write down; an attribute of theirs would be restored after a repetition."""


@pytest.fixture(autouse=True)
def _forget_runs() -> None:
    RUNS.clear()


class Counted(nn.Module):
    """Counts its forwards, and has state of each kind."""

    statistics: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("statistics", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        RUNS.append("counted")
        self.statistics = self.statistics + 1
        return torch.log(F.dropout(self.norm(x), 0.5) * 0)


def test_buffers_and_random_state_are_as_after_one_forward() -> None:
    model, alone = Counted(), Counted()
    alone.load_state_dict(model.state_dict())
    torch.manual_seed(7)
    alone(torch.ones(3, 4))
    drawn = torch.rand(3)
    torch.manual_seed(7)
    trip = trip_of(model, torch.ones(3, 4))
    assert torch.equal(torch.rand(3), drawn)
    assert trip.operator is not None
    assert (trip.operator.name, RUNS.count("counted")) == ("aten.log.default", 2 + closeup.RUNS + len(closeup.WIDE))
    assert model.calls == 1
    for name, value in alone.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


class Litters(nn.Module):
    """Makes more garbage than Python leaves uncollected, and notes the collections."""

    def forward(self, x: Tensor) -> Tensor:
        before = sum(generation["collections"] for generation in gc.get_stats())
        for _ in range(10 * gc.get_threshold()[0]):
            cycle: list[Any] = []
            cycle.append(cycle)
        after = sum(generation["collections"] for generation in gc.get_stats())
        RUNS.append("collected" if after > before else "left")
        return torch.log(x * 0)


def test_no_garbage_is_collected_in_the_time_of_a_repetition() -> None:
    trip = trip_of(Litters(), torch.ones(2))
    assert trip.operator is not None
    assert RUNS[0] == "collected"
    assert set(RUNS[1:]) == {"left"}
    assert gc.isenabled()


class Writes(nn.Module):
    """Its forward writes to a parameter, which a repetition must not."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.scale.add_(1)
        return torch.log(x * 0)


def test_a_parameter_is_written_once() -> None:
    model = Writes()
    assert trip_of(model, torch.ones(2)).operator is None
    assert model.scale.item() == 2.0


class Reduces(nn.Module):
    """Its forward communicates, and catches all that is raised meanwhile."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.clone()
        for _ in range(2):
            try:
                dist.all_reduce(y)
            except BaseException as error:  # noqa: BLE001  as a careless user does
                RUNS.append(str(error))
        return torch.log(y * 0)


def test_a_repetition_stops_before_it_communicates() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        model = Reduces()
        trip = trip_of(model, torch.ones(2))
    finally:
        dist.destroy_process_group()
    assert trip.operator is None
    assert [text.startswith("it communicates by c10d.allreduce_") for text in RUNS] == [True, True]


class Loops(nn.Module):
    """Its second forward takes very long."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        while self.calls > 1:
            x = x + 1
            RUNS.append("round")
        return torch.log(x * 0)


def test_a_repetition_ends_after_some_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(careful, "MAX_OPERATORS", 50)
    model = Loops()
    assert trip_of(model, torch.ones(2)).operator is None
    assert RUNS.count("round") == 50


class NeedsGradients(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(x.sqrt().sum(), x, create_graph=True)
        return slope


def test_a_module_that_needs_gradients_has_them() -> None:
    trip = trip_of(NeedsGradients(), torch.zeros(2))
    assert trip.operator is not None
    assert trip.operator.name == "aten.div.Tensor"


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 1:
            raise RuntimeError("only once")
        return torch.log(x * 0)


def test_a_forward_that_fails_or_is_finite_the_second_time_has_no_operator() -> None:
    assert trip_of(Fails(), torch.ones(2)).operator is None


class Marks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        rankwatch.detect_overflow(y, "after inner")
        return torch.log(y * 0)


def test_a_repetition_makes_no_frames() -> None:
    model = model_of(Marks())
    _, notes = watched(model)
    with pytest.raises(OverflowDetected):
        model(torch.ones(3, 2))
    (trip,) = notes.trips
    assert trip.operator is not None
    assert [frame.spec.module for frame in trip.frames] == ["0.inner", "0"]
    assert trip.position.frame == 1


def test_shards_are_not_repeated() -> None:
    model = Counted()
    model.__class__ = type("FSDPModule", (Counted,), {})
    assert trip_of(model, torch.ones(3, 4)).operator is None
    assert model.calls == 1


@pytest.mark.parametrize("cached", [True, False])
def test_autocast_is_as_it_was(cached: bool) -> None:
    model = model_of(nn.Linear(4, 4, bias=False))
    with torch.no_grad():
        notebook.first_weight(model).fill_(1e5)
    with torch.autocast("cpu", torch.float16, cache_enabled=cached):
        trip = trip_of(model, torch.ones(2, 4))
        assert torch.is_autocast_cache_enabled() is cached
    assert trip.operator is not None
    assert (trip.operator.name, trip.operator.operands) == ("aten._to_copy.default", (1e5,))


def test_an_error_in_the_evidence_costs_the_evidence_and_not_the_trip(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rankwatch.judge.evidence.repeat", lambda *_: 1 / 0)
    model = nn.Sequential(nn.Linear(2, 2), Calls(lambda x: x / 0))
    detector, seen = watched(model)
    with pytest.raises(OverflowDetected):
        model(torch.ones(1, 2))
    assert (detector.fault, seen.trips[0].operator) == ("", None)
    assert "the trip is reported without it" in caplog.text
