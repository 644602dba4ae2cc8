"""Each batch tells the norm of the gradients in the last optimizer step before it, as the training would compute it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from notebook import Notebook, model_of, ones, unwatch, watched
from rankwatch.shared.frame import NO_NORM

CLIPPED = 0.01


@pytest.fixture(autouse=True)
def _unwatched() -> Iterator[None]:
    yield
    unwatch()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def norm_of(model: nn.Module) -> float:
    gradients = [value.grad.double().flatten() for value in model.parameters() if value.grad is not None]
    return float(torch.linalg.vector_norm(torch.cat(gradients)))


def norms(notebook: Notebook) -> list[float]:
    """By batch: all parts of a batch tell the same."""
    by_batch: dict[int, set[float]] = {}
    for _, summary in notebook.batches:
        by_batch.setdefault(summary.batch, set()).add(summary.gradient_norm)
    assert all(len(found) == 1 for found in by_batch.values())
    return [found.pop() for found in by_batch.values()]


def backward(model: nn.Module, number: int = 0) -> None:
    (model(ones() * (number + 1)).square().mean()).backward()


@pytest.mark.parametrize("clip", [None, CLIPPED], ids=["whole", "clipped"])
@pytest.mark.parametrize(
    "options",
    [{}, {"check": "async"}, {"gradients": True}, {"every": 3}, {"check": "batch"}],
    ids=["default", "async", "gradients", "every", "batch"],
)
def test_each_batch_has_the_norm_of_the_step_before(options: dict[str, Any], clip: float | None) -> None:
    model = model_of()
    optimizer = sgd(model)
    _, notebook = watched(model, **options)
    expected = [NO_NORM]
    for number in range(5):
        backward(model, number)
        expected.append(norm_of(model))
        if clip is not None:
            clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    for _ in range(2):  # with "async", a batch is sent once the next one has begun
        backward(model)
    assert norms(notebook)[:6] == pytest.approx(expected, rel=1e-5)


def test_batches_whose_gradients_are_accumulated_tell_of_the_same_step() -> None:
    model = model_of()
    optimizer = sgd(model)
    _, notebook = watched(model)
    expected = [NO_NORM, NO_NORM]
    for _ in range(2):
        for number in range(2):
            backward(model, number)
        expected += [norm_of(model)] * 2
        optimizer.step()
        optimizer.zero_grad()
    for number in range(2):
        backward(model, number)
    assert norms(notebook) == pytest.approx(expected, rel=1e-5)


def test_several_optimizers_make_one_step() -> None:
    model = model_of()
    optimizers = [sgd(model[0]), sgd(model[2])]
    _, notebook = watched(model)
    expected = [NO_NORM]
    for number in range(3):
        backward(model, number)
        expected.append(norm_of(model))
        clip_grad_norm_(model[0].parameters(), CLIPPED)  # one of them clips
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
    backward(model)
    assert norms(notebook) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("keyword", [True, False])
def test_another_norm_than_the_euclidean_is_not_told(*, keyword: bool) -> None:
    model = model_of()
    optimizer = sgd(model)
    _, notebook = watched(model)
    for number in range(2):
        backward(model, number)
        if keyword:
            clip_grad_norm_(model.parameters(), CLIPPED, norm_type=math.inf)
        else:
            clip_grad_norm_(model.parameters(), CLIPPED, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert norms(notebook) == [NO_NORM, NO_NORM]


@pytest.mark.parametrize("clips", [True, False])
def test_under_a_loss_scaler_it_is_known_where_the_training_clips(*, clips: bool) -> None:
    model = model_of()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    _, notebook = watched(model)
    expected = [NO_NORM]
    for number in range(3):
        scaler.scale(model(ones() * (number + 1)).square().mean()).backward()
        if clips:
            scaler.unscale_(optimizer)
            expected.append(norm_of(model))
            clip_grad_norm_(model.parameters(), CLIPPED)
        else:
            expected.append(NO_NORM)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    backward(model)
    assert norms(notebook) == pytest.approx(expected, rel=1e-5)


def test_without_a_guard_only_what_the_training_computes_is_told() -> None:
    model = model_of()
    optimizer = sgd(model)
    _, notebook = watched(model, guard=False)
    backward(model)
    optimizer.step()
    backward(model, 1)
    whole = norm_of(model)
    clip_grad_norm_(model.parameters(), CLIPPED)
    optimizer.step()
    backward(model, 2)
    assert norms(notebook) == pytest.approx([NO_NORM, NO_NORM, whole], rel=1e-5)


def test_gradients_that_change_after_the_clipping_are_looked_at_again() -> None:
    model = model_of()
    optimizer = sgd(model)
    _, notebook = watched(model)
    backward(model)
    clip_grad_norm_(model.parameters(), CLIPPED)
    for value in model.parameters():
        assert value.grad is not None
        value.grad.zero_().add_(1.0)
    expected = norm_of(model)
    optimizer.step()
    backward(model, 1)
    assert norms(notebook) == pytest.approx([NO_NORM, expected], rel=1e-5)
