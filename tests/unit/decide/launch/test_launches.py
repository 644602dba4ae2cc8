"""Which run a process belongs to: that of its own start. Names are for show."""

from __future__ import annotations

from typing import Any

import pytest

import makers
from desk import Desk, peer
from rankwatch.shared.types import messages
from rankwatch.shared.types.tuning import Tuning
from rankwatch_monitor.decide.core.effects import PointLatest, Send
from rankwatch_monitor.decide.core.journal import JobEnded, JobInterrupted
from rankwatch_monitor.decide.core.ledger import Disconnected, Received
from rankwatch_monitor.decide.core.options import Options
from rankwatch_monitor.decide.core.report import Outcome, RankState
from rankwatch_monitor.decide.core.run import Run


def begin(desk: Desk, start: str, ranks: int = 2, world_size: int = 2, **changes: Any) -> list[bytes]:
    """All ranks of a launch connect; returns their peers."""
    peers = [f"{start}-{rank}".encode() for rank in range(ranks)]
    for rank, who in enumerate(peers):
        told = {"start": start, "incarnation": f"{start}-{rank}", "age": 1.0, **changes}
        desk.handle(Received(who, makers.hello(rank, world_size, **told)))
    return peers


def beat(desk: Desk, peers: list[bytes], seconds: float) -> None:
    """Time passes, and these ranks are heard every second."""
    for second in range(int(seconds)):
        for who in peers:
            desk.handle(Received(who, makers.beat(second, 0, 0)))
        desk.wait(1.0)


def cut_off(desk: Desk, peers: list[bytes]) -> None:
    """Their machines lose power: silence first, and the ends of their connections later."""
    desk.wait(5.0)
    for who in peers:
        desk.handle(Disconnected(who))


def runs_of(desk: Desk) -> list[tuple[str, str, int]]:
    return [(run.id, run.opened.start, len(run.ranks)) for run in desk.ledger.runs.values()]


def run_of(desk: Desk, start: str) -> Run:
    return next(run for run in desk.ledger.runs.values() if run.opened.start == start)


def aborted(desk: Desk) -> set[bytes]:
    return {effect.peer for effect in desk.asked(Send) if isinstance(effect.message, messages.Abort)}


@pytest.mark.parametrize("job", ["train", "127.0.0.1-29500"])
def test_two_jobs_of_one_name_are_two_runs_and_never_touch_each_other(job: str) -> None:
    desk = Desk()
    theirs, ours = begin(desk, "theirs", job=job), begin(desk, "ours", job=job)
    assert runs_of(desk) == [(f"{job}-0", "theirs", 2), (f"{job}-0.2", "ours", 2)]
    desk.handle(Received(theirs[1], messages.Tripped(1, makers.trip(at=(3, 0, 7)))))
    beat(desk, [*theirs, *ours], 20)
    assert aborted(desk) == set(theirs)
    assert run_of(desk, "ours").report().reason == ""


def test_ranks_of_two_starts_that_come_mixed_are_kept_apart() -> None:
    desk = Desk()
    for rank in (0, 1):
        for start in ("a", "b"):
            hello = makers.hello(rank, 2, start=start, incarnation=f"{start}{rank}")
            desk.handle(Received(f"{start}{rank}".encode(), hello))
    assert runs_of(desk) == [("train-0", "a", 2), ("train-0.2", "b", 2)]


def test_a_job_relaunched_after_a_power_failure_waits_for_nobody_and_the_old_run_ends_as_lost() -> None:
    desk = Desk()
    old = begin(desk, "old")
    cut_off(desk, old)
    assert not run_of(desk, "old").over  # they might only be cut off
    new = begin(desk, "new")
    assert all(isinstance(effect.message, messages.Welcome) for effect in desk.effects[-2:] if isinstance(effect, Send))
    assert runs_of(desk)[1] == ("train-0.2", "new", 2)
    beat(desk, new, 2)
    report = run_of(desk, "old").report()
    assert run_of(desk, "old").over
    assert (report.outcome, [row.state for row in report.ranks]) == (Outcome.LOST, [RankState.LOST] * 2)
    assert report.reason.endswith("; then run train-0.2 of the same job began")
    assert aborted(desk) == set()
    assert run_of(desk, "new").report().reason == ""


def test_a_job_relaunched_before_its_old_connections_end_waits_for_nobody() -> None:
    desk = Desk()
    old = begin(desk, "old")
    desk.wait(1.0)
    new = begin(desk, "new")
    beat(desk, new, 5)
    cut = run_of(desk, "old")
    assert not cut.over  # a process that is stopped is silent too, and still connected
    for who in old:
        desk.handle(Disconnected(who))
    beat(desk, new, 2)
    assert cut.over
    assert cut.report().outcome is Outcome.LOST


