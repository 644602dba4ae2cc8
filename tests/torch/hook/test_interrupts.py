"""A forward that is interrupted: torch calls no hook after a KeyboardInterrupt, and the training goes on."""

from __future__ import annotations

import logging
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from models import Calls
from notebook import Gain, Notebook, model_of, sgd, watched, watching
from rankwatch.errors import OverflowDetected
from rankwatch.hook import running
from rankwatch.hook.detector import Detector
from trainings.parts import Root


class Interrupted(nn.Module):
    """x -> x; raises ``error`` once, if there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.error: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return x


def nested(self: Root, x: Tensor, is_inside: bool = False) -> Any:
    """Calls itself once, and catches what that raises."""
    if not is_inside:
        with suppress(KeyboardInterrupt):
            self(x, is_inside=True)
    return self.inner(x)


def interrupt(*args: object) -> None:
    raise KeyboardInterrupt


def interruptible(**options: object) -> tuple[Any, Interrupted, Detector, Notebook]:
    stop = Interrupted()
    model = model_of(nn.Linear(4, 4), stop, Gain(), nn.Linear(4, 2))
    return model, stop, *watched(model, **options)


def interrupt_forward(model: nn.Module, stop: Interrupted, kind: type[BaseException] = KeyboardInterrupt) -> None:
    stop.error = kind()
    with pytest.raises(kind):
        model(torch.ones(3, 4))


def train(model: nn.Module, batches: int) -> None:
    for _ in range(batches):
        model(torch.ones(3, 4)).sum().backward()


def held(detector: Detector) -> int:
    life = detector._life
    return len(life.current.part.frames) + len(life.loose.part.frames) + len(life.closed)


@pytest.mark.parametrize("check", ["frame", "batch", "async"])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_the_next_forward_is_the_next_batch(kind: type[BaseException], check: str) -> None:
    model, stop, detector, notebook = interruptible(check=check)
    train(model, 2)
    interrupt_forward(model, stop, kind)
    train(model, 5)
    assert detector.position.batch == 7
    assert held(detector) <= 6  # of the last batch
    model[2].gain = math.nan
    trip = notebook.trip_of(train, model, 2)
    assert (trip.position.batch, trip.frame.spec.module) == (8, "2")
    assert {summary.batch for _, summary in notebook.batches} >= {0, 1, 3, 4, 5, 6, 7}
    assert not detector.fault


def test_an_interrupted_call_within_a_call_of_the_root_ends_with_it() -> None:
    model = Root(nested, inner=Interrupted())
    detector, _ = watched(model)
    model(torch.ones(2, requires_grad=True)).sum().backward()
    model.inner.error = KeyboardInterrupt()
    model(torch.ones(2, requires_grad=True)).sum().backward()
    before = detector.position.batch
    for _ in range(3):
        model(torch.ones(2, requires_grad=True)).sum().backward()
    assert (before, detector.position.batch, detector._running.depth) == (1, 4, 0)


def test_a_forward_in_another_thread_is_watched_after_an_interruption() -> None:
    model, stop, detector, _ = interruptible()
    interrupt_forward(model, stop)
    with ThreadPoolExecutor(1) as other:
        other.submit(train, model, 3).result()
    assert detector.position.batch == 3


@pytest.mark.parametrize("where", ["_open_batch", "_call", "end_batch"])
def test_an_interruption_of_our_own_hooks_leaves_nothing_behind(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, detector, notebook = interruptible(check="batch")
    train(model, 2)
    with monkeypatch.context() as patched:
        patched.setattr(detector._forwards, where, interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(torch.ones(3, 4))
    train(model, 3)
    assert held(detector) <= 6
    assert {summary.batch for _, summary in notebook.batches} >= {0, 1, detector.position.batch}
    assert not detector.fault


def test_judging_that_is_interrupted_does_not_hold_the_rank_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, detector, _ = interruptible(check="batch")
    train(model, 1)
    with monkeypatch.context() as patched:
        patched.setattr(detector._settler, "_settle", interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(torch.ones(3, 4))
    train(model, 2)
    assert detector.progress.batch == 3


def test_a_backward_and_a_recomputation_after_an_interruption_belong_to_their_batch() -> None:
    model = Root(
        lambda self, x: self.stop(checkpoint(self.linear, x, use_reentrant=False)),
        linear=nn.Linear(4, 4),
        stop=Interrupted(),
    )
    detector, notebook = watched(model)
    loss = model(torch.ones(3, 4)).sum()
    model.stop.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(3, 4))
    loss.backward()
    assert detector._running.depth == 0
    train(model, 2)
    assert detector.position.batch == 3
    assert (notebook.trips, detector.fault) == ([], "")


def test_a_second_thread_s_forward_is_said_to_be_unwatched_once(caplog: pytest.LogCaptureFixture) -> None:
    inside, done = threading.Event(), threading.Event()

    def slow(x: Tensor) -> Tensor:
        if threading.current_thread() is threading.main_thread():
            inside.set()
            assert done.wait(30)
        return x

    model, detector, notebook = watching(nn.Linear(4, 4), Calls(slow))

    def twice() -> None:
        assert inside.wait(30)
        try:
            train(model, 2)
        finally:
            done.set()

    with caplog.at_level(logging.WARNING), ThreadPoolExecutor(1) as other:
        second = other.submit(twice)
        train(model, 1)
        second.result()
    (said,) = [record.getMessage() for record in caplog.records if "not watched" in record.getMessage()]
    assert "one thread at a time" in said
    assert (detector.position.batch, len(notebook.faults)) == (0, 0)


def test_a_forward_that_is_captured_is_left_alone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    model, _, detector, notebook = interruptible(check="frame")
    optimizer = sgd(model)
    train(model, 1)
    optimizer.step()
    sent = len(notebook.batches)
    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr(torch.cuda, "is_initialized", lambda: True)
        patched.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        train(model, 2)
        optimizer.step()
    assert [record.getMessage() for record in caplog.records if "CUDA graph" in record.getMessage()] == [
        "rankwatch: in MainThread, a forward of the model is captured into a CUDA graph: the graph is not watched"
    ]
    assert (detector.position.batch, len(notebook.batches), detector._steps.done) == (0, sent, 1)
    train(model, 2)
    assert (detector.position.batch, detector.fault) == (2, "")


@pytest.mark.parametrize("is_in_root", [False, True])
def test_a_part_that_is_captured_is_left_alone(
    is_in_root: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def captured(self: Root, x: Tensor) -> Any:
        detector._running.has_device = is_in_root
        with monkeypatch.context() as patched:
            patched.setattr(running, "is_capturing", lambda: True)
            return self.inner(x)

    model, detector, notebook = watching(Root(captured, inner=Gain(math.nan)), nn.Linear(4, 2), check="frame")
    with caplog.at_level(logging.WARNING), pytest.raises(OverflowDetected):
        (model if is_in_root else model[0])(torch.ones(3, 4))
    assert notebook.trips[0].frame.spec.module == "0"
    assert len([record for record in caplog.records if "CUDA graph" in record.getMessage()]) == 1
    assert not detector.fault


def test_direct_calls_after_an_interrupted_forward_do_not_add_to_it_without_end() -> None:
    model, stop, detector, _ = interruptible(check="batch")
    train(model, 1)
    interrupt_forward(model, stop)
    with torch.no_grad():
        for _ in range(2000):
            model[0](torch.ones(3, 4))
    assert (held(detector) <= 600, detector._running.depth, detector.fault) == (True, 0, "")


def test_an_interrupted_step_and_an_interrupted_backward_end_with_the_next_forward() -> None:
    model, _, detector, notebook = interruptible(check="batch")
    train(model, 1)
    output = model(torch.ones(3, 4))
    output.register_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        output.sum().backward()
    optimizer = sgd(model)
    optimizer.register_step_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    train(model, 3)
    assert (detector.position.batch, detector.fault, detector._running.depth) == (4, "", 0)
    model[2].gain = math.nan
    assert notebook.trip_of(train, model, 1).position.batch == 5


def test_an_interruption_as_a_backward_is_noted_leaves_its_forward_to_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, detector, notebook = interruptible(check="batch")
    optimizer = sgd(model)

    def step() -> int:
        x = torch.ones(3, 4)
        for module in model:
            x = module(x)
        x.sum().backward()
        optimizer.step()
        return detector.position.batch

    assert [step(), step()] == [0, 1]
    with monkeypatch.context() as patched:
        patched.setattr(detector._life, "_be_batch", interrupt)
        with pytest.raises(KeyboardInterrupt):
            step()
    assert [step(), step(), step()] == [2, 3, 4]
    assert {summary.batch for _, summary in notebook.batches} >= {0, 1, 2, 3}
    assert not detector.fault
