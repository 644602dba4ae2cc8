"""The report for people: the culprit's last frames, and below them the first inf or nan, who and why."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TypeAlias

from rankwatch.shared.printable import printable
from rankwatch.shared.types.action import RESTARTS, Action
from rankwatch.shared.types.frame import NO_STAGE
from rankwatch.shared.types.notice import NoticeKind, describe_notice, is_of_loss
from rankwatch.shared.types.trip import Cause
from rankwatch.shared.words.closeup_text import made_between
from rankwatch.shared.words.text import (
    FIELD_INDENT,
    describe_module,
    describe_position,
    describe_rank,
    describe_trip,
    format_dump,
    format_head,
    name_ranks,
    name_spans,
)

from ..decide.core.gaps import describe_gap
from ..decide.core.report import Outcome, RankNotice, RankRow, RankState, Report
from ..decide.next.how_it_went import judgement_of
from ..decide.next.next_action import next_action, remedy
from ..decide.replicas.desync_text import describe_compared, describe_desync, describe_remedy, origins
from ..decide.replicas.own_notices import BY_PRODUCT_KINDS
from ..decide.trip.began import describe_origin, leads
from ..decide.trip.verdict import Certainty, Verdict
from . import closeup, collectives, course, judgement, screen, skipped, stalls
from .runs import UNFINISHED

NoticeKey: TypeAlias = tuple[NoticeKind, str, str, str]

MAX_LINES = 8
"""Lines of one kind that a report shows; it counts the rest."""


FRAMES_ON_SCREEN = 5
"""Frames above the verdict of a run that ends, unless asked for more: ``report.txt`` has all."""


def render(report: Report, frames: int | None = None, record: str = "") -> str:
    """The report as text, newline at its end. On a terminal the last lines are what is seen: the verdict.

    ``frames``: so many of the last ones; None: all. ``record``: the command that shows all of the run, as the last field.
    """
    dump = format_dump(report.verdict.trip.frames[-(frames or 0) :]).strip("\n") + "\n\n" if report.verdict else ""
    return dump + render_head(report, record, frames)


def render_head(report: Report, record: str = "", stack_lines: int | None = None) -> str:
    """The report without the frames. ``stack_lines``: so many of each stack; None: all.

    ``record``: the command that shows all. Given it, this is for a screen, which has what is not as it should be.
    """
    if report.verdict is None:
        return _render_ending(report, record, stack_lines)
    verdict, trip = report.verdict, report.verdict.trip
    what = f"{trip.frame.spec.module or '(root)'}, {trip.culprit.label} ({verdict.cause.value}{_born(report, verdict)})"
    whose = verdict.who(f"rank {verdict.tripped}")
    title = f"first {trip.culprit.state.word} in run {report.run}: {whose}, {describe_position(trip.position)}, {what}"
    fields = _of_verdict(report, verdict, stack_lines)
    if not record:
        return format_head(title, fields)
    on_screen = [("culprit", _who(report, verdict)) if label == "culprit" else (label, text) for label, text in fields]
    return screen.fitted(title, [*_unusual(report, on_screen), *_record(record)], screen.OF_A_VERDICT)


def _of_verdict(report: Report, verdict: Verdict, stack_lines: int | None) -> list[tuple[str, str]]:
    """What, who, where, why, and what to do; then the state of the run."""
    is_led = leads(report.origin, verdict.rank, verdict.trip)
    looked = closeup.fields(report, verdict)
    why = 1 + [label for label, _ in looked].index("cause")
    return [
        *(_began(report) if is_led else []),
        ("culprit", describe_trip(verdict.who(_name(report, verdict.tripped)), verdict.trip, report.frames_in_batch)),
        *looked[:why],
        ("try", remedy(report, verdict)),
        *_next(report),
        *looked[why:],
        *([("handed", report.handed)] if report.handed else []),
        *([] if is_led else _began(report)),
        *notice_fields(report),
        *replica_fields(report),
        *_also(report, verdict),
        ("certainty", _certainty(report, verdict)),
        *skipped.fields(report, is_brief=True),
        ("abort", _acknowledgements(report)),
        *_lapses(report),
        *stalls.fields(report, stack_lines),
        *collectives.fields(report),
        *course.fields(report)[:2],
        *course.how(report),
        *closeup.replay(report, verdict),
    ]


def _born(report: Report, verdict: Verdict) -> str:
    """What made a gradient, or what was bad between modules, and its line: the module alone does not say where."""
    closer = report.closeup.operator if report.closeup is not None else None
    made = closer or verdict.trip.operator
    is_between = verdict.cause is Cause.UPSTREAM and made_between(verdict.trip, report.closeup) is not None
    if made is None or made.source is None or not (made.node or is_between):
        return ""
    return f": {made.node or made.title} of {made.source.file.rpartition('/')[2]}:{made.source.line}"


def _who(report: Report, verdict: Verdict) -> str:
    """The culprit in one row, below a title that says what and in which batch. Of a host's name the domain is left out, and
    the beginning where the name is long: a cluster's hosts differ at the end."""
    of = report.ranks[verdict.tripped]
    host = of.host if of.host[:1].isdecimal() else of.host.partition(".")[0]  # an address has no domain

    def told(host: str) -> str:
        who = verdict.who(describe_rank(of.rank, report.world_size, host, of.local_rank, of.stage))
        return f"{who}, step {verdict.trip.optimizer_step}"

    most = screen.COLUMNS - FIELD_INDENT
    too_many = len(told(host)) - most
    row = told(host) if too_many <= 0 else told(f"...{host[too_many + len('...') :]}")
    return row if len(row) <= most else screen.clip(row, 1)  # of ranks that went bad at once, there may be many


