"""What to do after a run, for programs: a row for each way to end. Pure.

The numbers of a trip have their action in the table of causes, and replicas that differ in the table of patterns. What counts
here is whether the same command, started again, would come to the same end:

- What the code makes of good numbers it makes again. So does an error that a rank raises.
- What came to one machine alone may not come again without that machine. ``suspects.py`` says which one.
- A process that was killed, a connection that broke and ranks that hang say nothing against the code: start again.
- What was stopped on purpose, whoever stopped it starts again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

from rankwatch.shared.printable import one_line
from rankwatch.shared.types.action import Action
from rankwatch.shared.types.trip import Cause
from rankwatch.shared.words.brief import LONGEST, brief, is_of_a_collective
from rankwatch.shared.words.cause import action_of, advise
from rankwatch.shared.words.text import describe_position, name_spans

from ..calls.differs import ordinal
from ..core.report import End, RankRow, RankState, Report
from ..ending.absent import BY_A_LIBRARY, absent_for, describe_absent, first_failed, is_unequal
from ..ending.exit_text import is_by_software
from ..replicas.desync import WORDS, DesyncPattern
from ..trip.began import Began, advise_began, leads
from ..trip.verdict import Verdict
from .suspects import Suspect, SuspectKind, suspects_of


class Advice(NamedTuple):
    """``hosts`` are those to leave out. ``reason`` is one line."""

    action: Action
    reason: str
    hosts: tuple[str, ...] = ()


def next_action(report: Report) -> Advice | None:
    """None: there is nothing to do, as the run finished well, or an older version recorded it."""
    has_verdict = report.verdict is not None and report.end not in ON_PURPOSE
    return ENDS[End.VERDICT if has_verdict else report.end](report)


def variables(advice: Advice | None) -> dict[str, str]:
    """What a command is told of it in its environment."""
    action, hosts = ("", ()) if advice is None else (advice.action.value, advice.hosts)
    return {"RANKWATCH_ACTION": action, "RANKWATCH_HOSTS": ",".join(hosts)}


def remedy(report: Report, verdict: Verdict) -> str:
    """What people can try first. Where it began elsewhere than at the culprit, that comes before the culprit's precision."""
    usual = advise(verdict.cause, verdict.trip, report.closeup, is_everywhere=verdict.is_everywhere)
    if report.handed:
        return f"give the buffers of both stages one dtype and shape, and look at what casts between them; else {usual}"
    return f"{advise_began(report.origin)}; else {usual}" if _began_elsewhere(report, verdict) else usual


def _began(report: Report) -> Began | None:
    return report.origin.began if report.origin is not None else None


def _began_elsewhere(report: Report, verdict: Verdict) -> bool:
    if verdict.cause is Cause.DATA or (verdict.cause is Cause.DIVERGENCE and not _began_on_one_rank(report)):
        return False
    return leads(report.origin, verdict.rank, verdict.trip)


def _began_on_one_rank(report: Report) -> bool:
    began = _began(report)
    return began is not None and began.rank is not None and began.alone is True


def _began_with_an_input(report: Report, verdict: Verdict) -> bool:
    began = _began(report)
    is_input = began is not None and not began.module and began.label.startswith("input")
    return is_input and _began_elsewhere(report, verdict)


# --- bad numbers ------------------------------------------------------------------------------------------------------

_BECAUSE = {
    Action.FIX_CODE: "the code or its settings make it, so a restart comes to it again",
    Action.LOOK_AT_DATA: "the data make it, so a restart comes to it again",
    Action.SKIP_BATCH: "earlier batches were good: run it with --on-bad-step skip, which leaves out the step of a bad one",
    Action.RESTORE_CHECKPOINT: "what it goes on from is bad: begin with an earlier checkpoint",
    Action.RESTART_ELSEWHERE: "nothing that was run again made it, so the machine is suspected",
}


def _after_verdict(report: Report) -> Advice | None:
    verdict = report.verdict
    if verdict is None:
        return None
    if suspects := suspects_of(report):
        return _without(suspects, report)
    action = action_of(verdict.cause, verdict.trip)
    if action is Action.FIX_CODE and _began_with_an_input(report, verdict):
        action = Action.LOOK_AT_DATA
    rows = [report.ranks[verdict.rank]] if action is Action.RESTART_ELSEWHERE and verdict.rank is not None else []
    return Advice(action, f"{_what(verdict)}: {_BECAUSE[action]}", _hosts_of(rows))


def _what(verdict: Verdict) -> str:
    """``overflow in batch 25 of rank 1``."""
    whose = f" of rank {verdict.rank}" if verdict.rank is not None and not verdict.alike else ""
    return f"{verdict.cause.value} in {describe_position(verdict.trip.position)}{whose}"


