"""When readings are judged, which modules and batches are measured, and how often weights are measured."""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models import Calls
from notebook import Gain, Notebook, first_weight, learn, model_of, ones, sgd, watched, watching
from rankwatch.errors import BatchLimitReached, OverflowDetected
from rankwatch.hook.detector import Detector
from rankwatch.rerun.careful import running_again
from rankwatch.shared.types.frame import Frame, Moment, Position, State
from rankwatch.shared.types.trip import Cause, Trip
from rankwatch.shared.types.tuning import Tuning
from rankwatch.shared.words.cause import classify
from trainings.parts import Through

CHECKS = ["frame", "batch", "async"]

every_check = pytest.mark.parametrize("check", CHECKS)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    learn(model(ones()).sum(), optimizer)


def modules_of(frames: list[Frame]) -> list[str]:
    return [frame.spec.module for frame in frames]


def numbers_of(frame: Frame) -> dict[str, float]:
    return {reading.label: reading.abs_max for reading in frame.readings}


# --- how far the training comes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("check", "reached"),
    [
        ("frame", ["0", "1"]),
        ("batch", ["0", "1", "2"]),
        ("async", ["0", "1", "2", "returned", "backward"]),
    ],
)
def test_a_bad_module_ends_the_training_before_a_weight_changes(check: str, reached: list[str]) -> None:
    model = model_of(nn.Linear(4, 4), Gain(math.inf), nn.Linear(4, 2))
    optimizer = sgd(model)
    came_by: list[str] = []
    for name, module in model.named_children():
        module.register_forward_pre_hook(lambda *_, name=name: None if running_again() else came_by.append(name))
    before = [parameter.clone() for parameter in model.parameters()]
    _, notebook = watched(model, check=check)

    def batch() -> None:
        output = model(ones())
        came_by.append("returned")
        output.sum().backward()
        came_by.append("backward")
        optimizer.step()

    with pytest.raises(OverflowDetected):
        batch()
    assert came_by == reached
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert notebook.trip.position == Position(0, 0, 1)


def test_without_an_optimizer_the_next_forward_reports_pending_trips() -> None:
    model, _, notebook = watching(nn.Linear(4, 4), Gain(math.inf), check="async")
    ran: list[int] = []
    model(ones())
    model[0].register_forward_pre_hook(lambda *_: None if running_again() else ran.append(1))
    with pytest.raises(OverflowDetected):
        model(ones())
    assert ran == []
    assert notebook.trip.position == Position(0, 0, 1)


def test_the_next_batch_waits_for_late_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "rankwatch.measure.tape.PendingRead.is_ready", lambda reading: False
    )  # as on a device that is far behind
    model = model_of(nn.Linear(4, 4), Gain(math.inf))
    optimizer = sgd(model)
    _, notebook = watched(model, check="async", guard=False)  # on a device, where it does not wait either
    train(model, optimizer)
    assert notebook.trip_of(model, ones()).position == Position(0, 0, 1)


def test_an_eval_forward_reports_pending_trips_too() -> None:
    model, _, notebook = watching(nn.Linear(4, 4), Gain(math.inf), check="async")
    model(ones())
    with torch.no_grad(), pytest.raises(OverflowDetected):
        model.eval()(ones())
    assert notebook.trip.position == Position(0, 0, 1)


def test_the_verdict_comes_before_the_limit_of_batches() -> None:
    model, _, notebook = watching(nn.Linear(4, 4), Gain(), check="async", abort_after_batch_num=1)
    model(ones())
    model[1].gain = math.inf
    assert notebook.trip_of(model, ones()).position == Position(1, 0, 1)
    model[1].gain = 1.0
    with pytest.raises(BatchLimitReached):
        model(ones())


@every_check
def test_after_a_caught_trip_a_clean_batch_is_clean(check: str) -> None:
    model, detector, notebook = watching(nn.Linear(4, 4), Gain(), check=check)
    for gain in (math.inf, 1.0, math.inf, 1.0, 1.0):
        model[1].gain = gain
        with suppress(OverflowDetected):
            model(ones())
    detector.remove()
    # With "async" the forward that reports the previous batch's trip never began.
    assert [trip.position.batch for trip in notebook.trips] == ([0, 1] if check == "async" else [0, 2])


# --- pending numbers at the end -------------------------------------------------------------------------------------------


def test_closing_reports_pending_numbers() -> None:
    model, detector, notebook = watching(nn.Linear(4, 4), Gain(math.inf), check="async")
    model(ones())
    assert (notebook.batches, notebook.found) == ([], [])
    detector.remove()
    assert notebook.found == [(Position(0, 0, 1), 0)]
    assert [summary.batch for _, summary in notebook.batches] == [0]


