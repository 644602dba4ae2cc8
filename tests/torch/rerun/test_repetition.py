"""A repeated forward changes nothing, is bounded, and is left alone where it might not be safe."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import rankwatch
from closeups import operator_of
from models import Calls
from notebook import first_weight, model_of, watched
from rankwatch.rerun import careful
from rankwatch.rerun import close_up_runs as closeup
from rankwatch.shared.types.trip import Trip
from trainings.parts import Root


def trip_of(model: nn.Module, *args: Any) -> Trip:
    _, notes = watched(model)
    return notes.trip_of(model, *args)


RUNS: list[str] = []
"""What forwards write down; an attribute of theirs would be restored after a repetition."""


@pytest.fixture(autouse=True)
def _forget_runs() -> None:
    RUNS.clear()


def count(self: Any, x: Tensor) -> Tensor:
    self.calls += 1
    RUNS.append("counted")
    self.statistics = self.statistics + 1
    return torch.log(F.dropout(self.norm(x), 0.5) * 0)


def counted() -> Root:
    """Counts its forwards, and has state of each kind."""
    model = Root(count, calls=0, norm=nn.BatchNorm1d(4))
    model.register_buffer("statistics", torch.zeros(1))
    return model


def test_buffers_and_random_state_are_as_after_one_forward() -> None:
    model, alone = counted(), counted()
    alone.load_state_dict(model.state_dict())
    torch.manual_seed(7)
    alone(torch.ones(3, 4))
    drawn = torch.rand(3)
    torch.manual_seed(7)
    trip = trip_of(model, torch.ones(3, 4))
    assert torch.equal(torch.rand(3), drawn)
    assert (operator_of(trip).name, RUNS.count("counted")) == ("aten.log.default", 2 + closeup.RUNS + len(closeup.WIDE))
    assert model.calls == 1
    for name, value in alone.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


def litter(x: Tensor) -> Tensor:
    """Makes more garbage than Python leaves uncollected, and notes the collections."""
    before = sum(generation["collections"] for generation in gc.get_stats())
    for _ in range(10 * gc.get_threshold()[0]):
        cycle: list[Any] = []
        cycle.append(cycle)
    after = sum(generation["collections"] for generation in gc.get_stats())
    RUNS.append("collected" if after > before else "left")
    return torch.log(x * 0)


def test_no_garbage_is_collected_in_the_time_of_a_repetition() -> None:
    assert trip_of(Calls(litter), torch.ones(2)).operator is not None
    assert RUNS[0] == "collected"
    assert set(RUNS[1:]) == {"left"}
    assert gc.isenabled()


def test_a_parameter_is_written_once() -> None:
    def write(self: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.scale.add_(1)
        return torch.log(x * 0)

    model = Root(write, scale=nn.Parameter(torch.ones(1)))
    assert trip_of(model, torch.ones(2)).operator is None
    assert model.scale.item() == 2.0


def reduce(x: Tensor) -> Tensor:
    """Communicates, and catches all that is raised meanwhile."""
    y = x.clone()
    for _ in range(2):
        try:
            dist.all_reduce(y)
        except BaseException as error:  # noqa: BLE001  as a careless user does
            RUNS.append(str(error))
    return torch.log(y * 0)


@pytest.mark.usefixtures("one_rank")
def test_a_repetition_stops_before_it_communicates() -> None:
    assert trip_of(Calls(reduce), torch.ones(2)).operator is None
    assert [text.startswith("it communicates by c10d.allreduce_") for text in RUNS] == [True, True]


def test_a_repetition_ends_after_some_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    def loop(self: Any, x: Tensor) -> Tensor:
        self.calls += 1
        while self.calls > 1:
            x = x + 1
            RUNS.append("round")
        return torch.log(x * 0)

    monkeypatch.setattr(careful, "MAX_OPERATORS", 50)
    assert trip_of(Root(loop, calls=0), torch.ones(2)).operator is None
    assert RUNS.count("round") == 50


def test_a_module_that_needs_gradients_has_them() -> None:
    def slope(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(x.sqrt().sum(), x, create_graph=True)
        return slope

    assert operator_of(trip_of(Calls(slope), torch.zeros(2))).name == "aten.div.Tensor"


def test_a_forward_that_fails_or_is_finite_the_second_time_has_no_operator() -> None:
    def fail(self: Any, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 1:
            raise RuntimeError("only once")
        return torch.log(x * 0)

    assert trip_of(Root(fail, calls=0), torch.ones(2)).operator is None


def test_a_repetition_makes_no_frames() -> None:
    def mark(self: Root, x: Tensor) -> Tensor:
        y = self.inner(x)
        rankwatch.detect_overflow(y, "after inner")
        return torch.log(y * 0)

    trip = trip_of(model_of(Root(mark, inner=nn.Linear(2, 2))), torch.ones(3, 2))
    assert trip.operator is not None
    assert [frame.spec.module for frame in trip.frames] == ["0.inner", "0"]
    assert trip.position.frame == 1


def test_shards_are_not_repeated() -> None:
    model = counted()
    model.__class__ = type("FSDPModule", (Root,), {})
    assert trip_of(model, torch.ones(3, 4)).operator is None
    assert model.calls == 1


@pytest.mark.parametrize("cached", [True, False])
def test_autocast_is_as_it_was(cached: bool) -> None:
    model = model_of(nn.Linear(4, 4, bias=False))
    with torch.no_grad():
        first_weight(model).fill_(1e5)
    with torch.autocast("cpu", torch.float16, cache_enabled=cached):
        trip = trip_of(model, torch.ones(2, 4))
        assert torch.is_autocast_cache_enabled() is cached
    assert (operator_of(trip).name, operator_of(trip).operands) == ("aten._to_copy.default", (1e5,))


def test_an_error_in_the_evidence_costs_the_evidence_and_not_the_trip(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rankwatch.judge.evidence.repeat", lambda *_: 1 / 0)
    model = nn.Sequential(nn.Linear(2, 2), Calls(lambda x: x / 0))
    detector, seen = watched(model)
    trip = seen.trip_of(model, torch.ones(1, 2))
    assert (detector.fault, trip.operator) == ("", None)
    assert "the trip is reported without it" in caplog.text
