"""The window: it closes when enough is under way, and opens as that is handled."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rankwatch.shared.types.stream_limit import LEAST, charge
from rankwatch.tell.window import MOST_STILL, Window


def test_one_more_message_is_sent_while_there_is_room_however_long() -> None:
    window = Window()
    window.renew(2 * LEAST)
    window.send(1, 99)  # which counts as LEAST
    assert window.is_open
    window.send(2, 9 * LEAST)
    assert not window.is_open
    window.handle(1)
    assert not window.is_open
    window.handle(2)
    assert window.is_open


def test_after_a_welcome_nothing_is_under_way() -> None:
    window = Window()
    window.renew(1)
    window.send(7, 10)
    window.renew(LEAST + 1)
    assert window.is_open
    window.send(7, LEAST)
    assert window.is_open


def test_a_message_that_the_collector_never_takes_closes_the_window_for_ten_answers() -> None:
    """It may have refused it; without this, the rank would stream no more."""
    window = Window()
    window.renew(LEAST)
    window.send(3, LEAST)
    for _ in range(MOST_STILL - 1):
        window.handle(2)
        assert not window.is_open
    window.handle(2)
    assert window.is_open


@given(st.data(), st.integers(1, 8 * LEAST))
def test_what_is_under_way_is_less_than_the_window_and_one_message(data: st.DataObject, size: int) -> None:
    """Whatever is sent and acknowledged; numbers may be left out, and an acknowledgement may come late or twice."""
    window, under_way, last, still = Window(), dict[int, int](), 0, 0
    window.renew(size)
    for _ in range(data.draw(st.integers(0, 30))):
        if window.is_open and data.draw(st.booleans()):
            last += data.draw(st.integers(1, 3))
            length = data.draw(st.integers(1, 3 * LEAST))
            under_way[last] = charge(length)
            window.send(last, length)
            assert sum(under_way.values()) < size + under_way[last]
        else:
            handled = data.draw(st.integers(0, last))
            window.handle(handled)
            left = {seq: each for seq, each in under_way.items() if seq > handled}
            still = still + 1 if left == under_way and sum(left.values()) >= size else 0
            under_way = {} if still == MOST_STILL else left
            still %= MOST_STILL
        assert window.is_open == (sum(under_way.values()) < size)
