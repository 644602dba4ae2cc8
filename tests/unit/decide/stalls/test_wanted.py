"""Stacks that a person asks for, of ranks that need not stall, over a fake clock."""

from __future__ import annotations

import makers
from desk import Desk, connected
from rankwatch.shared.types import messages
from rankwatch_monitor.decide.core.effects import Send
from rankwatch_monitor.decide.core.ledger import Received
from rankwatch_monitor.decide.stalls.stacks import MOST, PATIENCE
from rankwatch_monitor.decide.stalls.wanted import AT_ONCE

CLIENT = b"person"
LINES = ("main thread", "  train.py:31 in load")


def ask(at: Desk, rank: int = messages.ANY_RANK, run: str = "train-0", peer: bytes = CLIENT) -> None:
    at.take()
    at.handle(Received(peer, messages.Inspect(0, run, rank)))


def told(at: Desk, peer: bytes = CLIENT) -> list[messages.Message]:
    return [effect.message for effect in at.asked(Send) if effect.peer == peer]


def answer(at: Desk, *ranks: int) -> None:
    for rank in ranks:
        (asked,) = at.sent(rank, messages.Inspect)[-1:]
        at.receive(rank, messages.Inspected(asked.number, "train.py:31 in load", LINES))


def test_a_healthy_run_says_where_its_ranks_are_and_notes_nothing_down() -> None:
    at = connected(2)
    at.receive((0, 1), makers.beat(7, 0, 9))
    before = len(at.records["train-0"])
    ask(at)
    answer(at, 0, 1)
    first, second = told(at)
    assert isinstance(first, messages.Inspected)
    assert (first.asked, first.waits, first.lines, first.why_not) == (2, "train.py:31 in load", LINES, "")
    assert first.who == "rank 0 of 2 (node0, local rank 0); last seen in batch 7, frame 9, phase forward"
    assert isinstance(second, messages.Inspected)
    assert len(at.records["train-0"]) == before
    answers = len(told(at))
    answer(at, 0)  # a second answer to the same question
    assert len(told(at)) == answers


def test_of_many_ranks_those_are_asked_that_are_furthest_behind() -> None:
    at = connected(2 * MOST)
    for rank in range(2 * MOST):
        at.receive(rank, makers.beat(100 - rank, 0, 9))
    ask(at)
    asked = [rank for rank in range(2 * MOST) if at.sent(rank, messages.Inspect)]
    assert asked == list(range(MOST, 2 * MOST))
    ask(at, rank=3)
    assert [rank for rank in range(2 * MOST) if at.sent(rank, messages.Inspect)] == [3]


def test_of_a_rank_that_does_not_answer_it_is_said_why() -> None:
    at = connected(3)
    at.receive((0, 1, 2), makers.beat(7, 0, 9))
    ask(at, rank=0)
    at.disconnect(1)
    ask(at, rank=1, peer=b"other")
    (gone,) = told(at, b"other")
    assert isinstance(gone, messages.Inspected)
    assert gone.why_not == "it is not connected"
    ask(at, rank=0)
    at.keep_hearing((1, 2), makers.beat(7, 0, 9), times=2 * int(PATIENCE) + 4, every=0.5)
    (silent,) = told(at)[-1:]
    assert isinstance(silent, messages.Inspected)
    assert silent.why_not.startswith("it has been silent for 1")
    assert len(at.sent(0, messages.Inspect)) > 3  # it was asked again and again


def test_what_cannot_be_asked_is_refused() -> None:
    at = connected(2)
    for question, complaint in (
        (messages.Inspect(0, "train-7"), "no run train-7; under way here: train-0"),
        (messages.Inspect(0, "train-0", 5), "no rank 5 has connected: ranks 0-1 have"),
    ):
        (refusal,) = at.answers(Received(CLIENT, question))
        assert refusal == messages.Error(complaint, "none")
    for _ in range(AT_ONCE):
        ask(at)
    (refusal,) = at.answers(Received(CLIENT, messages.Inspect(0, "train-0")))
    assert isinstance(refusal, messages.Error)
    assert refusal.text.startswith(f"{AT_ONCE} questions are open")
