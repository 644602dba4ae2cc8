"""What one key, and one rank, may cause; and that the others do not notice."""

from __future__ import annotations

from dataclasses import replace

import pytest

import makers
from desk import Desk, connected, peer
from rankwatch.shared.types import messages
from rankwatch.shared.types.frame import FrameTable
from rankwatch.shared.types.tuning import Tuning
from rankwatch_monitor.decide.core import ledger
from rankwatch_monitor.decide.core.effects import Note, Send
from rankwatch_monitor.decide.core.journal import Left, Trained
from rankwatch_monitor.decide.core.ledger import Disconnected, Malformed, Received, Tick
from rankwatch_monitor.decide.core.options import Options
from rankwatch_monitor.decide.core.report import RankRows, RankState
from rankwatch_monitor.decide.keys import budget, tables

GREEDY, OTHER = "greedy", "llama"


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Desk:
    """A desk where a key may begin two runs."""
    monkeypatch.setattr(ledger, "MAX_RUNS", 2)
    return Desk()


def begin(desk: Desk, number: int, bound: str = GREEDY) -> list[messages.Message]:
    """A process says HELLO; returns what it is answered."""
    hello = makers.hello(job=bound, incarnation=f"{bound}{number}", start=f"{bound}{number}")
    return desk.answers(Received(f"{bound}{number}".encode(), hello, bound))


def test_too_many_runs_of_one_key_wait_and_those_of_another_begin(few: Desk) -> None:
    for number in range(2):
        assert isinstance(begin(few, number)[-1], messages.Welcome)
    (refused,) = begin(few, 2)
    assert isinstance(refused, messages.Error)
    assert refused.remedy == "none"  # the training goes on, and asks again
    assert isinstance(begin(few, 0, OTHER)[-1], messages.Welcome)
    few.handle(Received(b"greedy0", messages.Bye(1, "finished", ""), GREEDY))
    assert isinstance(begin(few, 2)[-1], messages.Welcome)


def test_a_run_without_a_connected_rank_makes_room(few: Desk) -> None:
    begin(few, 0)
    few.handle(Received(b"greedy0", messages.Table(makers.table()), GREEDY))
    few.handle(Received(b"greedy0", messages.Batch(1, makers.summary(0)), GREEDY))
    begin(few, 1)
    for number in range(2):
        few.handle(Disconnected(b"greedy%d" % number))
    assert isinstance(begin(few, 2)[-1], messages.Welcome)
    over = {name: run.ranks[0].state for name, run in few.ledger.runs.items() if run.over}
    assert over == {"greedy-0.2": RankState.LOST}  # not the one that has trained
    assert Left(RankState.LOST) in [entry.fact for entry in few.records["greedy-0.2"]]


def test_runs_that_follow_one_another_too_fast_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "MAX_RUNS", 2)
    desk = Desk()
    answers = []
    for number in range(4):
        answers += begin(desk, number)[-1:]
        desk.handle(Received(b"greedy%d" % number, messages.Bye(1, "finished", ""), GREEDY))
    assert [type(answer) for answer in answers] == [messages.Welcome] * 2 + [messages.Error] * 2
    assert isinstance(begin(desk, 0, OTHER)[-1], messages.Welcome)
    desk.now += 1 / budget.RUNS_PER_SECOND
    assert isinstance(begin(desk, 4)[-1], messages.Welcome)


def test_runs_of_one_key_that_end_do_not_make_those_of_another_forgotten() -> None:
    desk = Desk()
    begin(desk, 0, OTHER)
    desk.handle(Received(b"llama0", messages.Tripped(1, makers.trip()), OTHER))
    desk.handle(Received(b"llama0", messages.Bye(2, "aborted", ""), OTHER))
    for number in range(2 * ledger.KEPT_RUNS):
        begin(desk, number)
        desk.handle(Received(b"greedy%d" % number, messages.Bye(1, "finished", ""), GREEDY))
    assert len(desk.ledger.runs) == ledger.KEPT_RUNS + 1
    assert isinstance(begin(desk, 0, OTHER)[-1], messages.Abort)  # a process that was stopped meanwhile


def test_a_run_of_a_large_world_counts_for_its_ranks() -> None:
    desk = Desk()

    def begin_large(number: int, bound: str) -> type[messages.Message]:
        hello = makers.hello(0, 65_536, job=bound, incarnation=f"{number}", start=f"{number}")
        return type(desk.answers(Received(f"{bound}{number}".encode(), hello, bound))[0])

    assert [begin_large(number, GREEDY) for number in range(5)] == [messages.Welcome] * 4 + [messages.Error]
    assert begin_large(0, OTHER) is messages.Welcome
    assert isinstance(begin(desk, 9)[-1], messages.Error)  # nothing is left, for a second
    desk.now += 1
    assert isinstance(begin(desk, 9)[-1], messages.Welcome)
    desk.now += 65_536 / budget.PLACES_PER_SECOND
    assert begin_large(5, GREEDY) is messages.Welcome