def test_ranks_of_a_stranger_with_our_name_that_were_only_cut_off_return_unharmed() -> None:
    desk = Desk()
    theirs = begin(desk, "theirs")
    cut_off(desk, theirs)
    ours = begin(desk, "ours")
    beat(desk, ours, 2)
    assert run_of(desk, "theirs").over
    again = begin(desk, "theirs", age=10.0)
    beat(desk, [*ours, *again], 5)
    run = run_of(desk, "theirs")
    assert (run.over, run.report().reason, aborted(desk)) == (False, "", set())
    assert [row.state for row in run.report().ranks] == [RankState.RUNNING] * 2


def test_of_two_starts_the_older_one_is_told_by_the_age_of_its_processes() -> None:
    desk = Desk()
    begin(desk, "new", age=1.0)
    begin(desk, "old", age=500.0)  # it reconnects later, to a collector that was started again
    assert (run_of(desk, "old").successor, run_of(desk, "new").successor) == ("train-0", "")


def test_a_start_that_cannot_be_told_from_the_last_one_does_not_join_what_was_decided() -> None:
    desk = Desk()
    desk.handle(Received(peer(0), makers.hello(0, 2, start="same", incarnation="old", age=9.0)))
    desk.handle(Received(peer(0), messages.Bye(1, "failed", "KeyError")))
    desk.wait(1.0)
    late = makers.hello(1, 2, start="same", incarnation="late", age=9.0)
    desk.handle(Received(b"late", late))
    assert aborted(desk) == {b"late"}  # of that launch, and slow to start
    desk.take()
    desk.wait(1.0)
    new = begin(desk, "same", age=0.5)
    assert runs_of(desk) == [("train-0", "same", 2), ("train-0.2", "same", 2)]
    assert aborted(desk) & set(new) == set()


def test_a_seat_whose_process_is_gone_is_not_waited_for() -> None:
    desk = Desk()
    begin(desk, "same")
    cut_off(desk, [b"same-0", b"same-1"])
    desk.handle(Received(b"new", makers.hello(0, 2, start="same", incarnation="new")))
    assert runs_of(desk) == [("train-0", "same", 2), ("train-0.2", "same", 1)]


def test_a_rank_that_does_not_know_its_start_goes_by_the_names() -> None:
    desk = Desk()
    begin(desk, "known", ranks=1, world_size=3)
    for rank in (1, 2):
        desk.handle(Received(peer(rank), makers.hello(rank, 3)))
    assert runs_of(desk) == [("train-0", "known", 3)]
    begin(desk, "other", ranks=1, world_size=3)
    assert runs_of(desk)[1:] == [("train-0.2", "other", 1)]


def test_a_further_model_is_a_field_and_no_suffix_of_the_name() -> None:
    desk = Desk()
    for number in (0, 1):
        hello = makers.hello(0, 1, job="llama-3", model=number, incarnation=str(number))
        desk.handle(Received(b"%d" % number, hello, "llama-3"))
    runs = [(run.id, run.opened.job, run.opened.model) for run in desk.ledger.runs.values()]
    assert runs == [("llama-3-0", "llama-3", 0), ("llama-3.2-0", "llama-3", 1)]


def test_the_key_of_a_job_is_worth_nothing_for_a_job_whose_name_begins_like_it() -> None:
    desk = Desk()
    rank = makers.hello(0, 1, job="llama-3.1", incarnation="theirs")
    desk.handle(Received(b"theirs", rank, "llama-3.1"))
    refused = desk.handle(Received(b"ours", makers.hello(0, 1, job="llama-3.1", incarnation="ours"), "llama-3"))
    assert messages.Error("its connection file speaks for job llama-3 alone, not for llama-3.1", "stop") in [
        effect.message for effect in refused if isinstance(effect, Send)
    ]
    (told,) = desk.handle(Received(b"ours", messages.Tune("", Tuning(every=5)), "llama-3"))
    assert told == Send(b"ours", messages.Error("no run is under way here", "none"))
    assert runs_of(desk) == [("llama-3.1-0", "", 1)]


def test_the_end_of_a_command_is_the_end_of_its_own_runs() -> None:
    desk = Desk(Options(launch="mine", expects_job_end=True))
    strangers = begin(desk, "theirs", launch="another")
    mine = [makers.hello(rank, 2, start="mine", incarnation=f"mine-{rank}", launch="mine"[: 4 * rank]) for rank in (0, 1)]
    desk.receive(0, mine[0])
    assert not any(isinstance(effect, PointLatest) for effect in desk.effects)
    desk.receive(1, mine[1])  # the other node's rank was not started by the command
    assert desk.asked(PointLatest) == [PointLatest("train-0.2")]
    desk.handle(JobInterrupted("SIGTERM"))
    for who in strangers:
        desk.handle(Received(who, messages.Bye(1, "failed", "KeyError")))
    desk.handle(JobEnded(143, "SIGTERM"))
    reports = {report.run: (report.is_own, report.outcome, report.reason) for report in desk.reports}
    assert reports["train-0.2"] == (True, Outcome.ABORTED, "stopped by SIGTERM")
    assert reports["train-0"][:2] == (False, Outcome.FAILED)


