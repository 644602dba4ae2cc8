"""How long the parts of a batch take, on a fake clock."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rankwatch.judge.batch import BatchInProgress, BatchState
from rankwatch.judge.events import BackwardBegins, BackwardEnded, ForwardBegan, RootLeft, StepBegins, StepDone
from rankwatch.judge.stopwatch import Stopwatch
from rankwatch.shared.types.frame import Position
from rankwatch.shared.types.spent import NOT_SPENT, OF, Spent


def began(state: BatchState = BatchState.BATCH) -> ForwardBegan:
    return ForwardBegan(BatchInProgress(Position(0, 0, 0), 0, state=state))


FORWARD, BACKWARD = [(1.0, RootLeft())], [(0.5, BackwardBegins([], True, None)), (4.0, BackwardEnded(True, True))]
STEP: list[tuple[float, Any]] = [(0.25, StepBegins(None)), (0.5, StepDone(None, 0))]  # type: ignore[arg-type]
BATCH: list[tuple[float, Any]] = [(8.0, began()), *FORWARD, *BACKWARD, *STEP]


def told(events: Iterable[tuple[float, Any]]) -> Spent:
    """``events``: each with the seconds before it."""
    now = 1000.0
    watch = Stopwatch(lambda: now)
    for seconds, event in events:
        now += seconds
        watch.on(event)
    return watch.spent


def test_each_part_of_a_batch_has_its_time() -> None:
    assert told(BATCH * 4) == Spent(2, 8.0, 1.5, 4.0, 0.75)  # the first one began with the process, the last one runs


def test_medians_of_the_last_batches() -> None:
    slow = [(80.0, began()), *BATCH[1:]]
    assert told([*BATCH * 40, *slow, *BATCH * 10]) == Spent(OF, 8.0, 1.5, 4.0, 0.75)


def test_an_evaluation_is_between_batches() -> None:
    evaluation = [(2.0, began(BatchState.EVAL)), (3.0, RootLeft())]
    assert told((BATCH + evaluation) * 4).between == 13.0


def test_of_micro_batches_each_is_one() -> None:
    micro = [(8.0, began()), *FORWARD, *BACKWARD]
    found = told([*micro, *micro, *micro, *STEP] * 3)
    assert (found.batches, found.step, found.backward) == (7, 0.0, 4.0)


def test_before_the_third_batch_nothing_is_known() -> None:
    assert told([]) == NOT_SPENT
    assert told(BATCH * 2) == NOT_SPENT
    assert told([*STEP, *BACKWARD]) == NOT_SPENT  # of another model