def test_ranks_that_never_connected_are_rows_of_a_report_only_where_they_are_read() -> None:
    desk = Desk()
    desk.receive(3, makers.hello(3, 65_536))
    desk.receive(3, messages.Bye(1, "failed", "no memory"))
    desk.end(1)
    ranks = desk.reports[-1].ranks
    assert isinstance(ranks, RankRows)
    assert list(ranks.connected) == [3]
    assert len(ranks) == len(list(ranks)) == 65_536
    assert [row.state for row in ranks[2:5]] == [RankState.MISSING, RankState.FAILED, RankState.MISSING]
    assert (ranks[-1].rank, ranks[-1].state) == (65_535, RankState.MISSING)


def test_changes_of_options_that_come_too_fast_are_refused() -> None:
    desk = Desk()
    begin(desk, 0), begin(desk, 0, OTHER)

    def tune(bound: str) -> type[messages.Message]:
        return type(desk.answers(Received(b"control", messages.Tune("", Tuning(every=2)), bound))[0])

    answers = [tune(GREEDY) for _ in range(1000)]
    assert answers.count(messages.Tuned) == budget.CHANGES_AT_ONCE
    assert tune(OTHER) is messages.Tuned
    changes = [entry for entry in desk.records["greedy-0"] if isinstance(entry.fact, messages.Tune)]
    assert len(changes) == budget.CHANGES_AT_ONCE
    desk.now += 1 / budget.CHANGES_PER_SECOND
    assert tune(GREEDY) is messages.Tuned


def test_each_key_has_its_own_lines_in_the_log() -> None:
    desk = Desk()

    def lines(bound: str, number: int) -> int:
        return sum(isinstance(effect, Note) for _ in range(number) for effect in desk.handle(Malformed(b"x", "bad", bound)))

    assert lines(GREEDY, 5000) == budget.LINES_AT_ONCE + 3  # the 1024th, 2048th and 4096th
    assert lines(OTHER, 10) == 10


def test_processes_that_want_one_rank_have_no_more_lines_than_other_refusals() -> None:
    desk = connected(1)
    lines = [
        effect
        for pid in range(5000)
        for effect in desk.handle(Received(b"x", makers.hello(incarnation=f"{pid}", pid=pid)))
        if isinstance(effect, Note)
    ]
    assert len(lines) == budget.LINES_AT_ONCE + 3


def test_a_watch_that_is_off_is_told_once() -> None:
    desk = connected(1)
    desk.take()
    desk.receive(0, *(messages.Off(seq, "ended by an error") for seq in range(1, 100)))
    assert sum(isinstance(effect, Note) for effect in desk.take()) == 1


@pytest.mark.parametrize(
    "say",
    [
        lambda seq: messages.Bye(seq, "finished", "x" * 4000),
        lambda seq: messages.Off(seq, "x" * 4000),
        lambda seq: messages.LookedCloser(seq, makers.closeup(note="x" * 4000)),
        lambda seq: messages.Noticed(seq, makers.notice(batch=seq)),
        lambda seq: messages.Tripped(seq, makers.trip()),
    ],
)
def test_what_one_rank_says_is_noted_down_within_bounds(say: object) -> None:
    assert callable(say)
    desk = connected(2)
    for seq in range(1, 2000):
        desk.handle(Received(peer(0), say(seq), size=4000))
    assert len(desk.records["train-0"]) < budget.WORDS_AT_ONCE // 4000 + 20
    assert isinstance(desk.effects[-1], Send)
    assert isinstance(desk.effects[-1].message, messages.Error)
    desk.handle(Received(peer(1), messages.Bye(1, "failed", "no memory"), size=100))
    assert desk.run.ranks[1].state is RankState.FAILED


def test_what_is_over_the_budget_waits_and_is_not_acknowledged() -> None:
    desk = connected(1)
    notices = [messages.Noticed(seq, replace(makers.notice(), batch=seq)) for seq in range(1, 1500)]
    spool: list[messages.Sequenced] = [*notices, messages.Tripped(1500, makers.trip())]
    spool.append(messages.Batch(1501, makers.summary(0)))
    desk.receive(0, messages.Table(makers.table()))
    stored = 0
    for _ in range(200):
        for message in spool[stored:]:
            desk.handle(Received(peer(0), message, size=4000))
        desk.now += 1.0
        desk.receive(0, makers.hello())
        stored = desk.sent(0, messages.Welcome)[-1].seq
    assert stored == 1501
    seqs = [entry.fact.seq for entry in desk.records["train-0"] if isinstance(entry.fact, (messages.Sequenced, Trained))]
    assert seqs == list(range(1, 1502))
    assert desk.decided.trip == makers.trip()
    desk.end(1)
    assert desk.reports[-1].gaps == ()