@pytest.mark.parametrize("check", ["batch", "async"])
def test_closing_reports_modules_called_outside_of_the_root(check: str) -> None:
    model, detector, notebook = watching(nn.Linear(4, 4), Gain(), check=check)
    model(ones())
    model[0](ones() * math.inf)
    detector.remove()
    assert [position for position, _ in notebook.found] == [Position(0, 0, 3)]


@every_check
def test_a_bad_module_is_reported_when_the_user_raises_after_it(check: str) -> None:
    def asserts(x: Tensor) -> Tensor:
        assert x.isfinite().all(), "the user's own check"
        return x

    model, _, notebook = watching(Gain(), Gain(), Calls(asserts), check=check)
    model(ones())
    model[1].gain = math.inf
    with pytest.raises(OverflowDetected if check == "frame" else AssertionError):
        model(ones())
    assert [position for position, _ in notebook.found] == [Position(1, 0, 1)]


# --- the same verdict -----------------------------------------------------------------------------------------------------


def tripped_by(check: str, **options: Any) -> Trip:
    """The trip of the third batch of a training, in which the second module overflows."""
    model, detector, notebook = watching(nn.Linear(4, 4), Gain(), nn.Linear(4, 2), Gain(), check=check, **options)
    optimizer = sgd(model)
    with suppress(OverflowDetected):
        for gain in (1.0, 1.0, 1e39):
            model[1].gain = gain
            train(model, optimizer)
    detector.remove()
    return notebook.trip


@pytest.mark.parametrize("ring", [1, 7, 100])
def test_the_three_checks_name_the_same_frame_with_the_same_ring(ring: int) -> None:
    by_frame, *later = [tripped_by(check, max_frames_to_save=ring) for check in CHECKS]
    assert by_frame.position == Position(2, 0, 1)
    assert (by_frame.frame.spec.module, by_frame.culprit.label, by_frame.culprit.state) == ("1", "output", State.INF)
    assert len(by_frame.frames) == min(ring, 14)
    for trip in later:
        assert (trip.position, trip.reading, trip.optimizer_step) == (by_frame.position, by_frame.reading, 2)
        assert trip.frames == by_frame.frames
        assert trip.root_inputs == by_frame.root_inputs
        assert classify(trip) == classify(by_frame)


def test_only_a_frame_judged_at_once_still_has_its_tensor_to_be_counted() -> None:
    assert [tripped_by(check).numel for check in CHECKS] == [12, 0, 0]


@every_check
def test_an_ignored_module_does_not_hide_the_others(check: str) -> None:
    model, _, notebook = watching(Gain(math.inf), Gain(), Gain(), check=check, ignore=["0", "1:output"])
    assert notebook.trip_by_the_end(model, ones()).frame.spec.module == "2"


# --- the progress of a rank -----------------------------------------------------------------------------------------------


@contextmanager
def looking_at(detector: Detector, notebook: Notebook) -> Iterator[list[Moment]]:
    """The progress that another thread may see: at every function call or return, until a trip is reported."""
    seen: list[Moment] = []

    def look(frame: Any, event: str, arg: Any) -> None:
        if not notebook.found:
            seen.append(detector.progress)

    sys.setprofile(look)
    try:
        yield seen
    finally:
        sys.setprofile(None)


@every_check
@pytest.mark.parametrize("traced", [[], [1]])
def test_progress_never_passes_an_unjudged_trip_of_the_forward(check: str, traced: list[int]) -> None:
    model, detector, notebook = watching(nn.Linear(4, 4), Gain(), nn.Linear(4, 2), check=check, trace_batch_nums=traced)
    optimizer = sgd(model)
    with looking_at(detector, notebook) as seen:
        train(model, optimizer)
        model[1].gain = math.inf
        with suppress(OverflowDetected):
            train(model, optimizer)
    trip = notebook.trip
    assert trip.position == Position(1, 0, 1)
    assert max(seen) <= (trip.optimizer_step, *trip.position)
    assert max(seen) >= Moment(0, 0, 0, 4)  # the batch before is known to be clean


@every_check
def test_progress_never_passes_an_unjudged_trip_of_the_backward(check: str) -> None:
    model, detector, notebook = watching(
        nn.Linear(4, 4), Gain(), Through(math.inf), nn.Linear(4, 2), check=check, gradients=True
    )
    optimizer = sgd(model)
    with looking_at(detector, notebook) as seen, suppress(OverflowDetected):
        train(model, optimizer)
    trip = notebook.trip
    assert trip.position > Position(0, 0, 5)
    assert max(seen) <= (trip.optimizer_step, *trip.position)


