"""``every=K``: a bad batch between two that are measured in full is run again, and shows what a full one would have shown."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import rankwatch
from models import Calls
from notebook import Fragile, Gain, Notebook, learn, model_of, ones, sgd, watched, watching
from rankwatch.api import registry
from rankwatch.errors import OverflowDetected
from rankwatch.measure.recorder import LARGE
from rankwatch.rerun.careful import running_again
from rankwatch.shared.types.frame import Kind, Moment, Position, State
from rankwatch.shared.types.trip import Cause, Trip
from rankwatch.shared.words.cause import classify
from rankwatch.shared.words.text import format_frame
from trainings.parts import Root

every_check = pytest.mark.parametrize("check", ["frame", "batch", "async"])


def train(
    model: nn.Module, spoil: Callable[[], object], loss_of: Callable[[Any], Tensor], *, every: int = 10, **options: Any
) -> Notebook:
    """Trains for four batches, of which the first is measured in full; ``spoil`` is called before the third."""
    detector, notebook = watched(model, every=every, **options)
    registry.remember(detector)  # type: ignore[arg-type]  # detect_overflow finds it there
    optimizer = sgd(model)
    try:
        for batch in range(4):
            if batch == 2:
                spoil()
            learn(loss_of(model(ones())), optimizer)
        detector.remove()
    except OverflowDetected:
        pass
    finally:
        registry.forget(detector)  # type: ignore[arg-type]
    assert not notebook.faults
    return notebook


def mean(output: Tensor) -> Tensor:
    return output.square().mean()


def goes(module: nn.Module, gain: float) -> Callable[[], None]:
    return lambda: setattr(module, "gain", gain)


def with_an_inf() -> Tensor:
    x = ones()
    x[0, 0] = math.inf
    return x


def names(trip: Trip) -> list[str]:
    """The modules of the frames of the trip's batch."""
    return [frame.spec.module for frame in trip.frames if frame.position.batch == trip.position.batch]


# --- what it finds -------------------------------------------------------------------------------------------------------


@every_check
def test_counts_and_frames_are_those_of_a_full_batch(check: str) -> None:
    found = {}
    for every in (1, 10):
        model, _, notebook = watching(check=check, every=every)
        model(ones())
        model[1].gain = math.inf
        found[every] = notebook.trip_of(list, map(model, [ones()] * 2))
    full, between = found[1], found[10]
    assert between.position == full.position == Position(1, 0, 1)
    assert between.frame == full.frame
    assert names(between) == names(full)[:2]
    assert classify(between) == classify(full)
    assert (between.nan_count, between.inf_count, between.numel) == (0, 12, 12)
    if check == "frame":
        assert (full.nan_count, full.inf_count, full.numel) == (0, 12, 12)


class Large(nn.Module):
    """A layer, a large output and a small one; ``spoil`` changes the former."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.spoil: Callable[[Tensor], Tensor] = lambda large: large

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        small = self.layer(x)
        return {"large": self.spoil(torch.cat([small.view(-1), torch.full((LARGE,), -2.0)])), "small": small}


def put(number: float, place: int) -> Callable[[Tensor], Tensor]:
    def spoil(large: Tensor) -> Tensor:
        spoiled = large.clone()
        spoiled[place] = number
        return spoiled

    return spoil


def test_of_a_large_output_it_is_seen_that_it_is_finite() -> None:
    """A norm says that; where it is beyond float32, the numbers do."""
    model = Large()
    _, notebook = watched(model, every=3)
    found = []
    for spoil in (None, None, put(-1e30, LARGE), None):
        model.spoil = spoil or model.spoil
        model(ones())
        model.spoil = put(-2.0, 12)
        found.append(next(row for row in notebook.frames()[-1].readings if row.label == "output[large]"))
    assert [row.state for row in found] == [State.FINITE, State.SEEN_FINITE, State.FINITE, State.FINITE]
    assert found[0].abs_max == found[3].abs_max >= 2.0
    assert found[2].abs_max == pytest.approx(1e30)


@every_check
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, LARGE // 2 + 1, LARGE + 11])
def test_a_large_output_that_only_itself_shows_is_found(number: float, place: int, check: str) -> None:
    """Or tolerated, as -inf in an output is."""
    found = []
    for every in (10, 1):
        torch.manual_seed(0)
        model = Large()
        spoil = partial(setattr, model, "spoil", put(number, place))
        notebook = train(model, spoil, lambda y: mean(y["small"]), check=check, every=every)
        found.append([(trip.culprit.label, format_frame(trip.frame), classify(trip)) for trip in notebook.trips])
        assert len(notebook.trips) == (number != -math.inf)
    assert found[0] == found[1]


def aside() -> Root:
    """The model's output is finite: the loss takes a term from an attribute."""

    def compute(self: Root, x: Tensor) -> Any:
        self.term = self.part(x).sum()
        return self.body(x)

    return Root(compute, part=model_of(nn.Linear(4, 4), Gain()), body=nn.Linear(4, 2))


