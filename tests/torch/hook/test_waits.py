"""On a device, the host waits once a step: for the readings and for the norms of the gradients at the same time.

There is no device here: what is copied to the host is there at once, but counts as under way until it, or what came later, is
waited for.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from closeups import operator_of
from notebook import Notebook, learn, model_of, ones, sgd, take_step, watched, watching
from rankwatch.errors import OverflowDetected
from rankwatch.measure import tape

FIRST = 2
"""The first batches: until an optimizer has stepped, it is not known that one will."""


class Device:
    """Its stream, and how often the host has waited for it."""

    def __init__(self) -> None:
        self.waits = 0
        self.queued = 0
        self.done = 0

    def to_host(self, values: Tensor, into: Tensor | None = None) -> tuple[Tensor, Any]:
        self.queued += 1
        return values.clone(), Event(self, self.queued)

    def wait(self) -> None:
        self.waits += 1
        self.done = self.queued


class Event:
    def __init__(self, device: Device, number: int) -> None:
        self.device, self.number = device, number

    def query(self) -> bool:
        return self.number <= self.device.done

    def synchronize(self) -> None:
        self.device.waits += 1
        self.device.done = max(self.device.done, self.number)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made, read = Device(), tape._Buffer.read

    def read_at_once(buffer: Any) -> bool:
        made.wait()
        return read(buffer)

    monkeypatch.setattr("rankwatch.measure.tape.is_far", lambda device: True)
    monkeypatch.setattr("rankwatch.measure.tape.to_host", made.to_host)
    monkeypatch.setattr("rankwatch.hook.step.gradient_look.to_host", made.to_host)
    monkeypatch.setattr("rankwatch.measure.tape._Buffer.read", read_at_once)
    return made


def plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    learn(model(ones()).square().mean(), optimizer)


def clipped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(ones()).square().mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    take_step(optimizer)


def clipped_in_part(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model(ones()).square().mean().backward()
    torch.nn.utils.clip_grad_norm_(model[0].parameters(), 1.0)
    take_step(optimizer)


def trained(**options: Any) -> tuple[Any, torch.optim.Optimizer, Notebook]:
    """A model with a gain of 1 after four batches."""
    model, _, notebook = watching(check="batch", **options)
    optimizer = sgd(model)
    for _ in range(4):
        plain(model, optimizer)
    return model, optimizer, notebook


@pytest.mark.parametrize("options", [{}, {"gradients": True}, {"every": 3}], ids=["guard", "gradients", "every"])
@pytest.mark.parametrize("step", [plain, clipped, clipped_in_part])
def test_one_wait_a_step(
    device: Device, step: Callable[[nn.Module, torch.optim.Optimizer], None], options: dict[str, Any]
) -> None:
    model, detector, notebook = watching(check="batch", **options)
    optimizer = sgd(model)
    waits = []
    for _ in range(8):
        before = device.waits
        step(model, optimizer)
        waits.append(device.waits - before)
    detector.remove()
    assert (detector.fault, set(waits[FIRST:])) == ("", {1})
    parts = 2 if "gradients" in options else 1
    assert [summary.batch for _, summary in notebook.sent] == [batch for batch in range(8) for _ in range(parts)]


def test_none_with_async(device: Device) -> None:
    model, detector, _ = watching(check="async")
    optimizer = sgd(model)
    plain(model, optimizer)
    device.done, device.waits = math.inf, 0  # type: ignore[assignment]  # it is never behind
    for _ in range(4):
        plain(model, optimizer)
    assert (detector.fault, device.waits) == ("", 0)


def test_without_a_guard_a_forward_is_judged_at_its_end(device: Device) -> None:
    model, _, _ = trained(guard=False)
    model[1].gain = math.inf
    with pytest.raises(OverflowDetected):
        model(ones())


def test_a_forward_trips_before_the_weights_change(device: Device) -> None:
    model, optimizer, notebook = trained()
    before = [value.clone() for value in model.parameters()]
    model[1].gain = math.inf
    loss = model(ones()).square().mean()
    loss.backward()
    trip = notebook.trip_of(optimizer.step)
    assert (trip.position.batch, trip.frame.spec.module, trip.culprit.label) == (4, "1", "output")
    assert operator_of(trip).name == "aten.mul.Tensor"
    assert all(map(torch.equal, before, model.parameters()))


def test_a_forward_whose_step_never_comes_trips_in_the_next_one(device: Device) -> None:
    model, _, notebook = trained()
    model[1].gain = math.inf
    model(ones())
    assert notebook.trip_of(model, ones()).position.batch == 4


def test_an_evaluation_is_judged_at_its_end(device: Device) -> None:
    model, _, _ = trained()
    model[1].gain = math.inf
    with torch.no_grad(), pytest.raises(OverflowDetected):
        model(ones())


def test_a_bad_gradient_is_found_by_the_same_wait(device: Device) -> None:
    model, optimizer, notebook = trained()
    model[0].weight.register_hook(lambda gradient: gradient * math.nan)
    trip = notebook.trip_of(plain, model, optimizer)
    assert (trip.position.batch, trip.frame.spec.module, trip.culprit.label) == (4, "0", "weight.grad")
    assert all(bool(value.isfinite().all()) for value in model.parameters())


def test_micro_batches(device: Device) -> None:
    """A forward waits for the numbers of the one before it, which came long ago, unless the host is far ahead."""
    model = model_of()
    optimizer = sgd(model)
    watched(model, check="batch")
    waits = []
    for number in range(16):
        before = device.waits
        model(ones()).square().mean().backward()
        device.done = device.queued if number % 4 < 3 else device.done
        if number % 4 == 3:
            take_step(optimizer)
            waits.append(device.waits)
        else:
            assert number < 4 or device.waits == before
    assert [after - before for before, after in itertools.pairwise(waits[1:])] == [1, 1]
