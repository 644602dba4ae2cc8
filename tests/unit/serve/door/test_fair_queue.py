"""Whose message is next."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

import makers
from rankwatch.shared.link import wire
from rankwatch.shared.types import messages
from rankwatch.shared.types.fields import MAX_RANKS
from rankwatch.shared.types.fingerprint import FingerprintTable, RankMesh
from rankwatch.shared.types.frame import FrameTable
from rankwatch_monitor.decide.keys.budget import WORK_AT_ONCE, WORK_PER_SECOND
from rankwatch_monitor.serve.door import fair_queue as turns_module
from rankwatch_monitor.serve.door.decoder import decode
from rankwatch_monitor.serve.door.fair_queue import DEBT, OVERHEAD, SLICE, Turns, is_long
from rankwatch_monitor.serve.door.inbox import Ended, Item, Letter

HELLO, BEAT = (wire.encode(message) for message in (makers.hello(), makers.beat(0, 0, 0)))
SPEC = makers.frame().spec


def letter(peer: bytes, key: str = "a", body: bytes = BEAT) -> Letter:
    return Letter(peer, key, memoryview(body))


def contested(*keys: str) -> Turns:
    turns = Turns()
    for key in keys:
        assert not turns.waits(letter(key.encode(), key), 0.0)
    turns.begin(0.0)
    return turns


def long_table() -> bytes:
    body = wire.encode(messages.Table(FrameTable((SPEC,) * 1000)))
    assert is_long(letter(b"a", body=body))
    return body


def test_a_key_that_is_alone_never_waits() -> None:
    turns = contested("a")
    turns.spend("a", 100.0, 0.0)
    assert not turns.waits(letter(b"x"), 0.0)


def test_a_key_over_its_share_waits_while_there_is_another_one() -> None:
    turns = contested("a", "b")
    turns.spend("a", WORK_AT_ONCE, 0.0)
    assert turns.waits(letter(b"x", "a"), 0.0)
    assert not turns.waits(letter(b"y", "b"), 0.0)
    turns.begin(0.1)
    assert not turns.waits(letter(b"x", "a"), 0.1)
    turns.spend("a", WORK_AT_ONCE, 0.1)
    turns.begin(1000.0)
    turns.spend("a", 1e6, 1000.0)
    assert not turns.waits(letter(b"x", "a"), 1000.0)  # the other one is gone


def test_a_key_with_all_of_its_share_has_no_more_than_a_slice_in_a_row() -> None:
    turns = contested("a", "b")
    turns.spend("a", SLICE, 0.0)
    assert (turns.waits(letter(b"x", "a"), 0.0), turns.waits(letter(b"y", "b"), 0.0)) == (True, False)
    turns.begin(0.0)
    assert not turns.waits(letter(b"x", "a"), 0.0)


def test_a_debt_has_an_end() -> None:
    turns = contested("a", "b")
    for _ in range(1000):
        turns.spend("a", 0.5, 0.0)
    assert turns.waits(letter(b"x", "a"), 0.0)
    turns.begin(0.0)
    assert not turns.waits(letter(b"x", "a"), (0.5 + (1 + DEBT) * WORK_AT_ONCE) / WORK_PER_SECOND)


def test_what_came_before_from_the_same_peer_is_handled_before() -> None:
    turns = contested("a", "b")
    turns.spend("a", 1.0, 0.0)
    first, second, third = letter(b"x"), letter(b"x", body=HELLO), letter(b"x")
    assert turns.add(second, [first])
    assert turns.waits(third, 1000.0)  # behind the others
    assert turns.waits(Ended(b"x"), 1000.0)
    assert turns.add(third)
    assert turns.add(Ended(b"x"))
    assert [turns.next(0.0) for _ in range(5)] == [first, second, third, Ended(b"x"), None]
    assert not turns
    assert not turns.waits(Ended(b"x"), 0.0)


def test_the_key_with_the_most_left_goes_first_and_its_peers_in_turn() -> None:
    turns = contested("a", "b")
    turns.spend("a", 1.0, 0.0)
    turns.spend("b", 0.5, 0.0)
    for peer, key in ((b"1", "a"), (b"2", "b"), (b"2", "b"), (b"3", "b")):
        turns.add(letter(peer, key))
    order = []
    while (item := turns.next(0.0)) is not None:
        order.append(item.peer)
    assert order == [b"2", b"3", b"2", b"1"]


def test_while_a_table_is_decoded_its_key_waits_and_others_do_not() -> None:
    turns = contested("a", "b")
    table = letter(b"x", "a", long_table())
    assert turns.waits(table, 0.0)
    for each in (table, letter(b"x", "a"), letter(b"y", "a")):
        turns.add(each)
    assert turns.next(0.0) is table
    assert (turns.next(0.0), turns.is_ready, bool(turns)) == (None, False, True)
    turns.add(letter(b"z", "b"))
    assert turns.next(0.0) == letter(b"z", "b")
    turns.decoded(table)
    assert [item.peer for _ in range(2) if (item := turns.next(0.0))] == [b"y", b"x"]
    assert not turns


def test_a_peer_of_which_too_much_waits_says_hello_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns_module, "MAX_WAITING", 3 * OVERHEAD)
    turns = contested("a", "b")
    turns.spend("a", 1.0, 0.0)
    assert [turns.add(letter(b"x")) for _ in range(4)] == [True, True, False, True]  # it is told once
    while turns.next(0.0):
        pass
    assert turns.waits(letter(b"x"), 1000.0)
    assert turns.add(letter(b"x"))
    assert turns.next(0.0) is None  # it was not taken
    assert turns.waits(letter(b"x", body=HELLO), 1000.0)
    turns.add(letter(b"x", body=HELLO))
    turns.add(letter(b"x"))
    assert [turns.next(0.0), turns.next(0.0)] == [letter(b"x", body=HELLO), letter(b"x")]
    turns.begin(0.0)
    assert not turns.waits(letter(b"x"), 1000.0)


def test_the_end_of_a_peer_of_which_nothing_is_taken_is_the_end_of_it() -> None:
    turns = contested("a", "b")
    turns._keys["a"].deaf.add(b"x")
    assert not turns.waits(Ended(b"x"), 0.0)
    turns.forget(b"x")
    assert not turns.waits(letter(b"x"), 0.0)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.booleans(), st.floats(0, 1)), max_size=60))
def test_each_message_is_handled_once_in_the_order_of_its_peer(sent: list[tuple[str, int, bool, float]]) -> None:
    turns, expected, handled, long = Turns(), [], [], long_table()
    decoding: list[Letter] = []

    def handle(item: Item | None) -> None:
        if isinstance(item, Letter) and is_long(item):
            decoding.append(item)
        elif item is not None:
            handled.append(item)

    for number, (key, peer, is_table, spent) in enumerate(sent):
        body = long if is_table else wire.encode(messages.Ack(number, abort=False))
        item = letter(f"{key}{peer}".encode(), key, body)
        expected.append(item)
        turns.begin(0.0)
        if not turns.waits(item, 0.0):
            handle(item)
        else:
            assert turns.add(item)
        turns.spend(key, spent, 0.0)
        if number % 3 == 0:
            handle(turns.next(0.0))
        if number % 7 == 0 and decoding:
            handled.append(done := decoding.pop())
            turns.decoded(done)
    while turns:
        handle(turns.next(0.0))
        if decoding:
            handled.append(done := decoding.pop())
            turns.decoded(done)
    for peer_name in {item.peer for item in expected}:
        assert [item for item in handled if item.peer == peer_name] == [item for item in expected if item.peer == peer_name]
    assert Counter(map(str, handled)) == Counter(map(str, expected))


def test_a_fingerprint_table_is_decoded_beside_the_loop_however_short_it_is() -> None:
    mesh = RankMesh(tuple(range(MAX_RANKS)), (MAX_RANKS,), (True,))
    body = wire.encode(messages.Fingerprints(FingerprintTable((), (mesh,) * 8)))
    assert len(body) < 200
    assert is_long(letter(b"x", body=body))
    assert not is_long(letter(b"x", body=wire.encode(messages.Table(FrameTable((SPEC,))))))


def test_what_cannot_be_decoded_says_why() -> None:
    assert decode(letter(b"x")) == (wire.decode(BEAT), "")
    assert decode(letter(b"x", body=b"\x93\xa5TABLE" + bytes(40_000)))[0] is None
