"""A rerun before a TRIP ends by its work, and by the wall time where it waits."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import Tensor

from closeups import tripped
from models import Calls
from rankwatch.rerun.limit import Limit


@pytest.mark.parametrize(
    ("wall", "cpu", "is_found"),
    [
        pytest.param(3.0, 0.1, True, id="starved"),
        pytest.param(1.5, 1.2, False, id="works"),
        pytest.param(11.0, 0.0, False, id="waits"),
    ],
)
def test_a_rerun_has_a_second_of_a_core(monkeypatch: pytest.MonkeyPatch, wall: float, cpu: float, is_found: bool) -> None:
    clock = {"monotonic": 0.0, "thread_time": 0.0}
    for name in clock:
        monkeypatch.setattr(time, name, lambda name=name: clock[name])

    def slow(x: Tensor) -> Tensor:
        clock["monotonic"] += wall
        clock["thread_time"] += cpu
        return x / 0

    trip, _ = tripped(Calls(slow), torch.ones(2), watch={"closeup": 0.01})
    assert (trip.operator is not None) is is_found


def test_the_work_of_each_thread_that_runs_operators_counts() -> None:
    """Autograd runs the backward of a GPU in a thread of its own, whose clock began long ago."""

    def work() -> None:
        while (begun := time.thread_time()) < 0.05:
            pass
        reached.append(limit.is_reached())
        while time.thread_time() < begun + 0.02:
            pass
        reached.append(limit.is_reached())

    limit, reached = Limit(cpu=0.01), list[bool]()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert reached == [False, True]