@every_check
def test_a_module_that_only_the_loss_shows_is_found(check: str) -> None:
    model = aside()
    trip = train(model, goes(model.part[1], math.nan), lambda y: mean(y) + model.term, check=check).trip
    assert (trip.position, trip.frame.spec.module, trip.culprit.kind) == (Position(2, 0, 1), "part.1", Kind.OUTPUT)


@every_check
def test_a_loss_that_is_bad_by_itself_stays_the_culprit_after_the_frames_of_its_forward(check: str) -> None:
    model = model_of()
    scale = [1.0]
    trip = train(model, lambda: scale.append(math.nan), lambda y: mean(y) * scale[-1], check=check).trip
    assert (trip.position, trip.culprit.kind) == (Position(2, 0, 4), Kind.LOSS)
    assert names(trip) == ["0", "1", "2", "", ""]
    if check == "frame":  # else the loss is judged before the optimizer's step
        assert trip.optimizer_step == 2


def train_on_an_inf(model: nn.Module) -> None:
    """The third batch has an inf, and the training ends at the latest in the fourth."""
    optimizer = sgd(model)
    feed = (ones(), ones(), with_an_inf(), ones())
    with pytest.raises(OverflowDetected):
        deque(map(lambda x: learn(mean(model(x)), optimizer), feed), maxlen=0)


def test_a_marked_tensor_is_judged_after_the_modules_before_it() -> None:
    def compute(self: Any, x: Tensor) -> Tensor:
        x = self.first(x)
        rankwatch.detect_overflow(x * self.gain, "scores")
        return self.last(x)  # type: ignore[no-any-return]

    def build() -> Root:
        return Root(compute, first=Gain(), last=nn.Linear(4, 2), gain=1.0)

    model = build()
    trip = train(model, goes(model, math.nan), mean).trip
    assert (trip.position, trip.culprit.kind, trip.culprit.label) == (Position(2, 0, 1), Kind.MARKED, "scores")
    model = build()
    trip = train(model, goes(model.first, math.nan), mean).trip
    assert (trip.position, trip.frame.spec.module, trip.culprit.kind) == (Position(2, 0, 0), "first", Kind.OUTPUT)


def test_a_marked_tensor_that_is_not_bad_again_stays_the_culprit() -> None:
    calls: list[int] = []

    def compute(self: Any, x: Tensor) -> Tensor:
        calls.append(1)
        rankwatch.detect_overflow(x * (math.nan if len(calls) == 3 else 1.0), "scores")
        return self.last(x)  # type: ignore[no-any-return]

    trip = train(Root(compute, last=nn.Linear(4, 2)), lambda: None, mean).trip
    assert (trip.position.batch, trip.culprit.kind, trip.culprit.label) == (2, Kind.MARKED, "scores")


