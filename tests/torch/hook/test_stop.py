"""``stop``: a trip is reported to the training, which ends by its own means; its weights do not change until then."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rankwatch
from notebook import Gain, first_weight, learn, model_of, ones, sgd, watched
from rankwatch.errors import BatchLimitReached, OverflowDetected, TrainingAborted, UsageError

every_check = pytest.mark.parametrize("check", ["frame", "batch", "async"])


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    learn(model(ones()).sum(), optimizer)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *, steps: int) -> None:
    for _ in range(steps):
        step(model, optimizer)


def make() -> tuple[Any, Gain, torch.optim.Optimizer]:
    model = model_of()
    return model, model[1], torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)


@every_check
def test_stop_is_called_once_instead_of_raising(check: str) -> None:
    model, gain, optimizer = make()
    told: list[tuple[TrainingAborted, threading.Thread]] = []
    _, notebook = watched(model, check=check, stop=lambda error: told.append((error, threading.current_thread())))
    step(model, optimizer)
    assert told == []
    before = first_weight(model).clone()
    gain.gain = math.inf
    step(model, optimizer)  # the step is finished
    if check == "async":
        # The numbers may come only in the next batch: then the step was taken, as without ``stop``.
        before = first_weight(model).clone()
        step(model, optimizer)
    step(model, optimizer)
    ((error, thread),) = told
    assert isinstance(error, OverflowDetected)
    assert thread is threading.current_thread()
    assert notebook.trip.position[:2] == (1, 0)
    if check != "async":
        assert torch.equal(first_weight(model), before)


def test_gradients_of_other_models_are_left_to_their_optimizers() -> None:
    model, gain, _ = make()
    other = nn.Linear(2, 2)
    watched(model, stop=lambda error: None)
    gain.gain = math.inf
    model(ones())
    before = other.weight.detach().clone()
    learn(other(torch.ones(2)).sum(), sgd(other))
    assert not torch.equal(other.weight, before)


def test_an_abort_from_outside_calls_stop_at_the_next_hook_and_keeps_the_weights() -> None:
    model, _, optimizer = make()
    told: list[TrainingAborted] = []
    detector, _ = watched(model, stop=told.append)
    before = first_weight(model).clone()
    model(ones()).sum().backward()
    detector.obey(lambda: TrainingAborted("rank 1 it was"))
    assert told == []
    optimizer.step()
    step(model, optimizer)
    assert [str(error) for error in told] == ["rank 1 it was"]
    assert torch.equal(first_weight(model), before)


def test_an_exception_of_stop_reaches_the_training() -> None:
    model, gain, _ = make()

    def stop(error: TrainingAborted) -> None:
        raise KeyboardInterrupt(str(error))

    watched(model, stop=stop)
    gain.gain = math.inf
    with pytest.raises(KeyboardInterrupt, match="tripped"):
        model(ones())


def test_a_gradient_that_trips_calls_stop() -> None:
    model, _, optimizer = make()
    told: list[TrainingAborted] = []
    watched(model, stop=told.append, gradients=True)
    before = first_weight(model).clone()
    (model(ones()).sum() * math.inf).backward()
    optimizer.step()
    assert len(told) == 1
    assert torch.equal(first_weight(model), before)


def test_the_batch_limit_calls_stop() -> None:
    model, _, optimizer = make()
    told: list[TrainingAborted] = []
    watched(model, stop=told.append, abort_after_batch_num=1)
    for _ in range(4):
        step(model, optimizer)
    assert [type(error) for error in told] == [BatchLimitReached]


def test_stop_is_not_called_after_close() -> None:
    model, gain, _ = make()
    told: list[TrainingAborted] = []
    detector, notebook = watched(model, stop=told.append, check="async")
    gain.gain = math.inf
    model(ones())
    detector.remove()
    assert len(notebook.trips) == 1  # it was found all the same
    assert told == []


@every_check
def test_batches_and_steps_continue_in_a_resumed_training(check: str) -> None:
    model, gain, optimizer = make()
    detector, notebook = watched(model, check=check, first_batch=40, trace_batch_nums=[41])
    detector.optimizer_step = 20
    step(model, optimizer)
    step(model, optimizer)
    detector.optimizer_step = 30  # the training says otherwise
    step(model, optimizer)
    gain.gain = math.inf
    with pytest.raises(OverflowDetected):
        train(model, optimizer, steps=2)
    assert [(summary.batch, summary.optimizer_step) for _, summary in notebook.batches][:3] == [(40, 20), (41, 21), (42, 30)]
    assert [frames[0].position.batch for frames in notebook.traces] == [41]
    assert (notebook.trips[0].position.batch, notebook.trips[0].optimizer_step) == (43, 31)


def test_a_wrong_batch_or_step_number_is_refused() -> None:
    with pytest.raises(UsageError, match="first_batch=-1: expected a whole number of at least 0"):
        rankwatch.watch(nn.Linear(2, 2), first_batch=-1)
    with pytest.raises(UsageError, match="stop='now': expected a function that is given the exception"):
        rankwatch.watch(nn.Linear(2, 2), stop="now")  # type: ignore[arg-type]
    with rankwatch.watch(nn.Linear(2, 2)) as watch:
        assert watch.optimizer_step == 0
        with pytest.raises(UsageError, match=r"optimizer_step=1\.5: expected a whole number of at least 0"):
            watch.optimizer_step = 1.5  # type: ignore[assignment]


@every_check
def test_summaries_are_the_readings_of_the_last_batch(check: str) -> None:
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    with rankwatch.watch(model, check=check, gradients=True) as watch:
        assert watch.summaries() == {}
        inputs: list[Tensor] = []
        for factor in (1.0, 2.0, 3.0):
            inputs.append(factor * torch.arange(1.0, 5.0))
            model(inputs[-1]).sum().backward()
        model.eval()
        model(torch.ones(4))  # no batch
        found = watch.summaries()
    last = inputs[-1]
    assert found["abs_max/0/input[0]"] == last.abs().max().item()
    assert found["abs_min/0/input[0]"] == last.abs().min().item()
    assert found["abs_max/(root)/input[0]"] == last.abs().max().item()
    assert {"abs_max/0 (call 2)/output", "abs_min/1/output"} <= found.keys()
    assert found["abs_max/(root)/grad_output"] == 1.0