@every_check
def test_progress_never_passes_an_unjudged_trip_outside_of_the_root(check: str) -> None:
    model, detector, notebook = watching(nn.Linear(4, 4), Gain(), check=check)
    model(ones())
    with looking_at(detector, notebook) as seen, suppress(OverflowDetected):
        model[0](ones() * math.inf)
        model[0](ones())
        model(ones())
    assert notebook.trip.position == Position(0, 0, 3)
    assert max(seen) <= Moment(0, 0, 0, 3)


@every_check
def test_progress_never_passes_a_trip_of_the_backward_of_an_earlier_batch(check: str) -> None:
    model, detector, notebook = watching(nn.Linear(4, 4), Gain(), nn.Linear(4, 2), check=check, gradients=True)
    losses = [model(ones()).sum() for _ in range(2)]
    losses[1].backward()
    with suppress(OverflowDetected):
        (losses[0] * math.inf).backward()
        assert detector.progress <= Moment(0, 0, 0, 4)
    detector.remove()
    assert notebook.trip.position == Position(0, 0, 4)


@every_check
def test_progress_comes_to_the_end_of_a_clean_training(check: str) -> None:
    model, detector, _ = watching(nn.Linear(4, 4), Gain(), check=check)
    optimizer = sgd(model)
    for batch in range(3):
        train(model, optimizer)
        assert detector.progress == Moment(batch + 1, batch, 0, 4)


# --- traces ---------------------------------------------------------------------------------------------------------------


@every_check
def test_the_chosen_batches_are_traced_whole_and_once(check: str) -> None:
    model, detector, notebook = watching(nn.Linear(4, 4), Gain(), nn.Linear(4, 2), check=check, trace_batch_nums=[1, 3])
    for _ in range(5):
        model(ones())
    detector.remove()
    assert [[frame.position.batch for frame in trace] for trace in notebook.traces] == [[1] * 4, [3] * 4]
    assert [modules_of(trace) for trace in notebook.traces] == [["0", "1", "2", ""]] * 2
    assert [summary.traced for _, summary in notebook.batches] == [False, True, False, True, False]


@every_check
def test_a_bad_batch_is_traced_whole_before_it_trips(check: str) -> None:
    model, detector, notebook = watching(Gain(math.inf), Gain(), check=check, trace_batch_nums=[0])
    with suppress(OverflowDetected):
        model(ones())
    detector.remove()
    assert [modules_of(trace) for trace in notebook.traces] == [["0", "1", ""]]
    assert (notebook.trip.frame.spec.module, notebook.batches[0][1].traced) == ("0", True)
    # The trip is reported before the summary, which shows this rank past its own trip.
    assert notebook.found == [(Position(0, 0, 0), 0)]


# --- every K-th batch -----------------------------------------------------------------------------------------------------


@every_check
def test_all_modules_every_third_batch_and_the_roots_output_in_the_others(check: str) -> None:
    model, detector, notebook = watching(check=check, every=3)
    for _ in range(7):
        model(ones())
    detector.remove()
    told = [modules_of(notebook.frames(batch)) for batch in range(7)]
    whole = ["0", "1", "2", ""]
    assert told == [whole, [""], [""], whole, [""], [""], whole]
    assert list(numbers_of(notebook.frames(1)[0])) == ["output"]
    assert detector.progress == Moment(0, 6, 0, 4)


@every_check
def test_a_trip_between_two_whole_batches_is_found_as_in_a_whole_one(check: str) -> None:
    model, _, notebook = watching(check=check, every=10)
    model(ones())
    model[1].gain = math.inf
    trip = notebook.trip_by_the_end(model, ones())
    assert (trip.position, trip.frame.spec.module, trip.culprit.label) == (Position(1, 0, 1), "1", "output")
    assert modules_of(list(trip.frames)) == ["0", "1", "2", "", "0", "1"]


def test_bad_data_is_still_known_as_the_cause_between_two_whole_batches() -> None:
    model, _, notebook = watching(every=10)
    model(ones())
    trip = notebook.trip_of(model, ones() * math.nan)
    assert [(reading.label, reading.state) for reading in trip.root_inputs] == [("input[0]", State.NAN)]


