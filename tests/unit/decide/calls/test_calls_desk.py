"""What a run makes of the collectives that its ranks call: who is asked, what is told, who is the culprit; on a fake clock."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import Any

import makers
from desk import Desk, connected
from rankwatch.shared.types import messages
from rankwatch.shared.types.calls import LAST_WORDS, MAX_CALLS, CollectiveCall, GroupCount
from rankwatch_monitor.decide.calls.calls_desk import MOST_GROUPS, MOST_KEPT
from rankwatch_monitor.decide.core.effects import Alert, Note, Trouble
from rankwatch_monitor.decide.core.journal import CollectivesDiffer
from rankwatch_monitor.record import facts
from rankwatch_monitor.views import as_json
from rankwatch_monitor.views import text as as_text

GROUP = 2**63 - 1
STEP = ("all_reduce of 4096 float32 (sum) at train.py:91 in step", "broadcast of 1 int64 at train.py:70 in step")
BARRIER = "barrier at train.py:88 in save"
REFUSED = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:9402"


@dataclass
class Ranks:
    """Ranks that call ``called``, each its own, and answer what they are asked."""

    at: Desk
    called: list[list[str]]
    group: int = GROUP
    asked: int = 0
    seqs: list[int] = field(default_factory=list)

    def call(self, rank: int, *names: str) -> None:
        self.called[rank] += names

    def end_step(self, *ranks: int) -> None:
        """These ranks end a batch, of which they tell; all do by default."""
        for rank in ranks or range(len(self.called)):
            self.seqs = self.seqs or [0] * len(self.called)
            self.seqs[rank] += 1
            self.at.receive(rank, messages.Table(makers.table()))
            batch = messages.Batch(self.seqs[rank], makers.summary(self.seqs[rank] - 1), self.counts(rank))
            self.at.receive(rank, batch)
        self.answer()

    def beat(self, *at: int, phase: str = "forward", mute: tuple[int, ...] = ()) -> None:
        for rank in self.at.run.books.running - set(mute):
            self.at.receive(rank, replace(makers.beat(*at, phase=phase), calls=self.counts(rank)))
        self.answer()

    def counts(self, rank: int) -> tuple[GroupCount, ...]:
        called = self.called[rank]
        return (GroupCount(self.group, len(called), hash(tuple(called)) & (2**63 - 1)),) if called else ()

    def answer(self) -> None:
        while True:
            asked = [(rank, one) for rank in range(len(self.called)) for one in self.at.sent(rank, messages.Recount)]
            if len(asked) == self.asked:
                return
            new = [one for rank in range(len(self.called)) for one in self._new(rank)]
            self.asked = len(asked)
            for rank, one in new:
                self.at.receive(rank, self.tail(rank, one.number, one.first))

    def _new(self, rank: int) -> list[tuple[int, messages.Recount]]:
        sent = self.at.sent(rank, messages.Recount)
        seen = self.seen.get(rank, 0)
        self.seen[rank] = len(sent)
        return [(rank, one) for one in sent[seen:]]

    seen: dict[int, int] = field(default_factory=dict)

    def tail(self, rank: int, number: int, first: int) -> messages.Recounted:
        calls = tuple(
            CollectiveCall(hash(name) & (2**63 - 1), *name.split(" at ")) for name in self.called[rank][first - 1 :]
        )
        size, count = len(self.called), len(self.called[rank])
        return messages.Recounted(number, self.group, "the default group", size, first, count, calls[:MAX_CALLS])


def ranks_of(world: int, steps: int = 0, **options: Any) -> Ranks:
    """Ranks that have trained so many steps alike."""
    ranks = Ranks(connected(world, **options), [[] for _ in range(world)])
    for _ in range(steps):
        train(ranks)
    return ranks


def train(ranks: Ranks, odd: int = -1, more: str = "") -> None:
    """One step; one rank calls something more in it."""
    for rank in range(len(ranks.called)):
        ranks.call(rank, *([more] if rank == odd else []), *STEP)
    ranks.end_step()


def warnings(at: Desk) -> list[str]:
    return [effect.text for effect in at.effects if isinstance(effect, Note) and effect.level == logging.WARNING]


def test_one_barrier_more_is_told_two_steps_later() -> None:
    ranks = ranks_of(4, steps=5)
    assert not ranks.asked
    train(ranks, odd=0, more=BARRIER)
    assert not ranks.at.run.calls.told
    train(ranks)
    text = (
        "rank 0 called a collective that ranks 1-3 did not: its 11th of the default group is barrier at train.py:88 in save; "
        "that of ranks 1-3 is all_reduce of 4096 float32 (sum) at train.py:91 in step; they were equal up to the 10th"
    )
    assert warnings(ranks.at) == [f"run train-0: {text}"]
    (alert,) = ranks.at.asked(Alert)
    assert (alert.trouble, alert.text) == (Trouble.COLLECTIVES, text)
    train(ranks)
    assert len(ranks.at.asked(Alert)) == 1
    report = ranks.at.run.report()
    assert f"\n  calls      {text}\n" in as_text.render_so_far(report)
    found = CollectivesDiffer(report.collectives[0])
    assert facts.decode(*facts.encode(found)) == found
    (told,) = as_json.to_dict(report)["collectives"]
    assert (told["group"], told["number"], told["how"], told["is_first"], told["text"]) == (
        "7fffffffffffffff",
        11,
        "more",
        True,
        text,
    )
    assert told["sides"][0] == {"ranks": [0], "count": 1, "site": "train.py:88 in save", "what": "barrier"}


def test_another_collective_is_told_at_the_end_of_its_step() -> None:
    ranks = ranks_of(2, steps=2)
    ranks.call(0, STEP[0])
    ranks.call(1, "all_reduce of 4095 float32 (sum) at train.py:91 in step")
    ranks.end_step()
    (found,) = ranks.at.run.calls.all()
    assert found.text == (
        "rank 0 called another collective than rank 1: its 5th of the default group is all_reduce of 4096 float32 (sum) at "
        "train.py:91 in step; that of rank 1 is all_reduce of 4095 float32 (sum) at train.py:91 in step; they were equal up to "
        "the 4th"
    )


def test_a_stall_says_who_has_not_called_what_the_others_wait_in() -> None:
    ranks = ranks_of(2, steps=3, stall_after=10.0, abort_on_stall=True)
    ranks.call(0, STEP[0])
    at = ranks.at
    while not at.sent(1, messages.Abort):
        at.receive(0, replace(makers.beat(3, 0, 9), calls=ranks.counts(0)))
        at.receive(1, replace(makers.beat(3, 0, 2), calls=ranks.counts(1)))
        at.wait(0.5)
        ranks.answer()
        for rank in (0, 1):
            for one in at.sent(rank, messages.Inspect):
                where = "dataset.py:40 in load" if rank else "all_reduce of 4096 float32 (gloo, 2 ranks)"
                at.receive(rank, messages.Inspected(one.number, where, (), "" if rank else where))
    (found,) = at.run.calls.all()
    assert found.text == (
        "all called the same; rank 1 has not called the 7th of the default group (all_reduce of 4096 float32 (sum) at "
        "train.py:91 in step on rank 0): it is at dataset.py:40 in load"
    )
    assert at.run.stalls.watch.stall is not None
    assert (
        "rank 1 is in dataset.py:40 in load; rank 0 waits for it in all_reduce of 4096 float32; " in at.run.report().reason
    )
    assert "rank 1 has not called the 7th of the default group" in at.run.report().reason
    assert at.sent(0, messages.Abort)[0].rank == 1
    assert not [one for one in at.asked(Alert) if one.trouble is Trouble.COLLECTIVES]
    at.end(1)
    assert "  calls " not in as_text.render(at.run.report())  # the reason says it


def test_ranks_that_go_on_are_awaited_no_more() -> None:
    ranks = ranks_of(2, steps=3, stall_after=10.0)
    ranks.call(0, STEP[0])
    for _ in range(30):
        ranks.at.receive(0, replace(makers.beat(3, 0, 9), calls=ranks.counts(0)))
        ranks.at.receive(1, replace(makers.beat(3, 0, 2), calls=ranks.counts(1)))
        ranks.at.wait(0.5)
        ranks.answer()
    assert len(ranks.at.run.report().collectives) == 1
    ranks.call(0, STEP[1])
    ranks.call(1, *STEP)
    ranks.end_step()
    ranks.beat(5, 0, 3)
    ranks.at.wait(1.0)
    assert ranks.at.run.report().collectives == ()


def test_a_rank_that_left_early_is_the_culprit_of_the_one_that_failed() -> None:
    ranks = ranks_of(2, steps=3)
    at = ranks.at
    at.receive(1, ranks.tail(1, LAST_WORDS, 7))
    at.receive(1, messages.Bye(4, "ended", ""))
    ranks.call(0, STEP[0])
    ranks.at.receive(0, replace(makers.beat(3, 0, 2), calls=ranks.counts(0)))
    at.receive(0, ranks.tail(0, LAST_WORDS, 1))
    at.receive(0, messages.Bye(4, "failed", REFUSED))
    at.wait(3.0)
    at.end(1)
    assert at.run.report().reason.endswith(
        "; all called the same; rank 1 has not called the 7th of the default group (all_reduce of 4096 float32 (sum) at "
        "train.py:91 in step on rank 0): it has ended after batch 2"
    )


def test_ranks_that_fail_of_calls_that_do_not_fit_have_them_in_the_reason() -> None:
    ranks = ranks_of(3, steps=3)
    at = ranks.at
    ranks.call(0, BARRIER)
    ranks.call(1, STEP[0])
    ranks.call(2, STEP[0])
    at.receive(0, ranks.tail(0, LAST_WORDS, 1))
    at.receive(0, messages.Bye(4, "failed", REFUSED))
    ranks.answer()
    at.wait(0.1)
    assert [one.rank for one in at.sent(1, messages.Abort)] == [-1]
    at.receive((1, 2), messages.Bye(4, "aborted", ""))
    at.end(1)
    assert (
        "; rank 0 called another collective than ranks 1-2: its 7th of the default group is barrier"
        in at.run.report().reason
    )


def test_a_rank_that_is_behind_is_the_culprit_of_a_timeout() -> None:
    ranks = ranks_of(3, steps=3)
    at = ranks.at
    for rank in (0, 2):
        ranks.call(rank, STEP[0])
    ranks.beat(3, 0, 2)
    at.receive(0, messages.Bye(4, "failed", "RuntimeError: [gloo/x.cc:1] Timed out waiting 1800000ms for recv operation"))
    assert at.sent(1, messages.Abort)[0].rank == 1
    assert not [one for one in at.sent(1, messages.Recount) if at.sent(1, messages.Abort)[0] is None]


def test_ranks_that_are_only_slower_than_one_that_failed_are_not_blamed() -> None:
    ranks = ranks_of(3, steps=3)
    at = ranks.at
    for rank in (0, 2):
        ranks.call(rank, STEP[0])
    ranks.beat(3, 0, 2)
    at.receive(0, ranks.tail(0, LAST_WORDS, 1))
    at.receive(0, messages.Bye(4, "failed", REFUSED))
    assert at.sent(1, messages.Abort)[0].rank == -1
    ranks.answer()
    at.receive((1, 2), messages.Bye(5, "aborted", ""))
    at.end(1)
    assert at.run.report().collectives == ()


def test_ranks_that_live_say_what_ended_another_one() -> None:
    """gloo ends a process whose tensor is too small for what it receives."""
    ranks = ranks_of(3, steps=3)
    at = ranks.at
    ranks.call(0, BARRIER)
    ranks.call(1, STEP[0])
    at.disconnect(2)
    while not at.sent(1, messages.Abort):
        for rank in (0, 1):
            at.receive(rank, makers.beat(3, 0, 2))
        at.wait(0.5)
    ranks.answer()
    (found,) = at.run.calls.all()
    assert (found.number, [side.ranks for side in found.sides]) == (7, [(0,), (1,)])


def test_an_error_of_a_ranks_own_asks_nobody() -> None:
    ranks = ranks_of(2, steps=3)
    ranks.call(1, STEP[0])
    ranks.beat(3, 0, 2)
    ranks.at.receive(0, messages.Bye(4, "failed", "ValueError: bad token"))
    assert not ranks.asked
    assert not ranks.at.sent(1, messages.Recount)
    assert ranks.at.sent(1, messages.Abort)[0].rank == -1


def test_a_rank_that_is_watched_no_more_is_not_compared() -> None:
    ranks = ranks_of(2, steps=2)
    ranks.at.receive(1, messages.Off(3, "switched itself off"))
    for _ in range(4):
        train(ranks, odd=0, more=BARRIER)
    assert not ranks.asked
    assert not ranks.at.run.calls.told


def test_an_answer_to_no_question_says_nothing() -> None:
    ranks = ranks_of(2, steps=2)
    for number in (1, 7, LAST_WORDS):
        ranks.at.receive(1, ranks.tail(1, number, 1))
        ranks.at.receive(1, replace(ranks.tail(1, number, 1), group=5))
    assert not ranks.at.run.calls.told


def test_a_collector_that_was_restarted_tells_no_group_again() -> None:
    ranks = ranks_of(3, steps=2)
    for _ in range(2):
        train(ranks, odd=0, more=BARRIER)
    again = Desk(ranks.at.options)
    run = again.ledger.restore("train-0", ranks.at.records["train-0"], [], ranks.at.now)
    again.records["train-0"] = list(ranks.at.records["train-0"])
    again.connect(3)
    later = Ranks(again, ranks.called, seqs=[90] * 3)
    for _ in range(3):
        train(later, odd=0, more=BARRIER)
    assert run.calls.all() == ranks.at.run.calls.all()
    assert not warnings(again)
    assert not later.asked


def test_numbers_that_no_record_can_hold_are_not_taken() -> None:
    ranks = ranks_of(2, steps=2)
    for rank in (0, 1):
        ranks.at.receive(rank, replace(makers.beat(3, 0, 2), calls=(GroupCount(GROUP, 2**63 - 1, rank),)))
    ranks.answer()
    assert not ranks.asked
    assert all(member.count == 4 for member in ranks.at.run.calls.groups[GROUP].members.values())


def test_of_very_many_groups_the_last_ones_are_compared_and_few_are_told() -> None:
    at = connected(2)
    for number in range(100):
        ranks = Ranks(at, [[STEP[0], STEP[1]], [STEP[1], STEP[0]]], group=number)
        ranks.seen, ranks.seqs = {rank: len(at.sent(rank, messages.Recount)) for rank in (0, 1)}, [number, number]
        ranks.end_step()
    calls = at.run.calls
    assert len(calls.groups) == MOST_GROUPS
    assert len(calls.told) == MOST_KEPT
    assert 0 < calls.unkept <= 100 - MOST_KEPT
    assert len(at.asked(Alert)) == MOST_KEPT
    assert as_json.to_dict(at.run.report())["collectives_unkept"] == calls.unkept
