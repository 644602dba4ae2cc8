"""The batches that wait: whose is next, and when it is said that they come too fast."""

from __future__ import annotations

import logging
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwatch_monitor.serve.door import backlog as backlog_module
from rankwatch_monitor.serve.door.backlog import SOON, TOO_LONG, Backlog, Pressure
from rankwatch_monitor.serve.door.inbox import Letter


def letter(peer: bytes, body: bytes) -> Letter:
    return Letter(peer, "", memoryview(body))


@given(st.lists(st.sampled_from([b"a", b"b", b"c"]) | st.none() | st.booleans(), max_size=60))
def test_each_peers_batches_come_in_order_and_the_peers_take_turns(steps: list[bytes | bool | None]) -> None:
    """None: one is taken; a truth value: all of one peer are."""
    backlog, waiting, number = Backlog(), dict[bytes, list[bytes]](), 0
    for step in steps:
        if isinstance(step, bytes):
            number += 1
            body = str(number).encode()
            backlog.add(letter(step, body))
            waiting.setdefault(step, []).append(body)
        elif not backlog:
            assert not waiting
            continue
        elif step is None:
            peer, bodies = next(iter(waiting.items()))
            taken = backlog.next()
            assert (taken.peer, bytes(taken.body)) == (peer, bodies.pop(0))
            del waiting[peer]
            waiting.update({peer: bodies} if bodies else {})
        else:
            peer = min(waiting) if step else max(waiting)
            assert [bytes(one.body) for one in backlog.take(peer)] == waiting.pop(peer)
        assert backlog.size == sum(len(body) for bodies in waiting.values() for body in bodies)
        assert all((peer in backlog) == (peer in waiting) for peer in (b"a", b"b", b"c"))


def test_it_is_full_at_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlog_module, "MAX_BYTES", 3)
    backlog = Backlog()
    backlog.add(letter(b"a", b"xx"))
    assert not backlog.is_full
    backlog.add(letter(b"b", b"x"))
    assert backlog.is_full


def changes(looks: list[tuple[float, bool]]) -> list[tuple[float, bool]]:
    """When it became high or low. ``looks``: times, and whether the backlog was empty then."""
    pressure = Pressure()
    return [(now, pressure.is_high) for now, is_empty in looks if pressure.look(now, is_empty=is_empty)]


def test_batches_that_come_all_at_once_each_second_are_no_pressure() -> None:
    looks = [(tenth / 10, tenth % 10 == 9) for tenth in range(1000)]  # empty once a second
    assert changes(looks) == []


def test_pressure_is_high_when_some_wait_at_all_times_and_low_when_they_have_not_for_a_while() -> None:
    full = [(tenth / 10, False) for tenth in range(100)]
    # Of few ranks the backlog may be empty for a moment: that is no end.
    moment = [(10.0, True), *((10 + tenth / 10, False) for tenth in range(1, 50))]
    calm = [(15 + tenth / 10, tenth % 5 == 0) for tenth in range(100)]
    (high, is_high), (low, is_low) = changes([*full, *moment, *calm])
    assert [is_high, is_low] == [True, False]
    assert [high, low] == pytest.approx([TOO_LONG, 15 + TOO_LONG], abs=0.11)


@given(st.lists(st.tuples(st.floats(0, 2 * TOO_LONG), st.booleans()), max_size=40))
def test_it_changes_only_after_long(steps: list[tuple[float, bool]]) -> None:
    now, looks = 0.0, list[tuple[float, bool]]()
    for wait, is_empty in steps:
        now += wait
        looks.append((now, is_empty))
    at = [now for now, _ in changes(looks)]
    assert all(later - earlier > TOO_LONG - SOON for earlier, later in pairwise(at))


def test_it_is_said_once_and_once_that_it_is_over(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    backlog = Backlog()
    backlog.add(letter(b"a", bytes(3 << 20)))
    for second in range(20):
        backlog.log_pressure(float(second))
    backlog.next()
    for second in range(20, 40):
        backlog.log_pressure(float(second))
    assert [record.getMessage() for record in caplog.records] == [
        "batches come faster than they are handled: 3 MiB of them wait here, and more in the ranks, which drop the oldest. "
        "An abort goes ahead of them. Give the collector a core of its own, or let the ranks send fewer: "
        "rankwatch tune --every 2",
        "the collector keeps up again",
    ]
