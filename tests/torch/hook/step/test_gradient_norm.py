"""Each batch tells the norm of the gradients in the last optimizer step before it, as the training would compute it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import utils
from torch.nn.utils import clip_grad_norm_

from notebook import Notebook, first_weight, learn, model_of, ones, sgd, take_step, watched, watching
from rankwatch.shared.types.frame import NO_NORM

CLIPPED = 0.01


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


def train(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    batches: int,
    clip: Callable[[Any], object] = lambda model: None,
) -> list[float]:
    """The norm that each batch has to tell; the last one is not trained on."""
    expected = [NO_NORM]
    for number in range(batches):
        backward(model, number)
        expected.append(norm_of(model))
        clip(model)
        step(optimizers, model)
    backward(model)
    return expected


def step(optimizers: Sequence[torch.optim.Optimizer], model: nn.Module) -> None:
    for optimizer in optimizers:
        optimizer.step()
    model.zero_grad()


@pytest.mark.parametrize("clip", [None, CLIPPED], ids=["whole", "clipped"])
@pytest.mark.parametrize(
    "options",
    [{}, {"check": "async"}, {"gradients": True}, {"every": 3}, {"check": "batch"}],
    ids=["default", "async", "gradients", "every", "batch"],
)
def test_each_batch_has_the_norm_of_the_step_before(options: dict[str, Any], clip: float | None) -> None:
    model, _, notebook = watching(**options)
    expected = train(model, [sgd(model)], 5, (lambda model: None) if clip is None else clip_all)
    backward(model)  # with "async", a batch is sent once the next one has begun
    assert norms(notebook)[:6] == pytest.approx(expected, rel=1e-5)


def test_batches_whose_gradients_are_accumulated_tell_of_the_same_step() -> None:
    model, _, notebook = watching()
    optimizer = sgd(model)
    expected = [NO_NORM, NO_NORM]
    for _ in range(2):
        for number in range(2):
            backward(model, number)
        expected += [norm_of(model)] * 2
        take_step(optimizer)
    for number in range(2):
        backward(model, number)
    assert norms(notebook) == pytest.approx(expected, rel=1e-5)


def test_several_optimizers_make_one_step() -> None:
    model, _, notebook = watching()
    expected = train(model, two(model), 3, lambda model: clip_grad_norm_(model[0].parameters(), CLIPPED))
    assert norms(notebook) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("keyword", [True, False])
def test_another_norm_than_the_euclidean_is_not_told(*, keyword: bool) -> None:
    model, _, notebook = watching()
    optimizer = sgd(model)
    for number in range(2):
        backward(model, number)
        if keyword:
            clip_all(model, norm_type=math.inf)
        else:
            clip_grad_norm_(model.parameters(), CLIPPED, 1.0)
        take_step(optimizer)
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
    model, _, notebook = watching(guard=False)
    optimizer = sgd(model)
    backward(model)
    optimizer.step()
    backward(model, 1)
    whole = norm_of(model)
    clip_grad_norm_(model.parameters(), CLIPPED)
    optimizer.step()
    backward(model, 2)
    assert norms(notebook) == pytest.approx([NO_NORM, NO_NORM, whole], rel=1e-5)


def test_gradients_that_change_after_the_clipping_are_looked_at_again() -> None:
    model, _, notebook = watching()
    optimizer = sgd(model)
    backward(model)
    clip_grad_norm_(model.parameters(), CLIPPED)
    for value in model.parameters():
        assert value.grad is not None
        value.grad.zero_().add_(1.0)
    expected = norm_of(model)
    optimizer.step()
    backward(model, 1)
    assert norms(notebook) == pytest.approx([NO_NORM, expected], rel=1e-5)


def two(model: nn.Sequential) -> list[torch.optim.Optimizer]:
    return [sgd(model[0]), sgd(model[2])]


def clip_all(model: nn.Sequential, **more: Any) -> None:
    clip_grad_norm_(model.parameters(), CLIPPED, **more)


def clip_all_then_a_part(model: nn.Sequential) -> None:
    clip_all(model)
    clip_grad_norm_(model[0].parameters(), CLIPPED / 10)


def clip_twice(model: nn.Sequential) -> None:
    clip_all(model)
    clip_all(model)


def clip_with_a_known_norm(model: nn.Sequential) -> None:
    gradients = [value.grad for value in model.parameters() if value.grad is not None]
    utils.clip_grads_with_norm_(model.parameters(), CLIPPED, utils.get_total_norm(gradients))


def look_at_the_norm(model: nn.Sequential) -> None:
    clip_grad_norm_(model.parameters(), math.inf)


def clip_and_evaluate(model: nn.Sequential) -> None:
    clip_all(model)
    with torch.no_grad():
        model(ones())


def clip_and_scale_what_was_returned(model: nn.Sequential) -> None:
    clip_grad_norm_(model.parameters(), CLIPPED).mul_(1000.0)


@pytest.mark.parametrize("optimizers_of", [lambda model: [sgd(model)], two], ids=["one", "two"])
@pytest.mark.parametrize(
    "clip",
    [
        clip_all, clip_all_then_a_part, clip_twice, clip_with_a_known_norm, look_at_the_norm, clip_and_evaluate,
        clip_and_scale_what_was_returned,
    ],
)  # fmt: skip
def test_however_the_training_clips_it_is_the_norm_as_the_gradients_came(clip: Any, optimizers_of: Any) -> None:
    if clip is clip_with_a_known_norm and not hasattr(utils, "get_total_norm"):
        pytest.skip("torch.nn.utils.get_total_norm came with torch 2.6")
    model, _, notebook = watching()
    expected = train(model, optimizers_of(model), 3, clip)
    assert norms(notebook) == pytest.approx(expected, rel=1e-5)


def clip_a_part_then_all(model: nn.Sequential) -> None:
    clip_grad_norm_(model[0].parameters(), CLIPPED)
    clip_all(model)


def clip_all_then_change_one(model: nn.Sequential) -> None:
    clip_all(model)
    next(model.parameters()).grad.add_(1.0)  # type: ignore[union-attr]


def clip_and_begin_another_batch(model: nn.Sequential) -> None:
    clip_all(model)
    model(ones())


def clip_with_another_models_parameters(model: nn.Sequential) -> None:
    other = nn.Linear(2, 2)
    other(torch.ones(2)).sum().backward()
    clip_grad_norm_([*model.parameters(), *other.parameters()], CLIPPED)


@pytest.mark.parametrize(
    "clip",
    [clip_a_part_then_all, clip_all_then_change_one, clip_and_begin_another_batch, clip_with_another_models_parameters],
)
def test_a_norm_that_cannot_be_told_is_not(clip: Any) -> None:
    model, _, notebook = watching()
    train(model, [sgd(model)], 2, clip)
    assert set(norms(notebook)) == {NO_NORM}


def test_the_norm_of_another_model_is_none_of_ours() -> None:
    model, other = model_of(), nn.Linear(2, 2)
    _, notebook = watched(model)

    def clip(model: nn.Sequential) -> None:
        other(1e4 * torch.ones(2)).sum().backward()
        clip_all(model)
        clip_grad_norm_(other.parameters(), CLIPPED)

    expected = train(model, [sgd(model)], 2, clip)
    assert norms(notebook) == pytest.approx(expected, rel=1e-5)


def test_a_gradient_that_two_optimizers_use_counts_once() -> None:
    model, _, notebook = watching()
    expected = train(model, [sgd(model), sgd(model)], 2)
    assert norms(notebook) == pytest.approx(expected, rel=1e-5)


def test_steps_whose_forwards_are_not_seen_do_not_add_up() -> None:
    model, detector, notebook = watching()
    optimizer = sgd(model)
    backward(model)
    for _ in range(5):
        optimizer.step()
    expected = norm_of(model)
    backward(model)
    assert norms(notebook) == pytest.approx([NO_NORM, expected], rel=1e-5)
    assert len(detector._guard._norm._copies) == 1


def test_gradients_that_share_memory_share_a_version() -> None:
    """As with DDP's ``gradient_as_bucket_view``."""
    model, _, notebook = watching()
    optimizer = sgd(model)
    backward(model)
    bucket = torch.cat([value.grad.flatten() for value in model.parameters() if value.grad is not None])
    start = 0
    for value in model.parameters():
        value.grad = bucket[start : start + value.numel()].view_as(value)
        start += value.numel()
    expected = norm_of(model)
    clip_all(model, foreach=False)
    optimizer.step()
    backward(model)
    assert norms(notebook) == pytest.approx([NO_NORM, expected], rel=1e-5)


