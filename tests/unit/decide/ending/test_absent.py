"""A rank fails because another one is not there any more, or never was: the reason says so, whichever is heard of first."""

from __future__ import annotations

import pytest

from desk import connected
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
