"""When an aborted rank is due to be ended, over a fake clock; and what holds do."""

from __future__ import annotations

import threading

from rankwatch.tell.deadline import Countdown
from rankwatch.tell.holds import Holds


def test_without_holds_it_is_the_grace_after_the_abort() -> None:
    countdown = Countdown(10, 300, 100)
    assert [countdown.due(now, held=False) for now in (100, 105, 200)] == [110, 110, 110]


def test_a_hold_is_waited_for_and_then_the_grace_begins() -> None:
    countdown = Countdown(10, 300, 100)
    assert countdown.due(100, held=True) == 410
    assert countdown.due(150, held=False) == 160
    assert countdown.due(155, held=True) == 410  # another save, which began in time
    assert countdown.due(170, held=False) == 180


def test_a_hold_that_does_not_end_is_waited_for_up_to_the_limit() -> None:
    countdown = Countdown(10, 300, 100)
    assert [countdown.due(now, held=True) for now in (100, 399, 400, 405)] == [410] * 4
    assert countdown.due(406, held=False) == 410


def test_without_a_limit_nothing_is_waited_for() -> None:
    countdown = Countdown(10, 0, 100)
    assert countdown.due(100, held=True) == countdown.due(105, held=False) == 110


def test_holds_nest_and_any_thread_may_hold() -> None:
    holds, told = Holds(), list[bool]()
    holds.listen(lambda: told.append(bool(holds)))
    inside, leave = threading.Event(), threading.Event()

    def save() -> None:
        with holds.hold():
            inside.set()
            leave.wait()

    with holds.hold():
        with holds.hold():
            pass
        thread = threading.Thread(target=save)
        thread.start()
        inside.wait()
    assert holds
    leave.set()
    thread.join()
    assert not holds
    assert told == [True, False]


def test_a_save_that_fails_holds_nothing() -> None:
    holds = Holds()
    try:
        with holds.hold():
            raise OSError("the disk is full")
    except OSError:
        assert not holds
