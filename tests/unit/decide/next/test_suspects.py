"""What counts against a machine: only what the same program with the same numbers does not do again, or what came to one rank."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outcomes import judged, report, row
from rankwatch.shared.types.closeup import CloseUp
from rankwatch.shared.types.trip import Cause
from rankwatch_monitor.decide.core.report import Outcome, RankState, Report
from rankwatch_monitor.decide.ending.exit_text import describe_exit
from rankwatch_monitor.decide.next.suspects import Suspect, SuspectKind, suspects_of
from rankwatch_monitor.decide.replicas.desync import Desync, DesyncPattern

ONE = Desync(120, "layers.3.weight", (1,), 4, DesyncPattern.ONE_RANK, "gpu07", "GPU-5f3a", equal_at=104, source="DDP")


def kinds(of: Report) -> list[tuple[str, int, bool]]:
    return [(kind.value, rank, is_gpu) for kind, rank, is_gpu in suspects_of(of)]


def test_nothing_is_suspected_of_a_run_that_finished() -> None:
    assert suspects_of(report()) == ()


@pytest.mark.parametrize("cause", [Cause.OVERFLOW, Cause.INVALID, Cause.SINGULAR, Cause.GRADIENT, Cause.UNEXPLAINED])
def test_bad_numbers_that_did_not_recur(cause: Cause) -> None:
    assert kinds(judged(cause, CloseUp(recurred=0, of=3))) == [("did-not-recur", 1, True)]
    assert kinds(judged(cause, recurs=False)) == [("did-not-recur", 1, True)]
    assert kinds(judged(cause, CloseUp(recurred=3, of=3))) == []
    assert kinds(judged(cause, CloseUp(recurred=1, of=3), recurs=False)) == []
    assert kinds(judged(cause, CloseUp(recurred=0, of=3, is_eager=True))) == []  # the compiled graph may be at fault
    assert kinds(judged(cause)) == []  # it was not run again
    assert kinds(judged(cause, CloseUp(note="out of memory"))) == []


@pytest.mark.parametrize("cause", [Cause.DATA, Cause.WEIGHT, Cause.UPSTREAM, Cause.REDUCTION, Cause.DIVERGENCE])
def test_what_came_from_elsewhere_counts_against_no_machine(cause: Cause) -> None:
    assert kinds(judged(cause, CloseUp(recurred=0, of=3), recurs=False)) == []


def test_where_no_single_rank_is_the_culprit_no_machine_is() -> None:
    finite = CloseUp(recurred=0, of=3)
    assert kinds(judged(Cause.INVALID, finite, alike=(0, 1))) == []
    assert kinds(judged(Cause.GRADIENT, finite, received="all_reduce")) == []
    assert kinds(judged(Cause.GRADIENT, finite, unfound="another rank's gradient was bad")) == []


def test_one_replica_that_came_apart() -> None:
    several = (ONE, replace(ONE, parameter="layers.4.weight"), replace(ONE, step=300))
    assert kinds(report(desync=several)) == [("one-replica", 1, True)]
    gathered = replace(ONE, pattern=DesyncPattern.GATHER)
    assert kinds(report(desync=(gathered,))) == [("gather", 1, False)]
    for harmless in (
        (replace(ONE, ranks=(1, 2)),),
        (ONE, replace(ONE, ranks=(2,))),  # a machine that fails is one
        (replace(ONE, is_declared=False),),
        *((replace(ONE, pattern=pattern),) for pattern in DesyncPattern if pattern.value not in ("one-rank", "gather")),
    ):
        assert kinds(report(desync=harmless)) == []


LOST, FAILED, ABORTED, MISSING = RankState.LOST, RankState.FAILED, RankState.ABORTED, RankState.MISSING


@pytest.mark.parametrize(
    ("outcome", "states", "found"),
    [
        (Outcome.LOST, (ABORTED, LOST, ABORTED, ABORTED), [("lost", 1, True)]),
        (Outcome.LOST, (LOST, LOST, ABORTED, ABORTED), [("lost", 0, False)]),  # the host of both
        (Outcome.LOST, (LOST, ABORTED, LOST, ABORTED), []),  # on two hosts: the network, or the job was killed
        (Outcome.LOST, (LOST, LOST, LOST, LOST), []),
        (Outcome.LOST, (LOST, LOST, MISSING, MISSING), []),
        (Outcome.FAILED, (FAILED, LOST, LOST, LOST), []),  # torchrun killed the others
        (Outcome.ABORTED, (ABORTED, LOST, ABORTED, ABORTED), []),
        (Outcome.STALLED, (ABORTED, LOST, ABORTED, ABORTED), []),
    ],
)
def test_ranks_that_were_lost(outcome: Outcome, states: tuple[RankState, ...], found: list[object]) -> None:
    assert kinds(report(outcome, *states)) == found


@pytest.mark.parametrize(
    ("status", "oom", "is_machine"),
    [(3, "", False), (-9, "", False), (-9, "Killed process 7 (python)", False), (-15, "", False), (-34, "", False),
     (-11, "", True), (-7, "", True), (-4, "", True), (-8, "", True)],
)  # fmt: skip
def test_a_rank_that_is_known_to_have_been_ended_by_software(status: int, oom: str, is_machine: bool) -> None:
    rows = [row(0, ABORTED), row(1, LOST, farewell=describe_exit(status, oom)), row(2), row(3)]
    assert kinds(replace(report(Outcome.LOST), ranks=rows)) == [("lost", 1, True)] * is_machine


@pytest.mark.parametrize(
    ("farewell", "is_hardware"),
    [
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", True),
        ("AcceleratorError: CUDA error: uncorrectable NVLink error detected during the execution", True),
        ("RuntimeError: CUDA error: hardware stack error", True),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", False),
        ("RuntimeError: CUDA error: device-side assert triggered", False),
        ("torch.OutOfMemoryError: CUDA out of memory", False),
        ("KeyError: 'x'", False),
    ],
)
def test_errors_that_only_broken_hardware_raises(farewell: str, is_hardware: bool) -> None:
    rows = [row(0), row(1, FAILED, farewell=farewell), row(2, LOST), row(3, ABORTED)]
    found = suspects_of(replace(report(Outcome.FAILED), ranks=rows))
    assert found == ((Suspect(SuspectKind.GPU_ERROR, 1, is_gpu=True),) if is_hardware else ())