# --- a machine --------------------------------------------------------------------------------------------------------


def _without(suspects: Iterable[Suspect], report: Report) -> Advice:
    """Start again without the machines of these suspects. The first one has the reason."""
    suspects = list(suspects)
    rows = [report.ranks[one.rank] for one in suspects]
    return Advice(Action.RESTART_ELSEWHERE, _SUSPECTED[suspects[0].kind](rows[0], report), _hosts_of(rows))


def _came_apart(row: RankRow, report: Report) -> str:
    step = next((one.step for one in report.desync if one.ranks == (row.rank,)), 0)
    left = f"rank {row.rank} alone left the other replicas, so its machine is suspected"
    return f"{left}: go on from a checkpoint from before step {step}"


def _did_not_recur(row: RankRow, report: Report) -> str:
    what = "it" if report.verdict is None else _what(report.verdict)
    return f"{what} was finite each time that it was run again on the same numbers, so the machine is suspected"


def _was_lost(row: RankRow, report: Report) -> str:
    lost = [one.rank for one in report.ranks if one.state is RankState.LOST]
    were = "were lost" if lost[1:] else _death(row)
    return f"{name_spans(lost)} {were}, and no rank of another host: its machine is suspected"


_SUSPECTED: dict[SuspectKind, Callable[[RankRow, Report], str]] = {
    SuspectKind.ONE_REPLICA: _came_apart,
    SuspectKind.GATHER: lambda row, report: (
        f"what rank {row.rank} gathered is not what the shards are, so the network of its host is suspected"
    ),
    SuspectKind.DID_NOT_RECUR: _did_not_recur,
    SuspectKind.LOST: _was_lost,
    SuspectKind.GPU_ERROR: lambda row, report: (
        f"rank {row.rank} failed by an error that only broken hardware raises: {_error(row)}"
    ),
}


def _hosts_of(rows: Iterable[RankRow]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(row.host for row in rows if row.host))


# --- replicas ---------------------------------------------------------------------------------------------------------


def _after_desync(report: Report) -> Advice | None:
    """What differed first decides: the rest may follow from it."""
    split = [one for one in report.desync if one.is_split]
    if not split:
        return None
    if suspects := [one for one in suspects_of(report) if one.kind in (SuspectKind.ONE_REPLICA, SuspectKind.GATHER)]:
        return _without(suspects, report)
    first = split[0]
    action, who = WORDS[first.pattern].action, name_spans(first.ranks)
    if action is not Action.RESTART_ELSEWHERE:
        return Advice(action, f"{first.parameter} differs on {who} ({first.pattern.value}): {_DIFFERS[action]}")
    if first.pattern is DesyncPattern.ONE_RANK and any(one.ranks != first.ranks for one in split):
        several = "one rank after another left the other replicas, and a machine that fails is one: look at the code"
        return Advice(Action.FIX_CODE, several)
    why = f"{first.parameter} differs on {who} ({first.pattern.value}), so one of their machines is suspected"
    return Advice(action, why, _hosts_of(report.ranks[rank] for rank in first.ranks))


_DIFFERS = {
    Action.FIX_CODE: "the code makes it, so a restart comes to it again",
    Action.RESTORE_CHECKPOINT: "load the same checkpoint on all ranks",
    Action.STOP: "the cause is not known, so a restart may come to it again",
}


# --- ranks that failed, were lost, or hang ----------------------------------------------------------------------------

_PASSES = re.compile(
    r"Connection\w*Error|BrokenPipeError|Timeout(?:Error|Expired)|timed out|connection (?:reset|refused|closed|aborted)",
    re.I,
)
"""Errors of a network that may be there again."""

_MISUSED = re.compile(r"invalid (?:usage|argument)|mismatch|preamble|only supported with|duplicate GPU", re.I)
"""gloo and NCCL raise these, too: of calls that do not fit together, or of a setting."""

_NO_MEMORY = re.compile(r"OutOfMemory|out of memory|MemoryError|cannot allocate memory", re.I)


def _after_unequal_calls(report: Report) -> Advice | None:
    """Ranks that call different collectives hang, or fail in the words of a broken connection."""
    found = next((one for one in report.collectives if not one.is_awaited), None)
    if found is None:
        return None
    who = f"ranks call different collectives from the {ordinal(found.number)} of {found.name} on"
    return Advice(Action.FIX_CODE, f"{who}, {found.odd.call} say: the code makes it, so a restart comes to it again")


