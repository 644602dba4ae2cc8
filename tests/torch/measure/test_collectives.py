"""A tensor that a collective, or an assignment through ``data``, has changed since it was measured."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from notebook import Gain, learn, model_of, ones, sgd, watched, watching
from rankwatch.measure.collectives import _listeners, _started
from rankwatch.measure.ledger import LEDGER
from rankwatch.shared.types.frame import REDUCED, State
from rankwatch.shared.types.trip import Cause, Trip
from rankwatch.shared.words.cause import classify
from rankwatch.touch.torch_private import GroupFacts
from trainings.parts import Root

pytestmark = pytest.mark.filterwarnings("ignore:.*all_gather_into_tensor.* is deprecated:FutureWarning")


def after(change: Callable[[Tensor], object]) -> nn.Module:
    """Calls ``change`` on the output of ``inner``, and returns it."""

    def forward(self: Root, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        change(y.detach())
        return y

    return Root(forward, inner=nn.Linear(4, 4))


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
    trip = notebook.trip_of(model, ones())
    assert detector.fault == ""
    return trip


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("change", [gather, gather_into_a_view, gather_later])
def test_the_module_that_communicates_is_guilty(change: Callable[[Tensor], None]) -> None:
    trip = trip_of(model_of(after(change), nn.Linear(4, 2)))
    assert (trip.frame.spec.module, trip.culprit.label, trip.culprit.state) == ("0", "output", State.NAN)
    assert [(frame.spec.module, set(frame.states)) for frame in trip.frames[:-1]] == [("0.inner", {State.FINITE})]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("check", ["batch", "async"])
def test_also_where_numbers_are_read_later(check: str) -> None:
    model, detector, notebook = watching(after(gather), nn.Linear(4, 2), check=check)
    if check == "batch":
        notebook.trip_of(model, ones())
    else:
        model(ones())
        detector.remove()
    assert notebook.found[0][0] == (0, 0, 1)


@pytest.mark.usefixtures("one_rank")
def test_a_finite_sum_is_not_called_bad() -> None:
    trip = trip_of(model_of(after(dist.all_reduce), Gain(math.nan)))
    assert (trip.frame.spec.module, trip.collective, trip.received) == ("1", "", "")
    assert classify(trip)[0] is Cause.INVALID


@pytest.mark.usefixtures("one_rank")
def test_a_closed_watch_hears_of_no_collective() -> None:
    model, detector, _ = watching(after(dist.all_reduce))
    model(ones())
    assert len(_listeners) == 1
    assert not _started
    detector.remove()
    assert not _listeners
    dist.all_reduce(ones())


def test_a_change_that_autograd_does_not_see_is_told() -> None:
    """The tensor was measured as the output of ``0.inner``; ``0`` returns it too, changed."""
    trip = trip_of(model_of(after(lambda y: y.data.mul_(math.inf)), nn.Linear(4, 2)))
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


@pytest.mark.usefixtures("one_rank")
def test_gradients_are_measured_again_after_a_loop_has_reduced_them() -> None:
    model, detector, notebook = watching(nn.Linear(4, 4), nn.Linear(4, 1), gradients=True)
    optimizer = sgd(model, 1e-9)
    (7e4 * model(ones()).sum()).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        half = parameter.grad.half()  # 2.1e5 is inf
        dist.all_reduce(half)
        parameter.grad.copy_(half)
    trip = notebook.trip_of(optimizer.step)
    assert detector.fault == ""
    assert (trip.frame.spec.module, trip.culprit.label) == ("1", "weight.grad (reduced)")
    cause, evidence = classify(trip)
    assert cause is Cause.REDUCTION
    assert evidence.startswith("this rank's weight.grad was finite, and inf after it was reduced over the ranks")


@pytest.mark.usefixtures("one_rank")
def test_gradients_that_nothing_reduces_are_measured_once() -> None:
    model, _, notebook = watching(nn.Linear(4, 1), gradients=True)
    optimizer = sgd(model)
    for _ in range(2):
        learn(model(ones()).sum(), optimizer)
    labels = [reading.label for frame in notebook.frames() for reading in frame.readings]
    assert not [label for label in labels if label.endswith(REDUCED)]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("every", [1, 10])
def test_a_collective_to_which_a_rerun_comes_is_not_called_once_more(every: int) -> None:
    model, detector, notebook = watching(after(dist.all_reduce), Gain(1.0), every=every)
    calls = LEDGER.meet(dist.group.WORLD, GroupFacts("0", "", (0, 1), is_default=True, has_two_orders=False)).calls
    assert calls is not None
    model(ones())
    model[1].gain = math.nan
    trip = notebook.trip_of(model, ones())
    assert detector.fault == ""
    assert trip.culprit.state is State.NAN
    assert calls.calls == 2