def test_an_error_of_ours_as_it_runs_again_loses_no_trip(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise LookupError("ours")

    monkeypatch.setattr("rankwatch.judge.between.UnmeasuredBatchRerun._look", fail)
    model = model_of()
    trip = train(model, goes(model[1], math.inf), mean).trip
    assert (trip.position.batch, trip.frame.spec.module) == (2, "")


def test_what_was_drawn_is_drawn_again() -> None:
    """A draw of one in a thousand is bad: the batch that is run again has the same one."""

    rarely = Calls(lambda x: torch.where(torch.rand(()) < 0.001, x / 0, x))
    model = nn.Sequential(nn.Dropout(0.5), rarely, nn.ReLU())
    _, notebook = watched(model, every=10**6)

    def run(number: int) -> None:
        torch.manual_seed(number)
        model(ones())

    assert notebook.trip_of(list, map(run, range(100_000))).frame.spec.module == "1"


# --- what it does not touch, and where it does not run -------------------------------------------------------------------


def test_the_training_does_not_see_it() -> None:
    """Buffers, gradients, random numbers and what modules count are as they would be without."""
    states = []
    for every in (1, 10):
        torch.manual_seed(0)
        gain = Gain()
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4), gain)
        _, notebook = watched(model, every=every)
        mean(model(ones())).backward()
        gain.gain = math.inf
        with pytest.raises(OverflowDetected):
            model(ones())
        gradients = [value.grad for value in model.parameters() if value.grad is not None]
        states.append([*model.state_dict().values(), *gradients, torch.get_rng_state()])
        assert notebook.trip.frame.spec.module == "4"
    assert len(states[0]) == len(states[1])
    assert all(map(torch.equal, *states))


@every_check
def test_what_does_not_go_bad_again_did_not_recur(check: str) -> None:
    calls: list[int] = []

    def once(x: Tensor) -> Tensor:
        calls.append(1)
        return x * math.inf if len(calls) == 3 else x

    model = nn.Sequential(nn.Linear(4, 4), Calls(once), nn.Linear(4, 4))
    notebook = train(model, lambda: None, mean, check=check)
    trip = notebook.trip
    assert (trip.position, trip.frame.spec.module, trip.culprit.kind) == (Position(2, 0, 3), "", Kind.OUTPUT)
    assert names(trip) == ["0", "1", "2", ""]
    assert trip.recurs is False
    cause, evidence = classify(trip)
    assert cause is Cause.UNEXPLAINED
    assert "run again, was finite" in evidence
    assert (notebook.closeups[0].recurred, notebook.closeups[0].of) == (0, 3)


def reduced(x: Tensor) -> Tensor:
    y = x.detach().clone()
    dist.all_reduce(y)
    return x + y


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("place", "module"), [(1, "1"), (3, "")])
def test_a_forward_that_communicates_is_run_again_up_to_there(place: int, module: str) -> None:
    gain = Gain()
    layers: list[nn.Module] = [nn.Linear(4, 4), Calls(reduced), nn.Linear(4, 4)]
    layers.insert(place, gain)
    trip = train(nn.Sequential(*layers), goes(gain, math.inf), mean).trip
    assert (trip.position.batch, trip.frame.spec.module) == (2, module)
    assert ("not measured in this batch (every=K)" in classify(trip)[1]) == (not module)


def test_what_was_changed_in_place_since_is_not_run_again() -> None:
    def compute(self: Any, x: Tensor) -> Tensor:
        x += 1
        return self.gain(x)  # type: ignore[no-any-return]

    model: Any = Root(compute, gain=Gain(), rest=nn.Linear(4, 4))
    _, notebook = watched(model, every=10)
    model(ones())
    model.gain.gain = math.inf
    assert notebook.trip_of(model, ones()).frame.spec.module == ""
    assert notebook.closeups[0].note == "not run again: what the model was given has been changed in place since"


def test_an_inf_that_a_later_batch_shows_to_be_bad_data_was_no_mask_before() -> None:
    """The same inf input came twice, and the first time the model's output was finite."""
    model, _, notebook = watching(nn.Linear(4, 4), nn.Tanh(), Gain(), every=10, guard=False)
    bad = with_an_inf()
    _ = model(ones()), model(bad)
    model[2].gain = math.nan
    trip = notebook.trip_of(model, bad)
    assert (trip.frame.spec.module, classify(trip)[0]) == ("0", Cause.DATA)


# --- frames have the numbers that they have in a full batch --------------------------------------------------------------


def test_a_position_between_is_that_of_a_full_batch() -> None:
    positions: dict[int, list[Position]] = {}
    for every in (1, 10):
        model, detector, notebook = watching(every=every)
        positions[every] = []
        for _ in range(3):
            loss = mean(model(ones()))
            positions[every].append(detector.position)
            loss.backward()
            positions[every].append(detector.position)
        detector.remove()
        roots = [(frame.position.frame, len(frame.readings)) for batch in (1, 2) for frame in notebook.frames(batch)][-2:]
        assert [frame for frame, _ in roots] == [3, 4]
    assert positions[1] == positions[10]