def test_the_shortest_messages_are_noted_down_within_bounds_too() -> None:
    desk = connected(1)
    body = messages.Bye(1, "finished", "")
    for seq in range(1, 2 * budget.WORDS_AT_ONCE // budget.WORDS_OVERHEAD):
        desk.handle(Received(peer(0), replace(body, seq=seq), size=20))
    assert len(desk.records["train-0"]) < budget.WORDS_AT_ONCE // budget.WORDS_OVERHEAD + 20


def test_all_ranks_of_one_key_are_noted_down_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "ALL_WORDS_AT_ONCE", 100 * 1024)
    desk = Desk()

    def connect(rank: int, bound: str, name: bytes = b"one") -> type[messages.Message]:
        size = 1024 - budget.WORDS_OVERHEAD
        return type(desk.answers(Received(name, makers.hello(rank, 1000, job=bound), bound, size))[0])

    answers = [connect(rank, GREEDY) for rank in range(1000)]  # one connection may speak for one rank after another
    assert answers == [messages.Welcome] * 100 + [messages.Error] * 900
    assert len(desk.ledger.runs["greedy-0"].ranks) == 100
    assert connect(99, GREEDY) is messages.Welcome  # as after a broken connection
    desk.handle(Received(b"one", messages.Bye(1, "finished", ""), GREEDY, 20))
    assert isinstance(desk.effects[-1], Send)
    assert isinstance(desk.effects[-1].message, messages.Error)
    assert connect(0, OTHER, b"other") is messages.Welcome
    desk.now += 1.0
    assert connect(100, GREEDY) is messages.Welcome


def test_a_run_that_is_taken_over_counts_for_the_key_that_began_it(few: Desk) -> None:
    begin(few, 0), begin(few, 1)
    later = ledger.Ledger(few.options)
    for name in ("greedy-0", "greedy-0.2"):
        assert later.restore(name, few.records[name], [], 0.0).opened.bound == GREEDY
    hello = makers.hello(job=GREEDY, incarnation="greedy2", start="greedy2")
    for number in range(2):  # a rank of each connects again: neither makes room
        again = replace(hello, incarnation=f"greedy{number}", start=f"greedy{number}")
        later.handle(Received(b"%d" % number, again, GREEDY), 0.0)
    sent = [effect.message for effect in later.handle(Received(b"2", hello, GREEDY), 0.0) if isinstance(effect, Send)]
    assert isinstance(sent[-1], messages.Error)
    assert "the most for one key" in sent[-1].text


def test_the_tables_of_all_runs_of_a_key_are_held_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "MAX_BYTES", 100 * 1000)
    desk = Desk()

    def send_table(number: int, bound: str) -> FrameTable:
        spec = makers.frame(module=f"layer{number}").spec
        table = FrameTable((spec,))
        size = 10_000 - tables.SPEC_BYTES - len(spec.readings) * tables.ROW_BYTES
        desk.handle(Received(f"{bound}{number % 2}".encode(), messages.Table(table), bound, size))
        return table

    def is_known(table: FrameTable, number: int, bound: str) -> bool:
        batch = messages.Batch(1 + number, makers.summary(number, of=table))
        return not desk.handle(Received(f"{bound}{number % 2}".encode(), batch, bound))

    for bound in (GREEDY, OTHER):
        begin(desk, 0, bound), begin(desk, 1, bound)
    others = send_table(0, OTHER)
    first, *more = (send_table(number, GREEDY) for number in range(10))
    assert is_known(first, 0, GREEDY)  # it was used last
    more += [send_table(number, GREEDY) for number in range(10, 14)]
    known = [is_known(table, number, GREEDY) for number, table in enumerate(more, 1)]
    assert known == [False] * 4 + [True] * 9
    assert is_known(first, 20, GREEDY)
    assert is_known(others, 0, OTHER)
    room = desk.ledger.runs["greedy-0"].budget.tables
    assert room.held == 100 * 1000
    for number in range(2):
        desk.handle(Received(f"{GREEDY}{number}".encode(), messages.Bye(100, "finished", ""), GREEDY))
    assert room.held == 0


def test_many_runs_are_looked_at_some_by_some_and_each_in_its_turn() -> None:
    desk = Desk()
    number = 4 * ledger.RUNS_AT_ONCE
    for each in range(number):
        begin(desk, each)
    runs = list(desk.ledger.runs.values())
    pause = number * ledger.LOOK_AFTER
    for _ in range(3):
        desk.now += pause
        looked_at = []
        for _ in range(6):
            before = [run.ticked_at for run in runs]
            desk.handle(Tick())
            looked_at.append(sum(run.ticked_at != at for run, at in zip(runs, before, strict=True)))
        assert looked_at == [ledger.RUNS_AT_ONCE] * 4 + [0, 0]
        assert {run.ticked_at for run in runs} == {desk.now}


def test_a_name_that_many_runs_had_is_not_searched_for_from_the_first_one_on() -> None:
    asked: list[str] = []

    def claim(name: str) -> bool:
        asked.append(name)
        return True

    begun = ledger.Ledger(Options(), claim)
    for number in range(100):
        hello = makers.hello(job=GREEDY, incarnation=f"{number}", start=f"{number}")
        begun.handle(Received(b"%d" % number, hello, GREEDY), 0.0)
        begun.handle(Received(b"%d" % number, messages.Bye(1, "finished", ""), GREEDY), 0.0)
        begun.take_journals()
    assert asked == ["greedy-0", *(f"greedy-0.{number}" for number in range(2, 101))]