def test_every_does_not_thin_out_traced_batches_and_eval_forwards() -> None:
    model, detector, notebook = watching(every=10, trace_batch_nums=[2])
    for _ in range(3):
        model(ones())
    assert [len(notebook.frames(batch)) for batch in range(3)] == [4, 1, 4]
    model.eval()(ones())
    assert detector.position == Position(2, 1, 4)


def test_gradients_are_watched_in_whole_batches_only() -> None:
    model, detector, notebook = watching(every=2, gradients=True)
    optimizer = sgd(model)
    for _ in range(4):
        train(model, optimizer)
    detector.remove()
    parts = [(summary.batch, summary.first_frame) for _, summary in notebook.batches]
    assert parts == [(0, 0), (0, 5), (1, 3), (2, 0), (2, 5), (3, 3)]


# --- chosen modules -------------------------------------------------------------------------------------------------------


@every_check
def test_only_the_chosen_modules_and_the_root_are_watched(check: str) -> None:
    model, detector, notebook = watching(
        nn.Sequential(nn.Linear(4, 4), nn.GELU()),
        nn.Sequential(nn.Linear(4, 4), Gain()),
        Gain(),
        check=check,
        modules=["1.*", "*.1"],
    )
    model(ones())
    detector.remove()
    assert modules_of(notebook.frames()) == ["0.1", "1.0", "1.1", ""]


def test_the_next_watched_module_reports_the_overflow_of_an_unwatched_one() -> None:
    model, _, notebook = watching(Gain(), Gain(math.inf), Gain(), Gain(), modules=["0", "3"])
    trip = notebook.trip_of(model, ones())
    assert (trip.position, trip.frame.spec.module) == (Position(0, 0, 1), "3")
    assert classify(trip)[0] is Cause.UPSTREAM


def test_a_module_that_is_added_later_is_watched_if_it_is_chosen() -> None:
    model, _, notebook = watching(Gain(), modules=["late.*"])
    model.add_module("late", model_of(Gain(), Gain()))
    model.add_module("other", Gain())
    model(ones())
    assert modules_of(notebook.frames()) == ["late.0", "late.1", ""]


@pytest.mark.slow
def test_a_compiled_model_is_measured_anew_when_the_choice_of_modules_changes() -> None:
    model, detector, notebook = watching()
    compiled: Any = torch.compile(model, backend="eager")
    for modules in ((), ("0",), ("1", "2"), ()):
        detector.tune(Tuning(modules=modules))
        compiled(ones())
        compiled(ones())
    told = [modules_of(notebook.frames(batch)) for batch in range(8)]
    # The first forward after a change may have begun already.
    assert told[1::2] == [["0", "1", "2", ""], ["0", ""], ["1", "2", ""], ["0", "1", "2", ""]]
    assert detector.fault == ""


# --- the cadence of weights -----------------------------------------------------------------------------------------------

LAYERS = 6


def weights_shown(batches: int, *, steps: bool = True, **options: Any) -> list[list[float]]:
    """For each batch, the reported weight of each layer; all elements of a weight equal the batch number."""
    model, _, notebook = watching(*[nn.Linear(4, 4) for _ in range(LAYERS)], **options)
    optimizer = sgd(model)
    for batch in range(batches):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(batch)
        if steps:
            optimizer.step()
        model(ones())
    return [[numbers_of(frame)["weight"] for frame in notebook.frames(batch)[:LAYERS]] for batch in range(batches)]


@pytest.mark.parametrize("every", [2, 4, 6])
def test_a_changed_weight_is_reported_after_its_cadence_of_batches(every: int) -> None:
    shown = weights_shown(20, weights_every=every)
    assert shown[0] == [0] * LAYERS
    assert all(batch - every < number <= batch for batch, numbers in enumerate(shown) for number in numbers)


@pytest.mark.parametrize("every", [2, 4, 6])
def test_the_layers_take_turns(every: int) -> None:
    shown = weights_shown(20, weights_every=every)
    measured = [sum(number == batch for number in numbers) for batch, numbers in enumerate(shown)]
    assert max(measured[1:]) == math.ceil(LAYERS / every)
    assert sum(measured[every : 3 * every]) == 2 * LAYERS


@pytest.mark.parametrize("options", [{"weights_every": 0}, {"weights_every": 1}, {"weights_every": 16, "policy": "strict"}])
def test_weights_may_be_measured_in_every_batch(options: dict[str, Any]) -> None:
    assert weights_shown(5, **options) == [[batch] * LAYERS for batch in range(5)]


