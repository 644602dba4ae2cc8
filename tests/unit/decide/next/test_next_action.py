"""What a program does after a run: for each cause of a trip, each pattern of replicas and each end, whatever is known of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

import makers
from makers import INF, NAN, reading, trip
from outcomes import judged, report, row
from rankwatch.shared.types.action import Action
from rankwatch.shared.types.closeup import CloseUp
from rankwatch.shared.types.frame import Kind
from rankwatch.shared.types.trip import BadWeight, Cause, Change, Trip, UpdateFact
from rankwatch.shared.words.cause import ADVICE, action_of, classify
from rankwatch_monitor.decide.core.report import End, Outcome, RankState, Report, Stall
from rankwatch_monitor.decide.ending.exit_text import describe_exit
from rankwatch_monitor.decide.next.next_action import ENDS, Advice, next_action, remedy, variables
from rankwatch_monitor.decide.replicas.desync import Desync, DesyncPattern
from rankwatch_monitor.decide.trip.began import Began, TripOrigin

Told: TypeAlias = tuple[str, tuple[str, ...]]

ABORTED, ENDED, FAILED, LOST, MISSING = (
    RankState.ABORTED,
    RankState.ENDED,
    RankState.FAILED,
    RankState.LOST,
    RankState.MISSING,
)
HERE = ("node0",)
ONE = Desync(120, "layers.3.weight", (1,), 4, DesyncPattern.ONE_RANK, "node0", equal_at=104, source="DDP")
RECURRED, FINITE = CloseUp(recurred=3, of=3), CloseUp(recurred=0, of=3)
CLOSED = "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:544] Connection closed by peer [127.0.0.1]:1"


def told(of: Report) -> Told | None:
    advice = next_action(of)
    return None if advice is None else (advice.action.value, advice.hosts)


def weighed(*finite_in: int, batch: int = 0, step: int = 0, change: Change = Change.UNKNOWN, kind: Kind = Kind.PARAMETER,
            fact: str = "") -> Trip:  # fmt: skip
    facts = (UpdateFact("class", "AdamW"), UpdateFact(fact, "exp_avg", "nan")) if fact else ()
    bad = [BadWeight("layer", "Linear", reading("weight", NAN, kind=kind), last, True, change, facts) for last in finite_in]
    own = reading("weight", NAN, kind=kind)
    return replace(trip(own, reading("output", NAN), at=(batch, 0, 0), step=step), weights=tuple(bad))


FED = replace(trip(reading("input[0]", NAN), reading("output", NAN)), root_inputs=(reading("input[0]", NAN),))
EMPTY = trip(reading("weight", 1.18e32, kind=Kind.PARAMETER), reading("input[0]"), reading("output", INF))


@pytest.mark.parametrize(
    ("of", "cause", "action"),
    [
        (trip(reading("input[0]", 1e30), reading("output", INF)), Cause.OVERFLOW, "fix-code"),
        (trip(reading("input[0]", 1.0, low=0.0), reading("output", INF)), Cause.SINGULAR, "fix-code"),
        (trip(reading("input[0]"), reading("output", NAN)), Cause.INVALID, "fix-code"),
        (trip(reading("input[0]", NAN), reading("output", NAN)), Cause.UPSTREAM, "fix-code"),
        (trip(reading("weight.grad (reduced)", INF, kind=Kind.GRADIENT)), Cause.REDUCTION, "fix-code"),
        (replace(makers.trip(), unfound="gone"), Cause.GRADIENT, "fix-code"),
        (replace(trip(reading("input[0]"), reading("output", INF)), recurs=False), Cause.UNEXPLAINED, "restart-elsewhere"),
        # Bad from the first batch on is what the pipeline makes; after good batches, it is this one.
        (FED, Cause.DATA, "look-at-data"),
        (replace(FED, frames=(replace(FED.frame, position=FED.position._replace(batch=9)),), position=FED.position._replace(
            batch=9)), Cause.DATA, "skip-batch"),
        # A weight that was loaded, one that was trained until it was bad, and one that code or a setting made bad.
        (weighed(-1), Cause.WEIGHT, "restore-checkpoint"),
        (weighed(-1, batch=3, step=3), Cause.WEIGHT, "restore-checkpoint"),
        (weighed(5, batch=6, step=6), Cause.WEIGHT, "restore-checkpoint"),
        (weighed(5, batch=6, step=6, change=Change.OPTIMIZER, fact="state"), Cause.WEIGHT, "restore-checkpoint"),
        (weighed(5, batch=6, step=6, change=Change.OPTIMIZER, fact="number"), Cause.WEIGHT, "fix-code"),
        (weighed(5, batch=6, step=6, change=Change.OPTIMIZER), Cause.WEIGHT, "fix-code"),
        (weighed(5, batch=6, step=6, change=Change.OTHER), Cause.WEIGHT, "fix-code"),
        (weighed(0, batch=1, step=1), Cause.WEIGHT, "fix-code"),
        (weighed(6, batch=6, step=6), Cause.WEIGHT, "fix-code"),
        (weighed(5, batch=6, step=6, kind=Kind.BUFFER), Cause.WEIGHT, "fix-code"),
        (EMPTY, Cause.WEIGHT, "fix-code"),
    ],
)  # fmt: skip
def test_bad_numbers(of: Trip, cause: Cause, action: str) -> None:
    assert classify(of)[0] is cause
    assert action_of(cause, of).value == action


def test_each_cause_has_its_row() -> None:
    assert set(ADVICE) == set(Cause)
    assert action_of(Cause.DIVERGENCE, makers.trip()) is Action.FIX_CODE


JUMPED = TripOrigin(Began(1, 0, "", "Net", "input[0]", 950.0, True), 8, 4)


@pytest.mark.parametrize(
    ("rank", "alone", "says"),
    [(1, True, "look at what made the loss in batch 80 of rank 1: it is x950"), (1, False, "lower"), (None, True, "lower")],
)
def test_a_divergence_that_began_on_one_rank_alone_is_that_ranks(rank: int | None, alone: bool, says: str) -> None:
    of = judged(Cause.DIVERGENCE)
    assert of.verdict is not None
    began = Began(rank, 80, "", "Net", "loss", 950.0, alone)
    assert remedy(replace(of, origin=TripOrigin(began, 64, 4)), of.verdict).startswith(says)


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        (judged(Cause.OVERFLOW, RECURRED), ("fix-code", ())),
        (judged(Cause.OVERFLOW), ("fix-code", ())),  # it was not run again
        (judged(Cause.OVERFLOW, FINITE), ("restart-elsewhere", HERE)),
        (judged(Cause.OVERFLOW, replace(FINITE, is_eager=True)), ("fix-code", ())),  # the compiled graph may be at fault
        (judged(Cause.OVERFLOW, FINITE, alike=(0, 1)), ("fix-code", ())),  # no machine is
        (judged(Cause.UNEXPLAINED, recurs=False), ("restart-elsewhere", HERE)),
        (judged(Cause.UNEXPLAINED), ("restart-elsewhere", HERE)),
        (replace(judged(Cause.OVERFLOW, RECURRED), origin=JUMPED), ("look-at-data", ())),
        # What a rank's memory did to its weights comes before the numbers that followed.
        (replace(judged(Cause.OVERFLOW, RECURRED), desync=(ONE,)), ("restart-elsewhere", HERE)),
        # A verdict says more than how the run ended.
        (replace(judged(Cause.OVERFLOW), end=End.LOST), ("fix-code", ())),
    ],
)
def test_a_verdict(of: Report, expected: Told) -> None:
    assert told(of) == expected


def differs(*found: Desync, **changes: Any) -> Report:
    return report(Outcome.ABORTED, desync=found, end=End.DESYNC, **changes)


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        (differs(ONE, replace(ONE, parameter="layers.4.weight")), ("restart-elsewhere", HERE)),
        (report(desync=(ONE,)), ("restart-elsewhere", HERE)),  # it was told, and trained on to its end
        (report(desync=(replace(ONE, is_declared=False),)), None),
        (differs(replace(ONE, ranks=(0, 2), replicas=2)), ("restart-elsewhere", ("node0", "node1"))),  # of two, one is right
        (differs(ONE, replace(ONE, ranks=(2,), parameter="layers.4.weight")), ("fix-code", ())),
        (differs(replace(ONE, pattern=DesyncPattern.GATHER)), ("restart-elsewhere", HERE)),
        (differs(replace(ONE, pattern=DesyncPattern.INITIALISATION)), ("fix-code", ())),
        (differs(replace(ONE, pattern=DesyncPattern.UNSYNCHRONISED)), ("fix-code", ())),
        (differs(replace(ONE, pattern=DesyncPattern.SUBSET)), ("fix-code", ())),
        (differs(replace(ONE, pattern=DesyncPattern.LOAD)), ("restore-checkpoint", ())),
        (differs(replace(ONE, pattern=DesyncPattern.UNKNOWN)), ("stop", ())),
        (report(desync=(replace(ONE, pattern=DesyncPattern.SAME_INPUT),)), None),
    ],
)
def test_replicas_that_differ(of: Report, expected: Told | None) -> None:
    assert told(of) == expected


def failed(farewell: str, *others: RankState, **changes: Any) -> Report:
    rows = [row(0, FAILED, farewell=farewell, left=1), *(row(rank, state) for rank, state in enumerate(others, 1))]
    return replace(report(Outcome.FAILED, end=End.FAILED), ranks=[*rows, *(row(n, ABORTED) for n in range(len(rows), 4))])


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        (failed("KeyError: 'x'"), ("stop", ())),
        (failed("torch.OutOfMemoryError: CUDA out of memory"), ("stop", ())),
        (failed("RuntimeError: CUDA error: device-side assert triggered"), ("stop", ())),
        (failed("RuntimeError: CUDA error: uncorrectable ECC error encountered"), ("restart-elsewhere", HERE)),
        (failed(CLOSED), ("restart", ())),
        (failed("ConnectionResetError: [Errno 104] Connection reset by peer"), ("restart", ())),
        (failed("requests.exceptions.ReadTimeout: Read timed out."), ("restart", ())),
        (failed(CLOSED, MISSING), ("restart", ())),
        (failed(CLOSED, ENDED), ("stop", ())),  # it had trained fewer batches than the others
        (failed("RuntimeError: NCCL error: invalid usage"), ("stop", ())),
    ],
)
def test_a_rank_that_failed(of: Report, expected: Told) -> None:
    assert told(of) == expected


def lost(*states: RankState, death: str = "") -> Report:
    rows = [row(n, one, farewell=death if one is LOST else "", left=n + 1) for n, one in enumerate(states)]
    return replace(report(Outcome.LOST, end=End.LOST), ranks=rows)


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        (lost(ABORTED, LOST, ABORTED, ABORTED, death=describe_exit(-9)), ("restart", ())),
        (lost(ABORTED, LOST, ABORTED, ABORTED, death=describe_exit(-9, "Killed process 7 (python)")), ("restart", ())),
        (lost(ABORTED, LOST, ABORTED, ABORTED, death=describe_exit(-11)), ("restart-elsewhere", HERE)),
        (lost(ABORTED, LOST, ABORTED, ABORTED, death=describe_exit(3)), ("stop", ())),
        (lost(ABORTED, ABORTED, LOST, LOST), ("restart-elsewhere", ("node1",))),  # a node that died
        (lost(LOST, LOST, LOST, LOST), ("restart", ())),  # the job was killed
        (lost(LOST, ABORTED, LOST, ABORTED), ("restart", ())),
        (report(Outcome.LOST, ABORTED, end=End.LOST), ("restart", ())),  # what had started the ranks was killed
    ],
)
def test_ranks_that_were_lost(of: Report, expected: Told) -> None:
    assert told(of) == expected


def stalled(*ranks: int) -> Report:
    return report(Outcome.STALLED, stall=Stall(ranks, (), "they stalled", len(ranks), 0), end=End.STALL)


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        (stalled(1), ("restart-elsewhere", HERE)),
        (stalled(2, 3), ("restart-elsewhere", ("node1",))),
        (stalled(1, 2), ("restart", ())),
        (replace(stalled(1), ranks=[row(n, host="node0") for n in range(4)]), ("restart", ())),
        (report(Outcome.ABORTED, reason="stopped by SIGTERM", end=End.SIGNAL), ("stop", ())),
        (report(Outcome.ABORTED, reason="stopped after batch 9", end=End.LIMIT), ("stop", ())),
        (report(Outcome.ABORTED, reason="run b-0 was stopped", end=End.SIBLING), ("stop", ())),
        (report(Outcome.LOST, reason="then run train-1 began", end=End.RELAUNCHED), ("stop", ())),
        (report(Outcome.LOST, reason="the collector was ended", end=End.UNWATCHED), ("stop", ())),
        (report(Outcome.FAILED, reason="exit code 3", end=End.COMMAND), ("stop", ())),
        (report(), None),
        (report(Outcome.FAILED, end=End.UNKNOWN), None),
        (replace(judged(Cause.OVERFLOW), end=End.UNKNOWN), ("fix-code", ())),
    ],
)
def test_other_ends(of: Report, expected: Told | None) -> None:
    assert told(of) == expected


def test_each_end_has_its_row() -> None:
    assert set(ENDS) == set(End)


def test_what_a_command_is_told() -> None:
    assert variables(None) == {"RANKWATCH_ACTION": "", "RANKWATCH_HOSTS": ""}
    told = variables(Advice(Action.RESTART_ELSEWHERE, "why", ("a", "b")))
    assert told == {"RANKWATCH_ACTION": "restart-elsewhere", "RANKWATCH_HOSTS": "a,b"}


STATES = st.lists(st.sampled_from(RankState), min_size=4, max_size=4)
FAREWELLS = st.sampled_from(
    ["", "KeyError: 'x'", "TypeError: one\nand two", CLOSED, describe_exit(-9), describe_exit(3), describe_exit(-11)]
)
FOUND = st.lists(
    st.builds(
        lambda pattern, rank, declared: replace(ONE, pattern=pattern, ranks=(rank,), is_declared=declared),
        st.sampled_from(DesyncPattern), st.integers(0, 3), st.booleans(),
    ),
    max_size=3,
)  # fmt: skip


@given(
    st.sampled_from(End), st.sampled_from(Outcome), st.one_of(st.none(), st.sampled_from(Cause)), STATES,
    st.lists(FAREWELLS, min_size=4, max_size=4), FOUND, st.sampled_from([None, RECURRED, FINITE]),
    st.one_of(st.none(), st.lists(st.integers(0, 3), min_size=1, unique=True)),
)  # fmt: skip
def test_whatever_is_known_the_advice_is_one_that_a_program_can_follow(
    end: End, outcome: Outcome, cause: Cause | None, states: list[RankState], farewells: list[str], found: list[Desync],
    closeup: CloseUp | None, hung: list[int] | None,
) -> None:  # fmt: skip
    rows = [row(n, one, farewell=said, left=n) for n, (one, said) in enumerate(zip(states, farewells, strict=True))]
    of = judged(cause, closeup) if cause is not None else report()
    stall = None if hung is None else Stall(tuple(hung), (), "they stalled", len(hung), 0)
    advice = next_action(replace(of, end=end, outcome=outcome, ranks=rows, desync=tuple(found), stall=stall))
    if advice is None:
        assert cause is None
        assert end in (End.FINISHED, End.DESYNC, End.VERDICT, End.UNKNOWN)
        return
    assert advice.reason
    assert "\n" not in advice.reason
    assert set(advice.hosts) <= {"node0", "node1"}
    assert not advice.hosts or advice.action is Action.RESTART_ELSEWHERE