def test_an_uncoalesced_gradient_has_no_norm() -> None:
    model = nn.Sequential(nn.Embedding(4, 3, sparse=True))
    optimizer = sgd(model)
    _, notebook = watched(model)
    for _ in range(2):
        learn(model(torch.tensor([1, 1, 2])).square().sum(), optimizer)
    assert norms(notebook) == [NO_NORM, NO_NORM]


def test_gradients_whose_norm_overflows_are_finite_and_have_none() -> None:
    model, _, notebook = watching(nn.Linear(4, 2, bias=False))
    optimizer = sgd(model)
    for _ in range(2):
        learn(model(ones()).sum() * 1e25, optimizer)
        first_weight(model).zero_()
    assert (norms(notebook), notebook.trips) == ([NO_NORM, NO_NORM], [])


def test_gradients_of_inference_mode_are_the_users_business() -> None:
    detector, _ = watched(model_of())
    with torch.inference_mode():
        value = torch.ones(2)
        value.grad = torch.ones(2)
        assert clip_grad_norm_([value], 1.0) == pytest.approx(math.sqrt(2))
    assert detector.fault == ""


def test_optimizers_that_step_within_the_backward_make_one_step() -> None:
    """One for each parameter: each gradient is gone when the next optimizer steps."""
    model, _, notebook = watching()
    squares: list[float] = []
    for value in model.parameters():
        optimizer = torch.optim.SGD([value], lr=0.01)

        def step_at_once(value: Any, optimizer: torch.optim.Optimizer = optimizer) -> None:
            squares.append(value.grad.double().square().sum().item())
            take_step(optimizer)

        value.register_post_accumulate_grad_hook(step_at_once)
    expected = [NO_NORM]
    for number in range(3):
        squares.clear()
        backward(model, number)
        expected.append(math.sqrt(sum(squares)))
    backward(model)
    assert norms(notebook) == pytest.approx(expected, rel=1e-5)


def test_norms_of_a_model_that_nobody_watches_are_not_kept() -> None:
    watched_model, other = model_of(), nn.Linear(2, 2)
    detector, _ = watched(watched_model)
    for _ in range(20):
        other(torch.ones(2)).sum().backward()
        clip_grad_norm_(other.parameters(), CLIPPED)
        other.zero_grad()
    assert len(detector._guard._known.present) <= 1


def test_another_models_clipping_before_our_forward_loses_nothing() -> None:
    model, other = model_of(), nn.Linear(2, 2)
    optimizer = sgd(model)
    detector, notebook = watched(model)
    expected = [NO_NORM, NO_NORM]  # two forwards, so two batches, come before each step
    for _ in range(20):
        other(torch.ones(2)).sum().backward()
        clip_grad_norm_(other.parameters(), CLIPPED)
        model(ones())
        other.zero_grad()  # ours may come to lie where these were
        backward(model)
        expected += [norm_of(model)] * 2
        step([optimizer], model)
    backward(model)
    assert norms(notebook) == pytest.approx(expected[:-1], rel=1e-5)
    assert detector._guard._known.lost == set()
