"""A tensor that a collective, or an assignment through ``data``, has changed since it was measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from notebook import Gain, model_of, ones, unwatch, watched
from rankwatch.errors import OverflowDetected
from rankwatch.hook.collectives import _listeners, _started
from rankwatch.shared.cause import Cause, Trip, classify
from rankwatch.shared.frame import REDUCED, State

pytestmark = pytest.mark.filterwarnings("ignore:.*all_gather_into_tensor.* is deprecated:FutureWarning")


@pytest.fixture
def _one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    unwatch()
    dist.destroy_process_group()


class After(nn.Module):
    """Calls ``change`` on the output of ``inner``, and returns it."""

    def __init__(self, change: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        self.change(y.detach())
        return y


def gather(y: Tensor) -> None:
    dist.all_gather_into_tensor(y, torch.full_like(y, math.nan))


def gather_into_a_view(y: Tensor) -> None:
    dist.broadcast(y[1:].data, 0)
    dist.all_gather([y[1]], torch.full((4,), math.nan))


def gather_later(y: Tensor) -> None:
    work = dist.all_gather_into_tensor(y, torch.full_like(y, math.nan), async_op=True)
    assert work is not None
    work.wait()


def trip_of(model: nn.Module) -> Trip:
    detector, notebook = watched(model)
    with pytest.raises(OverflowDetected):
        model(ones())
    assert detector.fault == ""
    (trip,) = notebook.trips
    return trip


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize("change", [gather, gather_into_a_view, gather_later])
def test_the_module_that_communicates_is_guilty(change: Callable[[Tensor], None]) -> None:
    trip = trip_of(model_of(After(change), nn.Linear(4, 2)))
    assert (trip.frame.spec.module, trip.culprit.label, trip.culprit.state) == ("0", "output", State.NAN)
    assert [(frame.spec.module, set(frame.states)) for frame in trip.frames[:-1]] == [("0.inner", {State.FINITE})]


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize("check", ["batch", "async"])
def test_also_where_numbers_are_read_later(check: str) -> None:
    detector, notebook = watched(model := model_of(After(gather), nn.Linear(4, 2)), check=check)
    if check == "batch":
        with pytest.raises(OverflowDetected):
            model(ones())
    else:
        model(ones())
        detector.remove()
    assert notebook.found[0][0] == (0, 0, 1)


@pytest.mark.usefixtures("_one_rank")
def test_a_finite_sum_is_not_called_bad() -> None:
    detector, notebook = watched(model := model_of(After(dist.all_reduce), Gain(math.nan)))
    with pytest.raises(OverflowDetected):
        model(ones())
    assert detector.fault == ""
    (trip,) = notebook.trips
    assert (trip.frame.spec.module, trip.collective, trip.received) == ("1", "", "")
    assert classify(trip)[0] is Cause.INVALID


@pytest.mark.usefixtures("_one_rank")
def test_a_closed_watch_hears_of_no_collective() -> None:
    detector, _ = watched(model := model_of(After(dist.all_reduce)))
    model(ones())
    assert len(_listeners) == 1
    assert not _started
    detector.remove()
    assert not _listeners
    dist.all_reduce(ones())


def test_a_change_that_autograd_does_not_see_is_told() -> None:
    """The tensor was measured as the output of ``0.inner``; ``0`` returns it too, changed."""
    trip = trip_of(model_of(After(lambda y: y.data.mul_(math.inf)), nn.Linear(4, 2)))
    assert (trip.frame.spec.module, trip.culprit.label) == ("1", "output")
    inner, outer, _ = trip.frames
    assert set(inner.states) == {State.FINITE}
    assert outer.states[-1] == State.UNMATERIALISED  # not finite, as it seemed before it was measured anew
    cause, evidence = classify(trip)
    assert cause is Cause.UPSTREAM
    assert evidence == (
        "input[0] was inf: it was finite when 0.inner (Linear) made it, and was changed in place afterwards, "
        "unseen by autograd"
    )


@pytest.mark.usefixtures("_one_rank")
def test_gradients_are_measured_again_after_a_loop_has_reduced_them() -> None:
    model = model_of(nn.Linear(4, 4), nn.Linear(4, 1))
    detector, notebook = watched(model, gradients=True)
    optimizer = torch.optim.SGD(model.parameters(), 1e-9)
    (7e4 * model(ones()).sum()).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        half = parameter.grad.half()  # 2.1e5 is inf
        dist.all_reduce(half)
        parameter.grad.copy_(half)
    with pytest.raises(OverflowDetected):
        optimizer.step()
    assert detector.fault == ""
    (trip,) = notebook.trips
    assert (trip.frame.spec.module, trip.culprit.label) == ("1", "weight.grad (reduced)")
    cause, evidence = classify(trip)
    assert cause is Cause.REDUCTION
    assert evidence.startswith("this rank's weight.grad was finite, and inf after it was reduced over the ranks")


@pytest.mark.usefixtures("_one_rank")
def test_gradients_that_nothing_reduces_are_measured_once() -> None:
    model = model_of(nn.Linear(4, 1))
    _, notebook = watched(model, gradients=True)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for _ in range(2):
        model(ones()).sum().backward()
        optimizer.step()
    labels = [reading.label for frame in notebook.frames() for reading in frame.readings]
    assert not [label for label in labels if label.endswith(REDUCED)]