# --- a launch that takes over from another one --------------------------------------------------------------------------------


def asks(desk: Desk, rank: int, name: str, start: str, earlier: str = "", world_size: int = 2, **changes: Any) -> bytes:
    """The process of this name, which began two seconds ago, is a rank with this start; returns its peer."""
    told = {"start": start, "earlier": earlier, "incarnation": name, "pid": 1000 + hash(name) % 1000, "age": 2.0, **changes}
    desk.handle(Received(name.encode(), makers.hello(rank, world_size, **told)))
    return name.encode()


def ranks_of(desk: Desk) -> list[set[str]]:
    """Of each run, the processes that are its ranks, without those that it waits for no more."""
    runs = desk.ledger.runs.values()
    return [{row.hello.incarnation for row in run.ranks.values() if row.state is not RankState.ENDED} for run in runs]


@pytest.mark.parametrize("first", ["rank 0", "rank 1"])
@pytest.mark.parametrize("counts", [(0, 0), (0, 1), (2, 1)])
def test_a_rank_that_died_before_it_asked_is_in_one_run_with_the_others_at_the_next_launch(
    first: str, counts: tuple[int, int]
) -> None:
    """It finds the id of the launch before with its place free; the other one finds its own place held by a dead process."""
    desk = Desk()
    desk.handle(Disconnected(asks(desk, 0, "dead", "a")))
    desk.wait(2.5)
    new = [(0, "new 0", "b", "a"), (1, "new 1", "a", "")]
    in_order = new if first == "rank 0" else new[::-1]
    peers = [asks(desk, rank, name, start, earlier, restart=counts[rank]) for rank, name, start, earlier in in_order]
    assert ranks_of(desk) == [{"dead"}, {"new 0", "new 1"}]
    desk.handle(Received(b"new 1", messages.Tripped(1, makers.trip())))
    beat(desk, peers, 4)
    assert aborted(desk) == set(peers)


def test_ranks_that_knew_of_no_later_launch_move_to_it_before_their_first_batch() -> None:
    """As where a node lost its power: its connections live on, and its ranks are not known to be dead."""
    desk = Desk()
    asks(desk, 0, "dead", "a", world_size=3)
    new = [asks(desk, 1, "new 1", "a", world_size=3), asks(desk, 2, "new 2", "a", world_size=3)]
    assert ranks_of(desk) == [{"dead", "new 1", "new 2"}]
    desk.receive(2, messages.Batch(1, makers.summary(0)))
    desk.handle(Received(b"new 2", messages.Table(makers.table())))
    desk.handle(Received(b"new 2", messages.Batch(1, makers.summary(0))))
    new.append(asks(desk, 0, "new 0", "b", "a", world_size=3))
    desk.take()
    for who in new:
        desk.handle(Received(who, makers.beat(0, 0, 0)))
    told = [
        (effect.peer, effect.message.remedy) for effect in desk.asked(Send) if isinstance(effect.message, messages.Error)
    ]
    assert told == [(b"new 1", "hello")]
    asks(desk, 1, "new 1", "a", world_size=3)
    assert ranks_of(desk) == [{"dead", "new 2"}, {"new 0", "new 1"}]
    desk.handle(Received(b"new 1", makers.beat(0, 0, 0)))
    asks(desk, 1, "new 1", "a", world_size=3)  # it reconnects
    assert ranks_of(desk) == [{"dead", "new 2"}, {"new 0", "new 1"}]


def test_a_rank_that_was_only_cut_off_and_its_launch_are_one_run_again() -> None:
    desk = Desk()
    cut = asks(desk, 0, "cut", "a")
    desk.handle(Disconnected(cut))
    desk.wait(2.5)
    late = asks(desk, 1, "late", "a")
    assert ranks_of(desk) == [{"cut"}, {"late"}]
    asks(desk, 0, "cut", "a", age=5.0)
    assert ranks_of(desk) == [set(), {"cut", "late"}]
    beat(desk, [cut, late], 5)
    assert aborted(desk) == set()


def test_one_id_given_by_hand_for_all_launches_does_not_join_them() -> None:
    desk = Desk()
    old = [asks(desk, rank, f"old {rank}", "42") for rank in (0, 1)]
    desk.handle(Disconnected(old[1]))
    desk.wait(3.5)
    asks(desk, 1, "new 1", "42", restart=1)
    assert ranks_of(desk) == [{"old 0", "old 1"}, {"new 1"}]
    desk.handle(Disconnected(old[0]))
    desk.wait(3.5)
    asks(desk, 0, "new 0", "42")
    assert ranks_of(desk)[1] == {"new 0", "new 1"}


