"""Which machine a run's end points at, if it points at one: what counts against a host or a GPU over many runs. Pure.

Bad numbers come from the code, the data and the settings far more often than from a machine, and these follow a job from host
to host. So only that counts which the same program, given the same numbers, does not do again, or which came to one rank alone:

    one-replica     a parameter that DDP, say, keeps equal came apart on one rank; more than one rank: suspect the code
    gather          what one rank gathered is not what the shards are: the host's network; nothing is said of its GPU
    did-not-recur   the same forward or backward, run again on the same numbers, was finite each time
    lost            a rank, or some ranks of one host, ended without a word and before all others; if all ranks did, the job
                    was killed, and that is nobody's fault; nor is it the machine's if its process is known to have exited,
                    or to have been killed by somebody or for want of memory
    gpu-error       a rank failed by an error that only broken hardware raises

Nothing else counts: not an overflow, a nan or a divergence that recurs or was not run again, nor bad data or weights, and not
a stall, which a data loader causes as often as a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from rankwatch.shared.str_enum import StrEnum
from rankwatch.shared.types.trip import Cause

from ..core.report import Outcome, RankState, Report
from ..ending.exit_text import is_by_software
from ..replicas.desync import DesyncPattern


class SuspectKind(StrEnum):
    """See the module."""

    ONE_REPLICA = "one-replica"
    GATHER = "gather"
    DID_NOT_RECUR = "did-not-recur"
    LOST = "lost"
    GPU_ERROR = "gpu-error"


class Suspect(NamedTuple):
    """A rank whose machine is suspected. ``is_gpu``: its GPU as well as its host."""

    kind: SuspectKind
    rank: int
    is_gpu: bool


_MADE_HERE = frozenset({Cause.OVERFLOW, Cause.INVALID, Cause.SINGULAR, Cause.GRADIENT, Cause.UNEXPLAINED})
"""Causes of numbers that the culprit itself made bad."""

_HARDWARE = re.compile(
    r"uncorrectable (?:ECC|NVLink)|ECC error|fallen off the bus|hardware stack error|GPU is lost", re.IGNORECASE
)
"""In the words of CUDA's errors. An illegal address or a failed launch is mostly the program's."""

_OF_DESYNC = {DesyncPattern.ONE_RANK: SuspectKind.ONE_REPLICA, DesyncPattern.GATHER: SuspectKind.GATHER}


def suspects_of(report: Report) -> tuple[Suspect, ...]:
    """The suspects of a run that is over, each once."""
    return tuple(dict.fromkeys([*_of_replicas(report), *_of_verdict(report), *_of_lost(report), *_of_failed(report)]))


def _of_replicas(report: Report) -> Iterator[Suspect]:
    for pattern, kind in _OF_DESYNC.items():
        found = {one.ranks for one in report.desync if one.pattern is pattern and one.is_declared}
        if len(found) == 1 and len(ranks := found.pop()) == 1:
            yield Suspect(kind, ranks[0], is_gpu=kind is SuspectKind.ONE_REPLICA)


def _of_verdict(report: Report) -> Iterator[Suspect]:
    verdict = report.verdict
    if verdict is None or verdict.rank is None or verdict.alike or verdict.cause not in _MADE_HERE:
        return
    trip, closeup = verdict.trip, report.closeup
    if trip.is_from_others or trip.unfound:
        return
    recurs = trip.recurs is not False
    if closeup is not None and closeup.of:  # a compiled graph computes otherwise than what was run again
        recurs = closeup.recurred > 0 or closeup.is_eager
    if not recurs:
        yield Suspect(SuspectKind.DID_NOT_RECUR, verdict.rank, is_gpu=True)


def _of_lost(report: Report) -> Iterator[Suspect]:
    """After a verdict, or after another rank's error, ranks that vanish are its victims."""
    if report.outcome is not Outcome.LOST or report.verdict is not None:
        return
    rows = [row for row in report.ranks if row.state is not RankState.MISSING]
    lost = [row for row in rows if row.state is RankState.LOST]
    if any(is_by_software(row.farewell) for row in lost):
        return
    if len({row.host for row in lost}) == 1 and len(lost) < len(rows):
        yield Suspect(SuspectKind.LOST, lost[0].rank, is_gpu=len(lost) == 1)


def _of_failed(report: Report) -> Iterator[Suspect]:
    for row in report.ranks:
        if row.state is RankState.FAILED and _HARDWARE.search(row.farewell):
            yield Suspect(SuspectKind.GPU_ERROR, row.rank, is_gpu=True)
