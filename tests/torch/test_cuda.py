"""On a GPU: the host never waits for the device, and verdicts are the same."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from notebook import Notebook, learn, model_of, watched
from rankwatch.hook.detector import Detector
from rankwatch.shared.types.frame import NO_NORM
from rankwatch.shared.types.tuning import Check

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


def ones() -> Tensor:
    return torch.ones(3, 4, device="cuda")


def train(model: nn.Module, batches: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(batches):
        learn(model(ones()).sum(), optimizer)


def on_gpu(**options: object) -> tuple[Any, Detector, Notebook]:
    model = model_of().cuda()
    return model, *watched(model, **options)


@pytest.mark.parametrize("gradients", [False, True])
def test_async_never_waits_for_the_device(gradients: bool) -> None:
    model, detector, notebook = on_gpu(check="async", gradients=gradients)
    train(model, 2)  # makes the buffers and builds the kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        train(model, 20)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    detector.remove()
    assert sorted({summary.batch for _, summary in notebook.batches}) == list(range(22))
    assert detector.fault == ""


@pytest.mark.parametrize("check", ["frame", "batch", "async"])
def test_a_loss_has_its_sign(check: str) -> None:
    model, detector, notebook = on_gpu(check=check)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for number in range(4):
        learn(model(ones()).sum() * 0 + (1.5 - number), optimizer)
    detector.remove()
    assert [summary.loss(table) for table, summary in notebook.sent] == [1.5, 0.5, -0.5, -1.5]


def test_batches_are_judged_as_wholes_by_default() -> None:
    model, detector, _ = on_gpu()
    assert detector._settler.check is Check.BATCH
    del model


@pytest.mark.parametrize("check", ["frame", "batch", "async"])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_the_frame_that_goes_bad_is_named(check: str, bad: float) -> None:
    model, detector, notebook = on_gpu(check=check)
    train(model, 3)
    model[1].gain = bad
    trip = notebook.trip_of(train, model, 2)
    assert (trip.position.batch, trip.frame.spec.module, trip.culprit.label) == (3, "1", "output")
    assert detector.fault == ""


def test_a_capture_is_left_alone_and_the_watch_goes_on() -> None:
    model, detector, _ = on_gpu(check="frame")
    train(model, 3)
    graph, given = torch.cuda.CUDAGraph(), ones()
    with torch.no_grad():
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            model(given)
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            output = model(given)
    graph.replay()
    assert torch.isfinite(output).all()
    train(model, 2)
    assert (detector.position.batch, detector.fault) == (4, "")


@pytest.mark.parametrize("check", ["batch", "async"])
def test_a_forward_on_a_side_stream_is_waited_for(check: str) -> None:
    model, detector, notebook = on_gpu(check=check)
    side = torch.cuda.Stream()
    train(model, 2)
    model[1].gain = math.nan

    def train_aside() -> None:
        for _ in range(2):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.cuda._sleep(50_000_000)
                output = model(ones())
            torch.cuda.current_stream().wait_stream(side)
            output.sum().backward()

    trip = notebook.trip_of(train_aside)
    assert (trip.position.batch, trip.frame.spec.module, detector.fault) == (2, "1", "")


def test_a_batch_tells_what_tensors_take_and_the_norm_of_the_gradients() -> None:
    model, _, notebook = on_gpu(check="async")
    train(model, 2)
    before = torch.cuda.memory_allocated()
    held = torch.zeros(64, 2**20, dtype=torch.uint8, device="cuda")
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    train(model, 2)
    first, *_, last = [summary for _, summary in notebook.batches]
    assert first.memory > 0
    assert before + held.numel() <= last.memory <= before + 2 * held.numel()
    assert last.gradient_norm == NO_NORM  # async does not look, and this training does not clip
    batches, notebook = on_gpu(check="batch")[1:]
    train(batches._hooks.root, 4)
    assert [summary.gradient_norm > 0 for _, summary in notebook.batches] == [False, True, True, True]


def test_a_part_that_is_captured_is_left_alone() -> None:
    model, detector, _ = on_gpu(check="frame")
    train(model, 3)
    part: Any = torch.cuda.make_graphed_callables(model[0], (ones(),))
    output: Tensor = part(ones())
    assert torch.isfinite(output).all()
    train(model, 2)
    assert detector.fault == ""
