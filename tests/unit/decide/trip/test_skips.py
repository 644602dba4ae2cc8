"""Steps that ranks left out, over a fake clock: each is told once, with the first culprit, and the run goes on."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import makers
from desk import Desk, connected
from left_out import FRAMES, REFUSED, guilty, innocent, passes
from rankwatch.shared.types import messages
from rankwatch.shared.types.closeup import CloseUp
from rankwatch.shared.types.frame import FrameTable, Moment
from rankwatch.shared.types.gpu import Gpu
from rankwatch.shared.types.trip import Cause, LeftOut
from rankwatch_monitor.decide.core.effects import Alert, Note, Trouble
from rankwatch_monitor.decide.core.ledger import Ledger
from rankwatch_monitor.decide.core.options import Options
from rankwatch_monitor.decide.core.rank import CLOSEUP_MARGIN
from rankwatch_monitor.decide.core.report import Outcome
from rankwatch_monitor.decide.trip.skipped import MOST_KEPT, SkippedStep
from rankwatch_monitor.decide.trip.verdict import Certainty


def skipped_in(desk: Desk) -> list[SkippedStep]:
    return list(desk.run.report().skipped)


def steps_of(desk: Desk) -> list[int]:
    return [one.step for one in skipped_in(desk)]


def warnings_of(desk: Desk) -> list[str]:
    return [note.text for note in desk.asked(Note) if note.level == logging.WARNING]


# --- one step -------------------------------------------------------------------------------------------------------------


def test_a_step_that_all_left_out_is_told_and_the_run_goes_on() -> None:
    desk = connected(2)
    desk.receive(1, messages.Tripped(1, guilty(4)))
    desk.receive(0, messages.Tripped(1, innocent(4)))
    (one,) = skipped_in(desk)
    assert (one.step, one.batch, one.verdict.rank, one.verdict.certainty) == (4, 4, 1, Certainty.COMPLETE)
    assert (one.restored, one.budget_left, one.most, one.of) == (("bn.running_mean",), 2, 3, 128)
    assert not desk.sent(0, messages.Abort)
    assert desk.verdict is None
    (alert,) = desk.asked(Alert)
    assert (alert.trouble, alert.report.skipped) == (Trouble.SKIP, (one,))
    assert warnings_of(desk) == [f"run train-0: {alert.text}"]
    assert alert.text.startswith(
        "optimizer step 4 was left out: rank 1 of 2 (node0, local rank 1), batch 4: layer (Linear), output: "
    )
    assert alert.text.endswith("; put back: bn.running_mean; 2 more of 3 in 128 steps may be left out")
    desk.receive((0, 1), passes(4))
    desk.receive((0, 1), messages.Bye(9, "finished", ""))
    (report,) = desk.reports
    assert (report.outcome, report.reason) == (
        Outcome.FINISHED,
        f"1 step was left out: batch 4 (rank 1, layer: {one.verdict.cause.value})",
    )
    desk.check_records()


def test_a_rank_that_says_nothing_of_it_is_waited_for_until_it_is_in_the_next_step() -> None:
    desk = connected(2)
    desk.receive(1, messages.Tripped(1, guilty(4)))
    desk.receive(0, messages.Beat(Moment(4, 4, 0, FRAMES), "backward", 0, 0, 1000.0))  # past the frame, and not yet looked
    assert steps_of(desk) == []
    desk.receive(0, passes(4))
    (one,) = skipped_in(desk)
    assert (one.verdict.rank, one.verdict.certainty) == (1, Certainty.COMPLETE)
    desk.check_records()


def test_the_next_batch_is_an_answer_too() -> None:
    desk = connected(2)
    desk.receive(1, messages.Tripped(1, guilty(4)))
    desk.receive(0, messages.Table(makers.table()), messages.Batch(1, makers.summary(5)))
    assert steps_of(desk) == [4]


def test_a_rank_that_never_answers_is_named_after_the_decision_window() -> None:
    desk = connected(2)
    desk.receive(1, messages.Tripped(1, guilty(4)))
    desk.wait(Options().decision_window + 0.1)
    (one,) = skipped_in(desk)
    assert (one.verdict.certainty, one.verdict.missing) == (Certainty.PARTIAL, (0,))
    assert desk.verdict is None
    desk.check_records()


def test_the_guilty_rank_is_named_whose_trip_comes_last() -> None:
    desk = connected(3)
    desk.receive(0, messages.Tripped(1, innocent(4)))
    desk.receive(2, messages.Tripped(1, guilty(4, frame=2)))
    assert steps_of(desk) == []
    desk.receive(1, messages.Tripped(1, guilty(4, frame=1)))
    assert [one.verdict.tripped for one in skipped_in(desk)] == [1]


def test_people_are_told_once_its_closeup_is_here() -> None:
    desk = connected(2)
    desk.receive(1, messages.Tripped(1, guilty(4, within=5.0)))
    desk.receive(0, messages.Tripped(1, innocent(4)), passes(4))
    assert (steps_of(desk), warnings_of(desk)) == ([], [])
    found = makers.closeup()
    desk.receive(1, messages.LookedCloser(2, found), passes(4))
    assert [one.closeup for one in skipped_in(desk)] == [found]
    assert len(warnings_of(desk)) == 1
    assert desk.run.ranks[1].closeup is None
    desk.check_records()


def test_or_once_its_time_is_over_and_it_is_told_with_its_step_all_the_same() -> None:
    desk = connected(2)
    desk.receive(1, messages.Tripped(1, guilty(4, within=1.0)))
    desk.receive(0, messages.Tripped(1, innocent(4)))
    desk.wait(1.0 + CLOSEUP_MARGIN + 0.1)
    assert [one.closeup for one in skipped_in(desk)] == [None]
    desk.receive(1, messages.LookedCloser(2, makers.closeup()))
    assert [one.closeup for one in skipped_in(desk)] == [makers.closeup()]
    assert len(warnings_of(desk)) == 1
    desk.check_records()


def test_a_late_trip_changes_nothing() -> None:
    desk = connected(3)
    desk.receive(1, messages.Tripped(1, guilty(4, frame=2)))
    desk.receive((0, 2), passes(4))
    (one,) = skipped_in(desk)
    desk.receive(0, messages.Tripped(1, guilty(4, frame=1)))
    assert skipped_in(desk) == [one]
    assert desk.notes[-1].endswith("its step was left out")
    desk.check_records()


# --- several steps --------------------------------------------------------------------------------------------------------


def test_two_steps_whose_closeups_come_late_are_two() -> None:
    desk = connected(2)
    desk.receive(1, messages.Tripped(1, guilty(4, within=5.0)))
    desk.receive(0, messages.Tripped(1, innocent(4)), messages.Tripped(2, guilty(5, line=7, within=5.0)))
    desk.receive(1, messages.LookedCloser(2, makers.closeup(recurred=1)), messages.Tripped(3, innocent(5)))
    desk.receive(0, messages.LookedCloser(3, makers.closeup(recurred=2)))
    told = [(one.step, one.verdict.tripped, one.closeup.recurred) for one in skipped_in(desk) if one.closeup is not None]
    assert told == [(4, 1, 1), (5, 0, 2)]
    assert desk.run.report().reason == ""
    desk.check_records()


def test_a_step_whose_trip_comes_after_that_of_a_later_step_is_told() -> None:
    desk = connected(2)
    desk.receive(0, messages.Tripped(1, guilty(5)))
    desk.receive(1, messages.Tripped(1, guilty(4)), passes(5))
    assert steps_of(desk) == [5]
    desk.receive(0, passes(5))
    assert sorted(steps_of(desk)) == [4, 5]


def test_steps_that_a_loss_scaler_leaves_out_have_one_number() -> None:
    desk = connected(2)
    again = replace(guilty(4, line=7), position=makers.trip(at=(5, 0, 1)).position, frames=makers.trip(at=(5, 0, 1)).frames)
    desk.receive(0, messages.Tripped(1, guilty(4)), messages.Tripped(2, again))
    desk.receive(1, messages.Tripped(1, innocent(4)), messages.Tripped(2, innocent(4)))
    assert [(one.step, one.batch) for one in skipped_in(desk)] == [(4, 4), (4, 5)]
    desk.check_records()


def test_the_losses_of_steps_that_were_left_out_are_no_divergence() -> None:
    """Three bad batches on end, on both ranks: the weights are as before, so each is bad by itself."""
    desk = connected(2)
    desk.receive((0, 1), messages.Table(FrameTable((makers.ROOT_LOSS,))))
    for step in range(20):
        for rank in (0, 1):
            loss = 20.0 ** (step - 14) if 16 <= step < 19 else 1.0
            desk.receive(rank, replace(makers.loss_batch(step, loss), seq=3 * step + 1))
            if 16 <= step < 19:
                desk.receive(rank, messages.Tripped(3 * step + 2, guilty(step, line=step)))
    assert [(one.step, one.verdict.cause) for one in skipped_in(desk)] == [(step, Cause.INVALID) for step in (16, 17, 18)]


def test_only_the_last_ones_are_kept_and_all_are_counted() -> None:
    desk = connected(1)
    steps = range(MOST_KEPT + 2)
    for step in steps:
        desk.receive(0, messages.Tripped(step + 1, guilty(step, line=step)))
    report = desk.run.report()
    assert ([one.step for one in report.skipped], report.skipped_unkept) == (list(steps[2:]), 2)
    desk.receive(0, messages.Tripped(MOST_KEPT + 3, guilty(1, line=9999)))
    assert desk.run.report() == report


# --- when it does not help ------------------------------------------------------------------------------------------------


def stopped(desk: Desk) -> str:
    assert all(desk.sent(rank, messages.Abort) for rank in desk.run.ranks)
    report = desk.run.report()
    assert report.outcome is Outcome.ABORTED
    assert report.stops_ranks
    assert report.verdict is not None
    desk.check_records()
    return report.reason


def leave_out(desk: Desk, step: int, seq: int, line: int = 41, closeup: CloseUp | None = None) -> None:
    within = 5.0 if closeup is not None else 0.0
    desk.receive(1, messages.Tripped(seq, guilty(step, line=line, within=within)))
    desk.receive(0, messages.Tripped(seq, innocent(step)))
    if closeup is not None:
        desk.receive(1, messages.LookedCloser(seq + 1, closeup))
    desk.receive((0, 1), passes(step))


def test_one_operator_of_one_line_ends_the_run_at_the_third_time() -> None:
    desk = connected(2)
    for seq, (step, line) in enumerate([(4, 41), (6, 42), (9, 41), (12, 41)], 1):
        assert not desk.sent(0, messages.Abort)
        leave_out(desk, step, seq, line)
    assert stopped(desk).endswith("aten.div at train.py:41 for the third time: steps 4, 9 and 12 were left out")
    assert steps_of(desk) == [4, 6, 9, 12]
    assert desk.run.report().verdict == skipped_in(desk)[-1].verdict


def test_two_faults_of_one_machine_that_did_not_recur_end_it() -> None:
    desk = connected(2)
    once = CloseUp(of=3, machine="node0, NVIDIA H100, GPU-5f3a")
    leave_out(desk, 4, 1, 41, once)
    leave_out(desk, 9, 3, 42, replace(once, recurred=3))
    assert not desk.sent(0, messages.Abort)
    leave_out(desk, 12, 5, 43, once)
    assert "did not recur, for the second time on node0, NVIDIA H100, GPU-5f3a: steps 4 and 12 were left out" in stopped(
        desk
    )


def test_faults_of_two_machines_do_not() -> None:
    desk = Desk()
    for rank in (0, 1):
        desk.receive(rank, makers.hello(rank, 2, gpu=Gpu("NVIDIA H100", f"GPU-{rank}", "", "")))
    for step, rank in ((4, 0), (9, 1)):
        desk.receive(rank, messages.Tripped(step, guilty(step, line=step, within=5.0)))
        desk.receive(1 - rank, messages.Tripped(step, innocent(step)))
        desk.receive(rank, messages.LookedCloser(step + 1, CloseUp(of=3)))
    assert steps_of(desk) == [4, 9]
    assert not desk.sent(0, messages.Abort)


def test_replicas_that_differ_end_it() -> None:
    desk = connected(2)
    table = makers.fingerprint_table()
    for rank in (0, 1):
        desk.receive(rank, messages.Fingerprints(table))
        for step in (1, 2):
            values = (step, step + rank * (step == 2))
            said = makers.fingerprint(table, step, values)
            desk.receive(rank, messages.Fingerprinted(step, said))
    desk.wait(60.0)
    assert any(one.is_split for one in desk.run.report().desync)
    leave_out(desk, 4, 9)
    assert "replicas differ since step 2, and leaving out a step does not mend that" in stopped(desk)


@pytest.mark.parametrize("left_out", [REFUSED, None])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_trip_whose_step_was_not_left_out_ends_the_run(left_out: LeftOut | None, is_first: bool) -> None:
    desk = connected(2)
    leave_out(desk, 4, 1)
    trips = {0: messages.Tripped(2, innocent(6, left_out)), 1: messages.Tripped(2, guilty(6, within=5.0))}
    for rank in (0, 1) if is_first else (1, 0):
        desk.receive(rank, trips[rank])
    assert desk.decided.tripped == 1
    reason = stopped(desk)
    assert ("the step could not be left out: 3 of the last 128 steps were left out" in reason) == (left_out is REFUSED)
    assert reason.endswith("; 1 step was left out before")
    assert steps_of(desk) == [4]
    desk.receive((0, 1), messages.Ack(0, abort=True))
    assert desk.reports == []
    desk.receive(1, messages.LookedCloser(3, makers.closeup()))
    assert [report.closeup for report in desk.reports] == [makers.closeup()]
    desk.check_records()


def test_a_trip_that_ends_the_run_does_not_wait_for_the_closeup_of_a_step_before() -> None:
    desk = connected(2)
    desk.receive(1, messages.Tripped(1, guilty(4, within=5.0)))
    desk.receive(0, messages.Tripped(1, innocent(4)), messages.Tripped(2, innocent(5, REFUSED)))
    desk.receive(1, messages.Tripped(2, guilty(5, left_out=REFUSED)))
    assert desk.decided.trip.optimizer_step == 5
    assert stopped(desk).endswith("; 1 step was left out before")
    desk.receive((0, 1), messages.Ack(0, abort=True))
    assert [[one.step for one in report.skipped] for report in desk.reports] == [[4]]
    assert desk.asked(Alert) == []
    desk.check_records()


def test_a_trip_that_went_ahead_leaves_those_before_it_in_their_order() -> None:
    desk = connected(1)
    fatal = guilty(6, left_out=REFUSED)
    desk.receive(0, messages.Tripped(messages.AHEAD, guilty(4)))  # comes again in its turn
    assert steps_of(desk) == []
    desk.receive(0, messages.Tripped(messages.AHEAD, fatal))
    assert stopped(desk)
    desk.receive(0, messages.Tripped(1, guilty(4, within=5.0)), messages.LookedCloser(2, makers.closeup()))
    desk.receive(0, messages.Tripped(3, fatal), messages.LookedCloser(4, makers.closeup(recurred=0)))
    assert [(one.step, one.closeup) for one in skipped_in(desk)] == [(4, makers.closeup())]
    report = desk.run.report()
    assert report.closeup == makers.closeup(recurred=0)
    desk.check_records()


# --- any order ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Training:
    """``guilty`` has, for each step that is left out, the ranks that made it bad, with the frame. ``silent``: ranks that send no
    trip though theirs was bad."""

    ranks: int
    guilty: dict[int, dict[int, int]]
    silent: dict[int, frozenset[int]]

    def culprit(self, step: int) -> int:
        return min(self.guilty[step], key=lambda rank: (self.guilty[step][rank], rank))


STEPS = 9


@st.composite
def trainings(draw: st.DrawFn) -> Training:
    ranks = draw(st.integers(2, 4))
    one = st.integers(0, ranks - 1)
    bad = draw(st.sets(st.integers(0, STEPS - 1), min_size=1, max_size=4))
    made = {step: draw(st.dictionaries(one, st.integers(0, FRAMES - 2), min_size=1, max_size=2)) for step in bad}
    silent = {step: draw(st.frozensets(one)) - made[step].keys() for step in bad}
    return Training(ranks, made, silent)


def told_by(training: Training, rank: int) -> list[messages.Message]:
    said: list[messages.Message] = [makers.hello(rank, training.ranks)]
    seq = 1
    for step in range(STEPS):
        frames = training.guilty.get(step)
        if frames is not None and rank not in training.silent[step]:
            own = guilty(step, frames[rank], within=5.0, line=step) if rank in frames else innocent(step)
            said.append(messages.Tripped(seq, own))
            if own.has_closeup:
                said.append(messages.LookedCloser(seq + 1, makers.closeup(recurred=step, operator=own.operator)))
            seq += 2
        said.append(passes(step))
    return [*said, messages.Bye(seq, "finished", "")]


@settings(max_examples=150, derandomize=True, deadline=None)
@given(training=trainings(), data=st.data())
def test_each_step_is_told_once_with_its_first_culprit(training: Training, data: st.DataObject) -> None:
    desk = Desk(Options(heartbeat=100, decision_window=100.0, abort_on_lost=False))
    desk.receive_mixed({rank: told_by(training, rank) for rank in range(training.ranks)}, data)
    found = {one.step: (one.verdict.tripped, one.closeup.recurred if one.closeup else None) for one in skipped_in(desk)}
    assert len(skipped_in(desk)) == len(training.guilty)
    assert found == {step: (training.culprit(step), step) for step in training.guilty}
    assert desk.run.report().outcome is Outcome.FINISHED
    assert not any(desk.sent(rank, messages.Abort) for rank in range(training.ranks))
    assert len(warnings_of(desk)) == len(training.guilty)
    desk.check_records()


@settings(max_examples=100, derandomize=True, deadline=None)
@given(training=trainings(), data=st.data())
def test_a_collector_that_takes_over_in_the_middle_tells_the_same(training: Training, data: st.DataObject) -> None:
    """Each rank sends again what the record does not have, and goes on."""
    options = Options(heartbeat=100, decision_window=100.0, abort_on_lost=False)
    desk = Desk(options)
    queues = {rank: told_by(training, rank) for rank in range(training.ranks)}
    first = {rank: queue[: data.draw(st.integers(1, len(queue)))] for rank, queue in queues.items()}
    rest = {rank: [queue[0], *queue[len(first[rank]) :]] for rank, queue in queues.items()}
    desk.receive_mixed(first, data)
    (name,) = desk.ledger.runs
    again = Desk(options, now=desk.now)
    again.records[name] = list(desk.records[name])
    again.ledger.restore(name, desk.records[name], [], desk.now)
    again.receive_mixed({rank: queue for rank, queue in rest.items() if len(queue) > 1}, data)
    if desk.run.over:
        again = desk
    found = {one.step: one.verdict.tripped for one in skipped_in(again)}
    assert found == {step: training.culprit(step) for step in training.guilty}
    assert len(skipped_in(again)) == len(training.guilty)
    assert again.run.report().outcome is Outcome.FINISHED
    again.check_records()


@settings(max_examples=100, derandomize=True, deadline=None)
@given(training=trainings(), data=st.data())
def test_an_abort_ends_the_last_step_and_none_before_it(training: Training, data: st.DataObject) -> None:
    """The last bad step is refused, by some ranks or by all. No rank goes on after it."""
    last = max(training.guilty)
    refusing = data.draw(st.sets(st.integers(0, training.ranks - 1), min_size=1))
    queues: dict[int, list[messages.Message]] = {}
    for rank in range(training.ranks):
        said = told_by(replace(training, silent={**training.silent, last: frozenset()}), rank)
        mine = next(
            at for at, one in enumerate(said) if isinstance(one, messages.Tripped) and one.trip.optimizer_step == last
        )
        trip = said[mine]
        assert isinstance(trip, messages.Tripped)
        refused = replace(trip, trip=replace(trip.trip, left_out=REFUSED)) if rank in refusing else trip
        queues[rank] = [*said[:mine], refused]
    desk = Desk(Options(heartbeat=100, decision_window=100.0, abort_on_lost=False))
    desk.receive_mixed(queues, data)
    assert (desk.decided.tripped, desk.decided.trip.optimizer_step) == (training.culprit(last), last)
    before = len(training.guilty) - 1
    assert stopped(desk).endswith("; the step could not be left out: 3 of the last 128 steps were left out" + BEFORE[before])
    desk.wait(20.0)
    assert {one.step: one.verdict.tripped for one in skipped_in(desk)} == {
        step: training.culprit(step) for step in training.guilty if step != last
    }
    desk.check_records()


BEFORE = ["", "; 1 step was left out before", "; 2 steps were left out before", "; 3 steps were left out before"]


def test_a_record_has_the_same_list() -> None:
    desk = connected(2)
    leave_out(desk, 4, 1)
    leave_out(desk, 6, 2, 42)
    again = Ledger(desk.options).restore("train-0", desk.records["train-0"], [], desk.now)
    assert again.report().skipped == desk.run.report().skipped