# --- hard places ---------------------------------------------------------------------------------------------------------


@every_check
def test_a_root_that_returns_something_else_the_second_time_is_still_the_culprit(check: str) -> None:
    calls: list[int] = []

    def grows(x: Tensor) -> Any:
        calls.append(1)
        return (x * math.nan, x) if len(calls) == 3 else (x,) * (1 if len(calls) < 3 else 3)

    model = nn.Sequential(nn.Linear(4, 4), Calls(grows))
    trip = train(model, lambda: None, lambda output: mean(output[0]), check=check).trip
    assert (trip.position.batch, trip.frame.spec.module, trip.culprit.label) == (2, "", "output[0]")


@every_check
def test_the_line_is_that_of_the_users_forward_where_the_module_is_torchs_own(check: str) -> None:
    def compute(self: Any, x: Tensor) -> Tensor:
        return self.body(x * self.factor)  # type: ignore[no-any-return]  # called

    lines = {}
    for every in (1, 10):
        model: Any = Root(compute, body=nn.Linear(4, 4, bias=False), factor=1.0)
        with torch.no_grad():
            model.body.weight.fill_(1e20)
        _, notebook = watched(model, every=every, check=check)
        model(ones())
        model.factor = 1e30
        trip = notebook.trip_of(list, map(model, [ones()] * 2))
        assert trip.operator is not None
        lines[every] = trip.operator.source
        assert (trip.frame.spec.module, trip.operator.name) == ("body", "aten.mm.default")
    assert lines[1] == lines[10]
    assert lines[10] is not None
    assert lines[10].text.endswith("# called")


@pytest.mark.parametrize("check", ["frame", "batch"])
def test_while_it_runs_again_the_rank_is_at_the_first_frame(check: str) -> None:
    """Others may wait for this rank to pass a frame: it has not passed one that may trip."""
    model = model_of()
    seen = []

    def look(module: nn.Module, args: Any, output: Tensor) -> None:
        if running_again() is not None:
            seen.append(detector.progress)

    model[0].register_forward_hook(look)
    detector, notebook = watched(model, every=10, check=check)
    model(ones())
    model[1].gain = math.inf
    with pytest.raises(OverflowDetected):
        model(ones())
    assert seen[0] == Moment(0, 1, 0, 0)
    assert notebook.trip.position == Position(1, 0, 1)


def test_a_loss_that_a_scaler_absorbs_runs_nothing_again() -> None:
    runs: list[bool] = []

    model = nn.Sequential(nn.Linear(4, 4), nn.Identity())
    model[1].register_forward_hook(lambda *_: runs.append(running_again() is not None))
    _, notebook = watched(model, every=10)
    optimizer = sgd(model, 1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    for _ in range(4):
        scaled = scaler.scale(model(ones() * 100).square().sum()) / 1  # not exactly what the scaler returned
        assert not scaled.isfinite()
        scaled.backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert runs == [False] * 4
    assert not notebook.trips


def test_a_root_that_calls_itself_is_run_again_as_it_was_entered() -> None:
    def nested(self: Root, x: Tensor, depth: int = 0) -> Any:
        x = self.gain(self.linear(x)) * 1.0
        return self(x, depth + 1) if depth < 2 else x

    model = Root(nested, linear=nn.Linear(4, 4), gain=Gain())
    _, notebook = watched(model, every=10)
    model(ones())
    model.gain.gain = math.inf
    trip = notebook.trip_of(model, ones())
    assert (trip.position, trip.frame.spec.module, classify(trip)[0]) == (Position(1, 0, 1), "gain", Cause.OVERFLOW)


@every_check
def test_a_forward_that_ends_at_its_bad_frame_is_not_sent_as_a_batch(check: str) -> None:
    model = model_of()
    notebook = train(model, goes(model[1], math.inf), mean, check=check)
    assert [(summary.batch, summary.first_frame) for _, summary in notebook.sent] == [(0, 0), (1, 3)]


def test_the_frames_of_a_batch_whose_gradients_were_bad_are_in_order() -> None:
    model, _, notebook = watching(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2), every=10)
    train_on_an_inf(model)
    trip = notebook.trip
    assert names(trip) == ["0"]
    assert [frame.position for frame in trip.frames] == sorted(frame.position for frame in trip.frames)