def _unusual(report: Report, fields: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The fields that a screen has: not those that say what is as it should be, and of others what bears on the end."""
    left_out = {*screen.usual(report), *course.LABELS, "batches"}
    shown = [(label, _short(report, label, text)) for label, text in fields if label not in left_out]
    at = next((place for place, (label, _) in enumerate(shown) if label == "replay"), len(shown))
    return [*(field for field in shown[:at] if field[1]), *course.state(report), *shown[at:]]


def _short(report: Report, label: str, text: str) -> str:
    if label == "operator":
        return text.partition("\n")[0]
    if label == "stacks":
        return "\n".join(line for line in text.split("\n") if not line.startswith(stalls.INDENT))
    return _bearing(report) if label == "noticed" else text


def _bearing(report: Report) -> str:
    """The notice of the module that tripped, if there is one; without a verdict, the most urgent one."""
    verdict = report.verdict
    module = None if verdict is None else verdict.trip.frame.spec.module
    told = [line for key, line in noticed(report).items() if key[0] not in BY_PRODUCT_KINDS and module in (None, key[1])]
    return told[0] if told else ""


def render_so_far(report: Report, *, is_alive: bool = True) -> str:
    """A run that is still running; or, if it is not ``is_alive``, that ended unseen."""
    states: dict[str, int] = {}
    for row in report.ranks:
        states[row.state.value] = states.get(row.state.value, 0) + 1
    fields = [("ranks", ", ".join(f"{count} {state}" for state, count in states.items()))]
    doubts = judgement.so_far(report)
    fields += [("batches", str(report.batches)), *doubts, *course.fields(report)]
    fields += [*(course.beside_loss(report) if doubts else []), *skipped.fields(report)]
    fields += [*replica_fields(report), *notice_fields(report), *_lapses(report)]
    fields += [*stalls.fields(report), *collectives.fields(report)]
    return format_head(f"run {report.run} is {'running' if is_alive else f'unfinished: {UNFINISHED}'}", fields)


def command_of(run: Path) -> str:
    """The command that shows all of a report, from any folder."""
    return printable(shlex.join(["rankwatch", "report", str(run.absolute()), "--all"]))


def _record(command: str) -> list[tuple[str, str]]:
    return [("record", command)] if command else []


def _render_ending(report: Report, record: str, stack_lines: int | None) -> str:
    batches = f"{report.batches} batch{'es' if report.batches != 1 else ''}"
    if report.outcome is Outcome.FINISHED:
        missing = [row.rank for row in report.ranks if row.state is RankState.MISSING]
        unheard = f"; never connected: {name_ranks(missing)}" if missing else ""
        faults = "".join(f"\n  but {_name(report, row.rank)} {row.farewell}" for row in report.ranks if row.farewell)
        no = "no other inf or nan" if report.skipped else "no inf or nan"
        clean = f"{no} was reported, but not all of it is on record" if report.gaps else no
        kinds = {one.notice.kind for one in report.notices}
        harmless = [one.notice for one in report.notices if one.notice.kind is NoticeKind.HARMLESS_LOSS]
        what = "a loss, harmless" if all(map(is_of_loss, harmless)) else "what harmed nothing"
        clean += f" but in {what}" if harmless else ""
        clean += " but in a step that was skipped" if NoticeKind.SKIPPED_STEP in kinds else ""
        clean += " but with weights on trial" if NoticeKind.TRIAL in kinds else ""
        own = "" if report.skipped else report.reason  # which is what was left out, and stands before
        known = own or ("not watched to its end" if faults else clean)
        judged = judgement_of(report)
        how = f"{judgement.headline(judged)};" if judged is not None else ":"
        head = f"run {report.run} finished{how} {_ranks(report)}, {batches}, {known}{unheard}{faults}"
        is_calm = report.course is not None and not report.desync and (judged is None or judged.healthy is not False)
        noticed = notice_fields(report) or ([("noticed", "nothing")] if is_calm else [])
        lapses = [*_lapses(report), *stalls.fields(report, stack_lines), *collectives.fields(report)]
        return format_head(
            head,
            [
                *course.fields(report),
                *(course.beside_loss(report) if record and judged is not None and judged.healthy is False else []),
                *replica_fields(report),
                *noticed,
                *lapses,
                *course.steps(report),
                *skipped.fields(report),
                *([] if record else course.how(report)),
                *_record(record),
            ],
        )
    told, mark, rest = report.reason.partition("; ")
    first, _, more = told.partition("\n")  # of an exception of several lines, the first one says what it is
    told, rest = first, f"{more}{mark}{rest}" if more else rest
    fields = [("reason", rest)] if rest else []
    for label, state in (("lost", RankState.LOST), ("failed", RankState.FAILED)):
        ranks = [row.rank for row in report.ranks if row.state is state]
        if len(ranks) > 1 or (ranks and not record):
            fields.append((label, "\n".join([name_ranks(ranks), *_last_words(report, ranks)])))
    fields += [*_next(report), *stalls.fields(report, stack_lines), *collectives.fields(report)]
    fields += [("batches", str(report.batches)), *course.fields(report), *skipped.fields(report)]
    fields += [*replica_fields(report), *notice_fields(report), *_lapses(report)]
    if report.acknowledged_in is not None:
        fields.append(("abort", _acknowledgements(report)))
    told = re.sub(rf" (?:was |were )?{report.outcome.value}: ", ": ", told, count=1)  # it is said before
    fields += course.how(report)
    title = f"run {report.run} {report.outcome.value}: {told}"
    if not record:
        return format_head(title, fields)
    return screen.fitted(title, [*_unusual(report, fields), *_record(record)], screen.OF_AN_END)


def _last_words(report: Report, ranks: list[int]) -> list[str]:
    """What ended each of several ranks. Of one, the reason says so."""
    words: dict[str, list[int]] = {}
    for rank in ranks if len(ranks) > 1 else ():
        words.setdefault(report.ranks[rank].last_words, []).append(rank)
    return _first([f"{name_spans(same)}: {text}" for text, same in words.items() if text])


def _next(report: Report) -> list[tuple[str, str]]:
    """What a program could do by itself, and what speaks against it where a rank was lost. Of all else, what to try says more."""
    advice = next_action(report)
    if advice is None or not (report.outcome is Outcome.LOST or advice.action in (*RESTARTS, Action.SKIP_BATCH)):
        return []
    without = f" without {', '.join(advice.hosts)}" if advice.hosts else ""
    return [("next", f"{advice.action.value}{without}: {advice.reason}")]


def replica_fields(report: Report) -> list[tuple[str, str]]:
    """Whether the replicas are one model: what was compared, one line for each origin, and what to do."""
    if report.compared is None and not report.desync:
        return []
    lines = [] if report.compared is None else [describe_compared(report.compared, report.world_size)]
    found = list(origins(report.desync).values())
    for origin in found[:MAX_LINES]:
        lines += [describe_desync(origin, report.world_size), f"try: {describe_remedy(origin)}"]
    if len(found) > MAX_LINES or report.desync_unkept:
        count = sum(map(len, found[MAX_LINES:])) + report.desync_unkept
        lines.append(f"and {count} more: report.json has up to {len(report.desync)}")
    return [("replicas", "\n".join(lines))]


def _began(report: Report) -> list[tuple[str, str]]:
    return [] if report.origin is None else [("began", describe_origin(report.origin, report.world_size))]


def _also(report: Report, verdict: Verdict) -> list[tuple[str, str]]:
    lines = []
    also = verdict.all_tripped if verdict.rank is None or verdict.alike else verdict.also
    for rank, trip in also[:MAX_LINES]:
        stage = report.ranks[rank].stage
        is_same = stage == report.ranks[verdict.tripped].stage and trip.position == verdict.trip.position
        where = "the same frame" if is_same else f"frame {trip.position.frame}"
        if trip.position[:2] != verdict.trip.position[:2]:
            where += f" of batch {trip.position.batch}"
        part = f" (stage {stage})" if stage != NO_STAGE else ""
        what = f"{describe_module(trip.frame.spec)}, {trip.culprit.label}: {trip.culprit.state.name.lower()}"
        lines.append(f"rank {rank}{part} at {where}: {what}")
    if len(also) > MAX_LINES:
        lines.append(f"and {len(also) - MAX_LINES} more ranks")
    return [("also", "\n".join(lines))] if lines else []


def noticed(report: Report, only: int | None = None) -> dict[NoticeKey, str]:
    """One line for each reading that any rank noticed, with the text of its most urgent notice; if they differ, it says whose.

    ``only``: the notices of this rank alone.
    """
    of_readings: dict[NoticeKey, list[RankNotice]] = {}
    for one in report.notices if only is None else (one for one in report.notices if one.rank == only):
        of_readings.setdefault(one.notice.group, []).append(one)
    return {key: _line(same) for key, same in of_readings.items()}


def _line(same: list[RankNotice]) -> str:
    """``same``: the most urgent one first."""
    text = describe_notice(same[0].notice)
    worst = "" if all(describe_notice(notice) == text for _, notice in same) else f" (worst: rank {same[0].rank})"
    return f"{name_spans([rank for rank, _ in same])}{worst}: {text}"


def notice_fields(report: Report, most: int = MAX_LINES) -> list[tuple[str, str]]:
    # The others stand with the replicas.
    lines = _first([line for key, line in noticed(report).items() if key[0] not in BY_PRODUCT_KINDS], most)
    if report.notices_unkept:
        lines.append(f"and {report.notices_unkept} more that were not stored")
    return [("noticed", "\n".join(lines))] if lines else []


def _lapses(report: Report) -> list[tuple[str, str]]:
    """What is not on record, the ranks that train unwatched, the processes that were refused."""
    dropped = [row for row in report.ranks if row.dropped]
    fields = gap_fields(report)
    rows = [row for row in report.ranks if row.farewell and row.state is RankState.RUNNING]
    if rows:
        unwatched = _first([f"{_name(report, row.rank)} {row.farewell}" for row in rows])
        fields.append(("unwatched", "\n".join(unwatched)))
    if dropped:
        fields.append(dropped_field(sum(row.dropped for row in dropped), f" of {name_ranks([row.rank for row in dropped])}"))
    rivals = _first([f"{row.rival}: rank {row.rank} was there already" for row in report.ranks if row.rival])
    return [*fields, ("refused", "\n".join(rivals))] if rivals else fields


def dropped_field(count: int, whose: str = "") -> tuple[str, str]:
    batches = f"{count} batch{'es' if count != 1 else ''}{whose}"
    return "dropped", f"{batches}: the collector was out of reach, or too slow, for longer than they could wait"


def gap_fields(report: Report) -> list[tuple[str, str]]:
    lines = _first([describe_gap(gap, report.world_size) for gap in report.gaps])
    return [("gaps", "\n".join(lines))] if lines else []


def _first(lines: list[str], most: int = MAX_LINES) -> list[str]:
    hidden = len(lines) - most
    return [*lines[:most], f"and {hidden} more: report.json has them"] if hidden > 0 else lines


def _certainty(report: Report, verdict: Verdict) -> str:
    text = f"{verdict.certainty.value}: {verdict.answered} of {verdict.world_size} ranks answered"
    unfound = bool(verdict.trip.unfound)
    at_once = sum(trip.position == verdict.trip.position or (unfound and bool(trip.unfound)) for _, trip in verdict.also)
    finite = 0 if verdict.uneven else verdict.answered - 1 - at_once
    # The other stages of a pipeline do not have this frame, and later stages never ran this batch.
    here = "here" if report.ranks[verdict.tripped].stage == NO_STAGE else "before it"
    if finite and verdict.certainty is Certainty.COMPLETE and not verdict.also:
        text += f"; the other {finite} were finite {here}" if finite > 1 else f"; the other one was finite {here}"
    elif finite:
        text += f"; {finite} of them {'were' if finite > 1 else 'was'} finite {here}"
    if verdict.missing:
        return f"{text}; not known: {name_ranks(verdict.missing)} ({verdict.reason})"
    return f"{text}, but {verdict.uneven}" if verdict.uneven else text


def _acknowledgements(report: Report) -> str:
    others = report.others
    count = sum(row.acknowledged for row in others)
    when = ""
    if report.acknowledged_in is not None and count:
        when = f" in {report.acknowledged_in:.2f} s" if report.acknowledged_in >= 0.01 else " in under 0.01 s"
    which = "" if len(others) == report.world_size else "other "
    return f"{count} of {len(others)} {which}ranks acknowledged{when}"


def _ranks(report: Report) -> str:
    return f"{report.world_size} rank{'s' if report.world_size != 1 else ''}"


def _name(report: Report, rank: int) -> str:
    row: RankRow = report.ranks[rank]
    return describe_rank(rank, report.world_size, row.host, row.local_rank, row.stage)