def test_weights_that_are_changed_without_an_optimizer_are_measured_at_the_cadence() -> None:
    shown = weights_shown(20, steps=False, weights_every=4)
    assert all(batch - 4 < number <= batch for batch, numbers in enumerate(shown) for number in numbers)


def test_between_two_optimizer_steps_weights_are_not_measured_again() -> None:
    model, _, notebook = watching(nn.Linear(4, 4), weights_every=1)
    optimizer = sgd(model)
    shown = []
    for number, steps in ((1.0, True), (2.0, False), (3.0, False), (4.0, True)):
        first_weight(model).fill_(number)
        if steps:
            optimizer.step()
        model(ones())
        shown.append(numbers_of(notebook.frames()[0])["weight"])
    assert shown == [1.0, 1.0, 1.0, 4.0]


@every_check
def test_the_ring_shows_weights_as_they_were_in_its_frames(check: str) -> None:
    model, detector, notebook = watching(nn.Linear(4, 4), Gain(), check=check, weights_every=100)
    optimizer = sgd(model)
    first_weight(model).fill_(1.0)
    train(model, optimizer)
    for gain in (1.0, math.inf):  # two batches of one optimizer step
        first_weight(model).fill_(5.0)
        model[1].gain = gain
        with suppress(OverflowDetected):
            model(ones())
    detector.remove()
    linear = [frame for frame in notebook.trip.frames if frame.spec.module == "0"]
    # No weight was due: the last two are measured for the report; the first can no longer be (the step changed it).
    assert [(frame.position.batch, numbers_of(frame)["weight"]) for frame in linear] == [(0, 1.0), (1, 5.0), (2, 5.0)]
    assert numbers_of(notebook.frames(1)[0])["weight"] == 1.0


@every_check
@pytest.mark.parametrize("poison", [math.inf, math.nan])
def test_a_weight_poisoned_between_two_batches_is_the_cause_though_it_was_not_due(check: str, poison: float) -> None:
    model, _, notebook = watching(nn.Linear(4, 4), Gain(), nn.Linear(4, 2), check=check, weights_every=100)
    optimizer = sgd(model)
    train(model, optimizer)
    train(model, optimizer)
    model[0].weight.data.fill_(poison)  # behind autograd's back
    trip = notebook.trip_by_the_end(model, ones())
    assert (trip.position, trip.frame.spec.module, trip.culprit.label) == (Position(2, 0, 0), "0", "weight")
    assert classify(trip)[0] is Cause.WEIGHT


# --- what it costs --------------------------------------------------------------------------------------------------------


@every_check
def test_a_tensor_is_measured_once_per_batch_in_every_check(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from rankwatch.measure.tape import Cell, Tape

    written = 0
    write = Tape.write

    def noted(tape: Tape, values: Tensor, state: State | None) -> Cell:
        nonlocal written
        written += 1
        return write(tape, values, state)

    monkeypatch.setattr(Tape, "write", noted)
    model, *_ = watching(nn.Linear(4, 4), Gain(), nn.Linear(4, 2), check=check)
    counts = []
    for _ in range(3):
        written = 0
        model(ones())
        counts.append(written)
    # The root's input and three outputs; the other inputs and the root's output are known. Weights: in the first batch.
    assert counts == [8, 4, 4]


def objects_left_by(sizes: Iterable[int], model: nn.Module, notebook: Notebook) -> int:
    """The number of objects after a training with batches of these sizes."""
    optimizer = sgd(model, 0.0)
    for size in sizes:
        learn(model(torch.ones(1 + size, 1 + size % 3, 4)).sum(), optimizer)
        notebook.batches.clear()
    gc.collect()
    return len(gc.get_objects())


@pytest.mark.slow
@pytest.mark.parametrize(("check", "gradients"), [("frame", False), ("batch", True), ("async", True)])
def test_nothing_grows_with_the_number_of_batches(check: str, gradients: bool) -> None:
    model, detector, notebook = watching(
        nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2), check=check, gradients=gradients, weights_every=3
    )
    before = objects_left_by([*range(20)] * 14, model, notebook)  # what is remembered of the last 256 outputs is full then
    after = objects_left_by([*range(20)] * 10, model, notebook)
    assert after - before < 50
    assert detector.fault == ""


@pytest.mark.slow
def test_an_endless_stream_of_shapes_is_bounded() -> None:
    model, detector, notebook = watching(nn.Linear(4, 4), nn.ReLU())
    before = objects_left_by(range(200), model, notebook)
    assert objects_left_by(range(200, 1000), model, notebook) - before < 1000
    assert detector.fault == ""
