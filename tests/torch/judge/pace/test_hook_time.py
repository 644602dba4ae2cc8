"""The time in hooks, on fake clocks; and trainings under a budget."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from notebook import Notebook, learn, sgd, watched
from rankwatch.errors import OverflowDetected
from rankwatch.hook.detector import Detector
from rankwatch.judge.batch import BatchInProgress, BatchState
from rankwatch.judge.events import ForwardBegan, ForwardComes, Steps
from rankwatch.judge.pace.full_batches import FIRST, FullBatches, Pacing
from rankwatch.judge.pace.hook_time import AROUND, HookTime, HostLaps, Laps
from rankwatch.shared.types.frame import Position

pytestmark = pytest.mark.usefixtures("one_thread")

BUDGET = 0.02


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Door:
    """In the place of a detector's doors."""

    laps: Laps | None = None


def test_a_lap_has_the_time_in_hooks_since_the_one_before() -> None:
    laps = HostLaps(clock := Clock())

    def hook(seconds: float) -> None:
        laps.enter()
        clock.now += seconds
        laps.leave()
        clock.now += 100.0

    hook(1.0)
    hook(2.0)
    assert laps.lap()() == pytest.approx(3.0 + 2 * AROUND)
    laps.enter()
    clock.now += 4.0
    assert laps.lap()() == pytest.approx(4.0)  # within a hook
    clock.now += 8.0
    laps.leave()
    assert laps.lap()() == pytest.approx(8.0 + AROUND)
    laps.leave()  # one that was entered before anybody wanted to know
    assert laps.lap()() == 0.0


def test_what_is_timed_goes_to_the_batch_that_it_was_spent_on() -> None:
    """Each batch takes a second; hooks take 66 ms of a full one, 10 ms of another, and a second of evaluations after each."""
    clock, door, full = Clock(), Door(), FullBatches(None, BUDGET)
    entry = object()
    observer = HookTime(full, door, lambda: HostLaps(clock), lambda: 0, lambda: False, clock)

    def hook(seconds: float, *events: ForwardComes | ForwardBegan) -> None:
        laps = door.laps
        if laps is not None:
            laps.enter()
        for event in events:
            observer.on(event)
        clock.now += seconds
        if laps is not None:
            laps.leave()

    for number in range(40):
        batch = BatchInProgress(Position(number, 0, 0), number, state=BatchState.BATCH, is_full=full.is_full(number))
        batch.entry = entry  # type: ignore[assignment]
        evaluation = BatchInProgress(Position(number, 1, 0), number, state=BatchState.EVAL)
        hook(0.01, ForwardComes(Steps(number, number)), ForwardBegan(batch))
        hook(0.056 if batch.is_full else 0.0)
        clock.now += 1.0
        hook(0.0, ForwardComes(Steps(number, number)), ForwardBegan(evaluation))
    assert door.laps is None
    assert full.pacing is Pacing.BUDGET
    assert full.cost.full == pytest.approx(0.066, abs=1e-3)
    assert full.cost.between == pytest.approx(0.01, abs=1e-3)
    assert full.cost.bare == pytest.approx(1.0, abs=1e-3)
    assert full.cost.every == 8  # with what is around each hook, 7 is just too few


# --- trainings ------------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)
        self.bad_at, self.calls = -1, 0

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.calls == self.bad_at:
            hidden = hidden.float() * 1e30 * 1e30
        self.calls += 1
        out: Tensor = self.second(hidden)
        return out


def full_batches(notebook: Notebook) -> list[int]:
    return sorted({summary.batch for table, summary in notebook.batches if len(table.specs) > 2})


def trained(model: nn.Module, batches: int, **options: object) -> tuple[Detector, Notebook]:
    detector, notebook = watched(model, **{"budget": 0.021, **options})  # not the default, which tests switch off
    optimizer = sgd(model)
    for _ in range(batches):
        learn(model(torch.ones(2, 4)).square().mean(), optimizer)
    return detector, notebook


def test_many_tiny_modules_cost_so_much_that_few_batches_are_full() -> None:
    """Of a few modules, a full batch costs as much as another one."""
    _, notebook = trained(nn.Sequential(*[nn.Linear(4, 4) for _ in range(100)]), 80)
    found = full_batches(notebook)
    assert found[:FIRST] == list(range(FIRST))
    assert 64 in found
    assert len(found) < 40
    assert {summary.batch for _, summary in notebook.batches} == set(range(80))  # of the others, the root


@pytest.mark.usefixtures("fresh_compiler")
def test_of_a_compiled_model_as_few_batches_are_full_as_can_be() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model.compile(backend="eager")
    _, notebook = trained(model, 140, budget=0.9)
    assert [number for number in full_batches(notebook) if number >= 2 * FIRST] == [64, 128]


def test_what_goes_bad_between_two_full_batches_is_named_all_the_same() -> None:
    model = Net()
    model.bad_at = 75
    with pytest.raises(OverflowDetected):
        trained(model, 80)


@pytest.mark.parametrize(
    "options", [{"budget": 0.0}, {"every": 1}, {"policy": "strict"}, {"gradients": True}, {"trace_batch_nums": [3]}], ids=str
)
def test_where_all_batches_are_measured_as_ever(options: dict[str, object]) -> None:
    detector, notebook = trained(Net(), 60, **options)
    assert {summary.batch for table, summary in notebook.batches if len(table.specs) > 2} == set(range(60))
    assert not detector.whereabouts.cost.every


class Summing(Net):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        dist.all_reduce(hidden.detach().clone())
        out: Tensor = self.second(hidden)
        return out


class Parts(Net):
    """The root is never called."""

    def train_on(self, x: Tensor) -> Tensor:
        loss: Tensor = self.second(self.first(x)).sum()
        return loss


@pytest.mark.usefixtures("one_rank")
def test_a_model_that_communicates_in_its_forward_is_measured_in_each_batch() -> None:
    detector, notebook = trained(Summing(), 60)
    assert full_batches(notebook) == list(range(60))
    assert detector.whereabouts.cost.why == "its forward communicates"


def test_a_model_whose_parts_are_called_is_measured_in_each_batch() -> None:
    model = Parts()
    detector, _ = watched(model, budget=0.021)
    for _ in range(40):
        model.train_on(torch.ones(2, 4)).backward()
    assert detector.whereabouts.cost.why == "the model's parts are called, and not the model"


def test_an_input_that_is_changed_in_place_cannot_be_given_again() -> None:
    class Normalising(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mul_(0.5))

    detector, _ = trained(Normalising(), 40)
    assert "changed in place" in detector.whereabouts.cost.why
