"""What a rank sends of its spool, and in which order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

import makers
from rankwatch.shared.link import wire
from rankwatch.shared.types import messages
from rankwatch.shared.types.stream_limit import LEAST
from rankwatch.tell.outbox import Outbox
from rankwatch.tell.spool import Spool
from rankwatch.tell.window import PUSH

NARROW = LEAST // 16
"""A window for one batch, which no trip pushes another through."""


class Desk:
    """A spool, its outbox, and what came out of it."""

    def __init__(self, window: int) -> None:
        self.spool = Spool()
        self.outbox = Outbox(self.spool)
        self.window = window
        self.greet()

    def greet(self, seq: int = 0) -> None:
        self.outbox.renew(messages.Welcome("train-0", 1.0, 2.0, seq, window=self.window))

    def say(self, *kinds: str) -> None:
        for kind in kinds:
            if kind == "batch":
                self.spool.append(lambda seq: messages.Batch(seq, makers.summary(seq)), makers.table())
            elif kind == "trip":
                self.spool.append(lambda seq: messages.Tripped(seq, makers.trip()))
            elif kind == "closeup":
                self.spool.append(lambda seq: messages.LookedCloser(seq, makers.closeup()))
            else:
                self.spool.append(lambda seq: messages.Noticed(seq, makers.notice(label=f"input[{seq}]")))

    def sent(self) -> list[tuple[str, int]]:
        """The kind and the number of each message since the last call; tables are left out."""
        found = list[tuple[str, int]]()

        def send(message: messages.Message) -> int:
            if isinstance(message, messages.Sequenced):
                found.append((type(message).__name__, message.seq))
            return len(wire.encode(message))

        self.outbox.send(send)
        return found


def test_trips_and_closeups_go_ahead_of_what_the_window_holds_back_and_come_again_in_their_turn() -> None:
    desk = Desk(NARROW)
    desk.say("notice", "batch", "batch", "notice", "trip", "closeup")
    assert desk.sent() == [("Noticed", 1), ("Batch", 2), ("Tripped", 0), ("LookedCloser", 0)]
    assert desk.sent() == []
    desk.outbox.take_ack(messages.Ack(1, abort=False, handled=2))
    assert desk.sent() == [("Batch", 3), ("Noticed", 4), ("Tripped", 5), ("LookedCloser", 6)]
    assert not desk.spool.is_behind


def test_a_trip_pushes_a_few_batches_before_it_through_a_closed_window_as_it_is_judged_by_them() -> None:
    few, more = Desk(LEAST), Desk(LEAST)
    few.say(*["batch"] * 8, "trip", "batch", "closeup")
    batches = [("Batch", seq) for seq in range(1, 9)]
    assert few.sent() == [*batches, ("Tripped", 9), ("LookedCloser", 0)]
    few.outbox.take_ack(messages.Ack(9, abort=True, handled=8))
    assert few.sent() == [("Batch", 10), ("LookedCloser", 11)]
    more.say(*["batch"] * 10, "trip")
    assert more.sent() == [("Batch", 1), ("Tripped", 0)]


def test_with_an_open_window_nothing_is_sent_twice() -> None:
    desk = Desk(10 * LEAST)
    desk.say("batch", "trip", "closeup", "batch")
    assert desk.sent() == [("Batch", 1), ("Tripped", 2), ("LookedCloser", 3), ("Batch", 4)]


def test_after_a_reconnect_what_is_not_stored_is_sent_again_and_the_trip_goes_ahead_again() -> None:
    desk = Desk(NARROW)
    desk.say("batch", "batch", "batch", "trip")
    assert desk.sent() == [("Batch", 1), ("Tripped", 0)]
    desk.greet(seq=1)
    assert desk.sent() == [("Batch", 2), ("Tripped", 0)]


def test_what_is_given_up_is_dropped_and_counted_and_the_rest_is_sent() -> None:
    desk = Desk(NARROW)
    desk.say("batch", "batch", "notice", "batch", "trip")
    desk.sent()
    desk.spool.give_up()
    assert desk.spool.dropped == 2
    assert desk.sent() == [("Noticed", 3), ("Tripped", 5)]


@given(st.data())
def test_all_comes_in_order_and_within_the_window(data: st.DataObject) -> None:
    desk = Desk(data.draw(st.sampled_from([NARROW, LEAST, 3 * LEAST])))
    came, handled, said, trips = list[tuple[str, int]](), 0, 0, 0
    for step in data.draw(st.lists(st.sampled_from(["batch", "batch", "batch", "trip", "notice", "handle"]), max_size=30)):
        if step == "handle":
            handled = data.draw(st.integers(handled, max([handled, *(seq for _, seq in came)])))
            desk.outbox.take_ack(messages.Ack(0, abort=False, handled=handled))
        else:
            said, trips = said + 1, trips + (step == "trip")
            desk.say(step)
        came += desk.sent()
        under_way = [seq for kind, seq in came if kind == "Batch" and seq > handled]
        assert LEAST * len(under_way) < (1 + PUSH * trips) * desk.window + LEAST
    while desk.spool.is_behind:
        handled = max([handled, *(seq for _, seq in came)])
        desk.outbox.take_ack(messages.Ack(0, abort=False, handled=handled))
        came += desk.sent()
    assert [seq for _, seq in came if seq] == [*range(1, said + 1)]