@pytest.mark.parametrize("check", ["frame", "batch"])
def test_a_forward_that_raises_for_what_is_bad_is_run_again(check: str) -> None:
    def strict(x: Tensor) -> Tensor:
        assert x.isfinite().all(), "the user's own"
        return x

    model, _, notebook = watching(nn.Linear(4, 4), Gain(), Calls(strict), every=10, check=check)
    model(ones())
    model[1].gain = math.nan
    with pytest.raises(AssertionError, match="the user's own"):
        model(ones())
    assert notebook.found[0][0] == Position(1, 0, 1)


def test_a_training_that_ends_its_forwards_by_exceptions_is_run_again_a_few_times_alone() -> None:
    runs: list[bool] = []

    ends: list[type[Exception]] = []

    def end(x: Tensor) -> Tensor:
        runs.append(running_again() is not None)
        if ends:
            raise ends[0]("the user's own")
        return x

    model = nn.Sequential(nn.Linear(4, 4), Calls(end))
    _, notebook = watched(model, every=10**6)
    model(ones())
    for kind in [torch.cuda.OutOfMemoryError, *[ValueError] * 6]:
        ends[:] = [kind]
        with pytest.raises(kind):
            model(ones())
    first, memory, *rest = runs
    assert not first
    assert not memory
    assert rest[0] is False  # what follows from a lack of memory is not run again
    assert runs.count(False) == 8
    assert 3 <= runs.count(True) <= 2 * 3  # with gradients and without
    assert not notebook.trips


def test_a_forward_that_catches_everything_does_not_hide_where_it_was_bad() -> None:
    def compute(self: Any, x: Tensor) -> Tensor:
        x = self.first(x)
        try:
            y = self.gain(x)
        except:  # noqa: E722  the user's own
            y = x
        out: Tensor = self.last(self.more(y))
        return out

    model = Root(compute, first=nn.Linear(4, 4), gain=Gain(), more=nn.Identity(), last=nn.Linear(4, 2))
    trip = train(model, goes(model.gain, math.inf), mean).trip
    assert (trip.position, trip.frame.spec.module) == (Position(2, 0, 1), "gain")


@every_check
@pytest.mark.parametrize("how", ["marked before the loss", "a loss of its own"])
def test_a_loss_that_does_not_follow_upon_its_forward_has_it_run_again(check: str, how: str) -> None:
    model = aside()

    def loss_of(output: Tensor) -> Tensor:
        if how == "a loss of its own":
            mean(output).backward(retain_graph=True)
            return output.sum() + model.term  # type: ignore[no-any-return]
        rankwatch.detect_overflow(output, "logits")
        return mean(output) + model.term  # type: ignore[no-any-return]

    trip = train(model, goes(model.part[1], math.nan), loss_of, check=check).trip
    assert (trip.position, trip.frame.spec.module, trip.culprit.kind) == (Position(2, 0, 1), "part.1", Kind.OUTPUT)


def test_a_batch_that_goes_on_after_an_exception_is_run_again_once_more() -> None:
    """In eval mode a forward without a backward leaves its number to the next one."""
    model = model_of(nn.Linear(4, 4), gain := Fragile(), nn.Linear(4, 2)).eval()
    _, notebook = watched(model, every=10)
    mean(model(ones())).backward()
    gain.gain = -1.0
    with pytest.raises(ValueError, match="the user's own"):
        model(ones())
    gain.gain = math.inf
    assert notebook.trip_of(model, ones()).frame.spec.module == "1"


def test_where_nothing_trips_nothing_is_run_again() -> None:
    runs: list[bool] = []

    def end(x: Tensor) -> Tensor:
        runs.append(running_again() is not None)
        if len(runs) > 1:
            raise ValueError("the user's own")
        return x

    model = nn.Sequential(nn.Linear(4, 4), Calls(end))
    watched(model, every=10, policy="off")
    model(ones())
    with pytest.raises(ValueError, match="the user's own"):
        model(ones())
    assert runs == [False, False]
