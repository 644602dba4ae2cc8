"""On a GPU: the host never waits for the device, and verdicts are the same."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from notebook import Gain, Notebook, model_of, watched
from rankwatch.errors import OverflowDetected
from rankwatch.hook.detector import Detector
from rankwatch.shared.tuning import Check

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


def ones() -> Tensor:
    return torch.ones(3, 4, device="cuda")


def train(model: nn.Module, batches: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(batches):
        model(ones()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def on_gpu(**options: object) -> tuple[nn.Sequential, Detector, Notebook]:
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


def test_batches_are_judged_as_wholes_by_default() -> None:
    model, detector, _ = on_gpu()
    assert detector._settler.check is Check.BATCH
    del model


@pytest.mark.parametrize("check", ["frame", "batch", "async"])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_the_frame_that_goes_bad_is_named(check: str, bad: float) -> None:
    model, detector, notebook = on_gpu(check=check)
    train(model, 3)
    gain = model[1]
    assert isinstance(gain, Gain)
    gain.gain = bad
    with pytest.raises(OverflowDetected):
        train(model, 2)
    (trip,) = notebook.trips
    assert (trip.position.batch, trip.frame.spec.module, trip.culprit.label) == (3, "1", "output")
    assert detector.fault == ""