def test_a_node_that_is_replaced_during_an_election_is_not_stopped_by_its_verdict() -> None:
    desk = Desk(Options(decision_window=20.0))
    old = [asks(desk, rank, f"old {rank}", "a", world_size=3) for rank in (1, 2)]  # rank 0 died before it asked
    desk.handle(Received(old[0], messages.Tripped(1, makers.trip(at=(3, 0, 7)))))
    for who in old:
        desk.handle(Disconnected(who))
    desk.wait(2.5)
    new = asks(desk, 0, "new 0", "a", world_size=3)
    desk.wait(25.0)
    assert aborted(desk) & {new} == set()
    assert ranks_of(desk)[1] == {"new 0"}


@pytest.mark.parametrize(("age", "runs"), [(1.0, 2), (4.0, 1), (0.0, 1)])
def test_a_process_that_is_younger_than_the_end_of_a_rank_is_of_another_launch(age: float, runs: int) -> None:
    """One that is older was slow to ask; of one whose age is unknown, nothing can be said."""
    desk = Desk()
    desk.handle(Disconnected(asks(desk, 0, "dead", "a")))
    desk.wait(2.0)
    asks(desk, 1, "other", "a", age=age)
    assert len(ranks_of(desk)) == runs


@pytest.mark.parametrize(("age", "runs"), [(1.0, 2), (4.0, 1)])
def test_a_process_that_is_younger_than_the_end_of_a_run_is_of_another_launch(age: float, runs: int) -> None:
    """Although all its ranks are still connected."""
    desk = Desk()
    desk.handle(Received(asks(desk, 0, "failed", "a"), messages.Bye(1, "failed", "KeyError")))
    desk.wait(2.0)
    asks(desk, 1, "other", "a", age=age)
    assert len(ranks_of(desk)) == runs


def test_a_rank_that_has_finished_does_not_keep_a_slow_one_from_its_run() -> None:
    desk = Desk()
    quick = asks(desk, 0, "quick", "a")
    desk.handle(Received(quick, messages.Bye(1, "finished", "")))
    desk.handle(Disconnected(quick))
    desk.wait(2.5)
    asks(desk, 1, "slow", "a")
    assert len(ranks_of(desk)) == 1


def told_to_move(desk: Desk, who: bytes) -> bool:
    effects = desk.handle(Received(who, makers.beat(0, 0, 0)))
    return any(isinstance(effect, Send) and isinstance(effect.message, messages.Error) for effect in effects)


def test_a_rank_moves_to_a_place_that_is_free_in_a_run_that_is_under_way() -> None:
    desk = Desk()
    old = [asks(desk, rank, f"old {rank}", "a", world_size=3) for rank in range(3)]
    asks(desk, 0, "new 0", "b", "a", world_size=3)
    asks(desk, 1, "new 1", "b", "a", world_size=3)
    assert [told_to_move(desk, who) for who in old] == [False, False, True]
    for rank in (0, 1):
        desk.handle(Received(b"new %d" % rank, messages.Bye(1, "finished", "")))
    beat(desk, old, 5)
    assert desk.ledger.runs["train-0.2"].over
    assert not told_to_move(desk, old[2])


def test_a_rank_that_is_being_stopped_does_not_move() -> None:
    desk = Desk()
    old = [asks(desk, rank, f"old {rank}", "a", world_size=3) for rank in (0, 1)]
    desk.handle(Received(old[0], messages.Bye(1, "failed", "KeyError")))
    asks(desk, 0, "new 0", "b", "a", world_size=3)
    assert not told_to_move(desk, old[1])


@pytest.mark.parametrize(("silence", "runs"), [(2.5, 1), (6.0, 2)])
def test_a_process_does_not_join_ranks_that_were_silent_before_it_began(silence: float, runs: int) -> None:
    """As where a node lost its power: nothing ends its connections for a while."""
    desk = Desk()
    asks(desk, 0, "silent", "a")
    desk.wait(silence)
    asks(desk, 1, "other", "a")
    assert len(ranks_of(desk)) == runs


def test_a_process_joins_ranks_that_have_yet_to_find_a_restarted_collector() -> None:
    first = Desk()
    asks(first, 0, "old", "a")
    first.wait(1.0)
    desk = Desk(first.options, now=first.now, records={name: list(entries) for name, entries in first.records.items()})
    desk.ledger.restore("train-0", first.records["train-0"], [], desk.now)
    desk.wait(2.5)
    asks(desk, 1, "slow", "a")
    assert list(desk.ledger.runs) == ["train-0"]