def _after_failure(report: Report) -> Advice:
    first = first_failed(report.ranks)
    if first is None:
        return _after_command(report)
    if broken := [one for one in suspects_of(report) if one.kind is SuspectKind.GPU_ERROR]:
        return _without(broken, report)
    text = first.farewell
    said = f"rank {first.rank} failed: {_error(first)}"
    if is_of_a_collective(text) and (advice := _after_unequal_calls(report)):
        return advice
    if is_of_a_collective(text) or _PASSES.search(text):
        if advice := _after_absence(first, report):
            return advice
        if not _MISUSED.search(text):
            return Advice(Action.RESTART, f"{said}: a connection that broke says nothing against the code")
    if _NO_MEMORY.search(text):
        return Advice(Action.STOP, f"{said}: a restart needs as much memory again")
    return Advice(Action.STOP, f"{said}: a restart comes to this error again")


def _after_absence(first: RankRow, report: Report) -> Advice | None:
    """Ranks that had ended are not there in the next collective of those that go on."""
    ended = [row for row in absent_for(first, report.ranks) if row.state is not RankState.MISSING]
    if not ended:
        return None
    said = describe_absent(ended, first)
    if any(is_unequal(row, first) for row in ended):
        return Advice(Action.FIX_CODE, f"{said}; a restart comes to it again")
    return Advice(Action.STOP, f"{said}, and the others went on: a restart comes to it again")


def _after_command(report: Report) -> Advice:
    return Advice(Action.STOP, "the command failed, and no rank says why: nothing says that a restart would help")


def _error(row: RankRow) -> str:
    return one_line(brief(row.farewell))[:LONGEST]


_EXITED = "its process ended with exit code"


def _after_loss(report: Report) -> Advice:
    if advice := _after_unequal_calls(report):
        return advice
    machines = SuspectKind.LOST, SuspectKind.ONE_REPLICA
    if suspects := [one for one in suspects_of(report) if one.kind in machines]:
        return _without(suspects, report)
    lost = sorted((row for row in report.ranks if row.state is RankState.LOST), key=lambda row: row.left)
    if not lost:
        return Advice(Action.RESTART, "what had started the ranks has ended, and nothing is known to be wrong with the code")
    what = f"rank {lost[0].rank} {_death(lost[0])}"
    if lost[0].farewell.startswith(_EXITED):
        return Advice(Action.STOP, f"{what}: its own program ended it, so a restart comes to it again")
    if lost[0].leaked and is_by_software(lost[0].farewell):
        kept = "look for what keeps the tensors of earlier batches; a restart comes to it again"
        return Advice(Action.STOP, f"{what}, and its memory had grown all the time: {kept}")
    if advice := _after_absence(lost[0], report):
        return advice
    if lost[0].farewell.startswith(BY_A_LIBRARY):
        return Advice(Action.STOP, f"{what}: a library ended it, which says why on its output; a restart comes to it again")
    return Advice(Action.RESTART, f"{what}: nothing is known to be wrong with the code or the data")


def _death(row: RankRow) -> str:
    text = one_line(row.farewell)
    return f"was {text}" if text.startswith("killed") else "was lost" + (f": {text}" if text else " without a word")


def _after_stall(report: Report) -> Advice:
    if advice := _after_unequal_calls(report):
        return advice
    stall, hosts = report.stall, _hosts_of(report.ranks)
    stalled = () if stall is None else _hosts_of(report.ranks[rank] for rank in stall.ranks)
    if stall is not None and len(stalled) == 1 < len(hosts):
        what = f"{name_spans(stall.ranks)} hung, and no rank of another host did: its machine is suspected"
        return Advice(Action.RESTART_ELSEWHERE, what, stalled)
    return Advice(Action.RESTART, "ranks hung, and no single host is suspected: the stacks in the report say where")


# --- the table --------------------------------------------------------------------------------------------------------


def _stopped(why: str) -> Callable[[Report], Advice]:
    return lambda report: Advice(Action.STOP, f"{one_line(report.reason)}: {why}")


ON_PURPOSE = {
    End.SIGNAL: _stopped("whoever sent the signal starts it again"),
    End.LIMIT: _stopped("it did what was asked for"),
    End.SIBLING: _stopped("the report of that run says what to do"),
    End.RELAUNCHED: _stopped("it runs again already"),
    End.UNWATCHED: _stopped("its ranks may train on"),
}

ENDS: dict[End, Callable[[Report], Advice | None]] = {
    End.FINISHED: _after_desync,
    End.VERDICT: _after_verdict,
    End.FAILED: _after_failure,
    End.COMMAND: _after_command,
    End.LOST: _after_loss,
    End.STALL: _after_stall,
    End.DESYNC: _after_desync,
    **ON_PURPOSE,
    End.UNKNOWN: lambda report: None,
}
"""By why a run ended, what to do."""
