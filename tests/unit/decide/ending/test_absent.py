"""A rank fails because another one is not there any more, or never was: the reason says so, whichever is heard of first."""

from __future__ import annotations

import pytest

from desk import connected
from rankwatch.shared.types.action import Action
from rankwatch_monitor.decide.core.ledger import RankExited
from rankwatch_monitor.decide.core.report import Outcome
from rankwatch_monitor.decide.next.next_action import next_action
from rankwatch_monitor.views.roles import in_order

CLOSED = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:5"


@pytest.mark.parametrize("is_heard_first", [True, False])
@pytest.mark.parametrize("outcome", ["ended", "finished"])
def test_a_rank_that_ended_early_is_named_as_the_cause(outcome: str, is_heard_first: bool) -> None:
    desk = connected(3)
    if is_heard_first:
        desk.leave(1, outcome)
    desk.leave(0, "failed", CLOSED)
    if not is_heard_first:
        desk.leave(1, outcome)
    desk.leave(2, "aborted")
    desk.end(1)
    assert desk.reports[-1].reason.endswith(
        "failed: gloo: RuntimeError: Connection closed by peer [10.0.0.1]:5; rank 1 had ended before its first batch"
    )
    roles = [(one.row.rank, one.text, one.is_cause) for one in in_order(desk.run.report())]
    assert roles[:2] == [(1, "had ended already", True), (0, "failed without rank 1", False)]


@pytest.mark.parametrize("outcome", ["ended", "finished"])
def test_a_rank_that_had_fewer_batches_is_named_with_both_numbers(outcome: str) -> None:
    desk = connected(3)
    for rank, last in enumerate((90, 89, 90)):
        desk.run.ranks[rank].last_batch = last
    desk.leave(1, outcome)
    desk.leave(0, "failed", CLOSED)
    desk.leave(2, "aborted")
    desk.end(1)
    unequal = "ranks ran unequal numbers of batches: rank 1 ended after 90, rank 0 was in its 91st"
    assert f"; {unequal}; give each rank as many (" in desk.reports[-1].reason
    advice = next_action(desk.reports[-1])
    assert advice is not None
    assert (advice.action, advice.reason.startswith(unequal)) == (Action.FIX_CODE, True)


@pytest.mark.parametrize(("death", "is_named"), [("killed by SIGABRT", True), ("killed by SIGKILL", False)])
def test_gloo_may_end_the_process_of_the_rank_that_waits(death: str, *, is_named: bool) -> None:
    """In a thread of its own, where nobody can catch its error."""
    desk = connected(2)
    for rank, last in enumerate((90, 89)):
        desk.run.ranks[rank].last_batch = last
    desk.leave(1, "ended")
    desk.disconnect(0)
    desk.handle(RankExited("train-0", 0, desk.run.ranks[0].hello.incarnation, death))
    desk.wait(10.0)
    desk.end(1)
    report = desk.reports[-1]
    assert report.outcome is Outcome.LOST
    assert ("ranks ran unequal numbers of batches: rank 1 ended after 90" in report.reason) is is_named
    advice = next_action(report)
    assert advice is not None
    assert (advice.action is Action.FIX_CODE) is is_named
    assert in_order(report)[0].row.rank == (1 if is_named else 0)


def test_a_rank_that_never_connected_is_named() -> None:
    desk = connected(3, (0, 1))
    desk.leave(0, "failed", CLOSED)
    desk.leave(1, "aborted")
    desk.end(1)
    assert desk.reports[-1].reason.endswith("; rank 2 never connected")


def test_an_error_of_its_own_has_no_other_cause() -> None:
    desk = connected(2)
    desk.leave(1, "ended")
    desk.leave(0, "failed", "KeyError: 'label'")
    desk.end(1)
    assert desk.reports[-1].reason.endswith("failed: KeyError: 'label'")


@pytest.mark.parametrize(
    ("text", "is_named"),
    [
        (CLOSED, True),
        ("DistNetworkError: recvValueBytes failed on SocketImpl(fd=79): Connection reset by peer", True),
        ("ConnectionResetError: [Errno 104] Connection reset by peer", False),
    ],
)
def test_a_failure_after_the_training_is_of_others_only_in_a_collective(text: str, *, is_named: bool) -> None:
    desk = connected(2)
    desk.leave(1, "finished")
    desk.leave(0, "failed", text)
    desk.end(1)
    assert ("rank 1 had ended" in desk.reports[-1].reason) is is_named
