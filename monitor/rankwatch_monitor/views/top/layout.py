"""Lays out a view of a run in the rows of a terminal. Pure: ``screen`` draws them."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import chain
from typing import NamedTuple, TypeAlias

from rankwatch.shared.printable import one_line
from rankwatch.shared.words.text import describe_rank, format_dump, name_spans

from ...decide.core.gaps import describe_gap
from ...decide.core.report import Outcome, Report
from ...decide.ending.judgement import SHOWN
from ...decide.ending.memory import describe_sizes
from ...decide.next import how_it_went
from ...decide.replicas.desync_text import desync_lines
from ...record.follow import View
from ...record.numbers.headroom import Headroom, batches_of
from ...record.numbers.recent import Recent
from .. import collectives, stalls
from ..text import noticed, render_head
from .focus import Focus, Name, window
from .help import explained
from .ranks import Node, RankLine, describe_states, is_live, nodes_of, ranks_of, short_names
from .sparks import LEAST_ROWS, charts, curves
from .table import Line, TableRow, TextTable, shorten
from .tables import batch_table, describe_pace, describe_time, is_urgent, module_table, node_table, rank_table

MAX_MODULES, MIN_MODULES = 20, 4
MAX_NOTICES = 4
"""Lines of notices."""

MIN_DESYNCED = 4
"""Lines about desynced parameters that fit in however few rows."""

MIN_STALLED = 4
"""Lines about a stall that fit in however few rows."""

MIN_ROWS = 4
"""Rows of nodes or ranks that are shown however long the verdict is."""

STALE_AFTER = 5.0
"""Seconds without an update by the collector that are always normal."""

ROOM_FOR_CURVES = 14
"""Rows of a terminal that shows the curves, too."""

ROOM_FOR_CHARTS = 2 + LEAST_ROWS
"""Rows that modules and notices leave to the charts of the loss and the norm, with their names and the line above them."""

KEYS_GAP = " " * 3
"""Between two keys in the last line."""

INDENT = " " * 13
"""Indents the wrapped lines of a report's head."""

Block: TypeAlias = Line | TextTable


class Size(NamedTuple):
    width: int
    height: int


class Scene(NamedTuple):
    """A view, with its ranks in the order on the screen. ``now``: Unix seconds."""

    view: View
    ranks: list[RankLine]
    nodes: list[Node]
    now: float

    @classmethod
    def of(cls, view: View, now: float) -> Scene:
        ranks = ranks_of(view)
        return cls(view, ranks, nodes_of(ranks), now)

    def host(self, focus: Focus) -> str:
        """The node whose ranks are shown; empty when the nodes are."""
        if focus.rank is not None and focus.rank < len(self.ranks):
            return next(node.host for node in self.nodes if any(rank.row.rank == focus.rank for rank in node.ranks))
        return focus.host or (self.nodes[0].host if len(self.nodes) == 1 else "")

    def names(self, focus: Focus) -> list[Name]:
        """The names that the cursor can choose."""
        host = self.host(focus)
        if host:
            return [rank.row.rank for node in self.nodes if node.host == host for rank in node.ranks]
        return [node.host for node in self.nodes]

    def complaint(self, focus: Focus) -> str:
        """Why the focus cannot be shown; empty when it can."""
        if focus.rank is not None and focus.rank >= len(self.ranks):
            return f"there is no rank {focus.rank} in a run of {len(self.ranks)}"
        hosts = [node.host for node in self.nodes]
        if focus.host and focus.host not in hosts:
            return f"no rank is on node {focus.host}; its nodes: {', '.join(hosts[:8])}{' ...' * (len(hosts) > 8)}"
        return ""


def lay_out(scene: Scene, focus: Focus, size: Size, *, keys: bool) -> list[Block]:
    """The blocks to show, which fit the size. ``keys``: with a cursor, and a last line that explains the keys."""
    if focus.help is not None:
        return _help(scene, focus, size)
    head: list[Block] = [*_title(scene, focus), *_curve(scene, size, scene.view.recent), Line("")]
    foot: list[Block] = [Line(_keys(scene, focus, size.width), "dim")] if keys else []
    room = size.height - len(head) - len(foot)
    complaint = scene.complaint(focus)
    if complaint:
        body: list[Block] = [Line(complaint, "red")]
    elif focus.rank is not None:
        body = _rank(scene, focus.rank, Size(size.width, room))
    elif scene.view.is_decided:
        body = _decided(scene, focus, Size(size.width, room), keys=keys)
    else:
        body = _going_on(scene, focus, Size(size.width, room), keys=keys)
        if drawn := charts(scene.view.recent, size.width, room - sum(map(height, body)) - 1):
            head = [*_title(scene, focus), *_curve(scene, size, Recent(ends=scene.view.recent.ends)), Line("")]
            body += [Line(""), Line(drawn[0]), *[Line(line, "cyan") for line in drawn[1:]]]
    body = _clipped(body, room)
    body += [Line("")] * (room - sum(map(height, body))) if keys else []
    return [_fitted(block, size.width) for block in (*head, *body, *foot)]


def settled(scene: Scene, focus: Focus, size: Size) -> Focus:
    """The focus, with a help that has not been scrolled past its end."""
    if focus.help is None:
        return focus
    return focus._replace(help=min(focus.help, max(0, len(_help_lines(scene, focus, size)) - (size.height - 1))))


def height(block: Block) -> int:
    return 1 if isinstance(block, Line) else 1 + len(block.rows)


def describe_run(scene: Scene) -> str:
    """The run's progress, in one line."""
    view = scene.view
    batch = max((rank.batch for rank in scene.ranks), default=-1)
    where = f"batch {batch}" if batch >= 0 else "no batch yet"
    if view.is_over:
        return f"{view.report.outcome.value} after {_clock(view.last - view.began)}, {where}"
    still = [rank.standing.still for rank in scene.ranks if rank.standing and is_live(rank)]
    pace = describe_pace(None if view.report.stall else view.pace, still)
    since = _clock(scene.now - view.began)
    if view.is_decided:
        return f"{view.report.outcome.value}, its ranks are ending, after {since}, {where}"
    return f"running for {since}, {where}{', ' if pace else ''}{pace}"


def describe_silence(scene: Scene) -> str:
    """How long ago the collector was last heard; empty until three heartbeats, and at least STALE_AFTER, have passed."""
    view = scene.view
    silent = scene.now - (view.standings_at or view.last)
    heartbeat = view.standing.heartbeat if view.standing else 0.0
    if view.is_over or silent < max(STALE_AFTER, 3 * heartbeat):
        return ""
    return f"the collector was last heard {describe_time(silent)} ago"


def _help(scene: Scene, focus: Focus, size: Size) -> list[Block]:
    lines, room = _help_lines(scene, focus, size), size.height - 1
    begin = settled(scene, focus, size).help or 0
    shown = lines[begin : begin + room]
    more = f"   {begin + 1}-{begin + len(shown)} of {len(lines)}" if len(lines) > room else ""
    blocks: list[Block] = [*shown, *[Line("")] * (room - len(shown))]
    return [*blocks, Line(shorten(f"up, down: more   ?: back   q: quit{more}", size.width), "dim")]


def _help_lines(scene: Scene, focus: Focus, size: Size) -> list[Line]:
    """Explains the tables that the focus has on the screen."""
    view = scene.view
    if focus.rank is not None:
        return explained([batch_table(batches_of(focus.rank, view.digests, view.tables, size.height))], size.width)
    ranks = rank_table([]) if scene.host(focus) else node_table([], {})
    return explained([ranks, module_table(view.headroom, by_growth=focus.by_growth)], size.width)


def _curve(scene: Scene, size: Size, recent: Recent) -> list[Line]:
    """The loss and the pace in a line, while there is room and it is not known how the run ends."""
    if size.height < ROOM_FOR_CURVES or scene.view.is_decided:
        return []
    shown = curves(recent, size.width, is_stalled=scene.view.report.stall is not None)
    return [Line(shown, "cyan")] if shown else []


def _title(scene: Scene, focus: Focus) -> list[Line]:
    report = scene.view.report
    ranks, nodes = len(scene.ranks), len(scene.nodes)
    name = f"{report.run}: job {report.job}, restart {report.restart}, {ranks} rank{'s' * (ranks != 1)} on "
    lines = [Line(f"{name}{nodes} node{'s' * (nodes != 1)}", "bold"), Line(describe_run(scene))]
    silence = describe_silence(scene)
    lines += [Line(silence, "red")] if silence else []
    waiting = scene.view.standing.waiting if scene.view.standing and not scene.view.is_decided else ""
    lines += [Line(waiting, "yellow")] if waiting else []
    left_out = "" if scene.view.is_decided else how_it_went.left_out(report)
    lines += [Line(left_out, "yellow")] if left_out else []
    held_up = "" if scene.view.is_decided else report.held_up[1]
    lines += [Line(text, "yellow") for text in [held_up, *[one.text for one in report.doubts[:SHOWN]]] if text]
    differ = "" if scene.view.is_decided else collectives.summary(report)
    lines += [Line(differ, "red")] if differ else []
    lines += [] if scene.view.is_decided else [Line(describe_gap(gap, ranks), "yellow") for gap in report.gaps[:1]]
    states = describe_states(rank.state for rank in scene.ranks) + _equality(report)
    node = next((node for node in scene.nodes if node.host == scene.host(focus)), None) if nodes > 1 else None
    return [*lines, Line(f"{node.counts} on {node.host}; in all {states}" if node and focus.rank is None else states)]


def _equality(report: Report) -> str:
    compared = report.compared
    return (
        f"; replicas equal at step {compared.step}" if compared is not None and compared.equal and not report.desync else ""
    )


def _going_on(scene: Scene, focus: Focus, size: Size, *, keys: bool) -> list[Block]:
    """The blocks of a running run: desynced parameters, then ranks, then modules, then notices."""
    desynced = _desynced(scene.view, Size(size.width, max(MIN_DESYNCED, size.height // 5)))
    stalled = _stalled(scene.view, Size(size.width, max(MIN_STALLED, size.height // 3)))
    blocks: list[Block] = [*stalled, *desynced, Line("")] if stalled or desynced else []
    size = Size(size.width, size.height - len(blocks))
    found, notices = _modules(scene.view, focus), _notices(scene.view, size.width)
    room = min(MAX_NOTICES, size.height // 5, len(notices)) + 1 if notices else 0
    names = scene.names(focus)
    least = 2 + min(MIN_MODULES, len(found)) if found else 0
    rows = max(1, min(len(names), size.height - 1 - least - room))
    left = size.height - 1 - rows
    charted = ROOM_FOR_CHARTS if scene.view.recent.losses else 0  # the loss says more than the last of many modules
    modules = min(MAX_MODULES, len(found), max(left - room - 2 - charted, min(MIN_MODULES, left - room - 2))) if found else 0
    blocks.append(_crowd(scene, focus, rows, keys=keys))
    if modules > 0:
        blocks += [Line(""), module_table(found[:modules], by_growth=focus.by_growth)]
        left -= 2 + modules
    if notices and left > 1:
        blocks += [Line(""), *_cut(notices, max(room - 1, left - 1 - charted))]
    return blocks


def _decided(scene: Scene, focus: Focus, size: Size, *, keys: bool) -> list[Block]:
    """The blocks of a run with a verdict: the report's head, as many of the culprit's frames as fit, and ranks."""
    report = scene.view.report
    judged = how_it_went.judgement_of(report)
    style = "red" if report.outcome is not Outcome.FINISHED else "yellow" if judged and judged.healthy is False else "green"
    head = _wrapped(render_head(replace(report, notices=(), notices_unkept=0)).splitlines(), size.width)
    count = len(scene.names(focus))
    frames = format_dump(report.verdict.trip.frames).strip("\n").splitlines() if report.verdict else []
    rows = min(count, MIN_ROWS)
    shown = _cut([Line(text, style) if not at else Line(text) for at, text in enumerate(head)], size.height - 2 - rows)
    left = size.height - 2 - rows - len(shown)
    dump = [Line("")] + [Line("[...]")] * (left - 1 < len(frames)) if frames and left > 4 else []
    dump += [Line(text) for text in frames[-max(1, left - len(dump)) :]] if dump else []
    left -= len(dump)
    notices = _notices(scene.view, size.width)
    below = [Line(""), *_cut(notices, left - 1)] if notices and left > min(len(notices), MAX_NOTICES) else []
    rows += max(0, min(count - rows, left - len(below)))
    return [*shown, *below, *dump, Line(""), _crowd(scene, focus, rows, keys=keys)]


def _rank(scene: Scene, number: int, size: Size) -> list[Block]:
    """The blocks of one rank: its state, and its last batches."""
    view = scene.view
    rank = next(rank for rank in scene.ranks if rank.row.rank == number)
    row, standing = rank.row, rank.standing
    where = describe_rank(number, view.report.world_size, row.host or "not heard of", row.local_rank, row.stage)
    lines = [where + (f", process {row.pid}" if row.pid else "")]
    state = rank.state + (f", {rank.role}" if rank.role else "")
    position = f"batch {rank.batch}, {rank.lag} behind the furthest" if rank.batch >= 0 else "no batch yet"
    if standing is not None and is_live(rank):
        position += f", frame {standing.frame}, phase {standing.phase}" + (
            f", in eval {standing.eval}" * bool(standing.eval)
        )
        heard = f"heard {describe_time(standing.silent)} ago, moved {describe_time(standing.still)} ago"
        lines += [f"{state}: {position}", heard + (f"; {standing.quiet}" if standing.quiet else "")]
        memory = standing.leak or describe_sizes(standing.memory, standing.device_memory)
        lines += [memory] if memory else []
        lines += [f"{standing.queued} of its messages are not stored yet"] if standing.queued else []
    else:
        lines.append(f"{state}: {position}")
    dropped = max(row.dropped, standing.dropped if standing else 0)
    if dropped:
        lines.append(f"{dropped} of its batches were dropped: the collector was out of reach, or too slow, for too long")
    lines += [row.last_words] if row.farewell else []
    lines += [f"refused {row.rival}: this rank was there already"] if row.rival else []
    lines += [line for ranks, stack in stalls.stacks(view.report).items() if number in ranks for line in stack]
    apart = [one for one in view.report.desync if number in one.ranks]
    lines += [f"desync: {text}" for text in desync_lines(apart, view.report.world_size).values()]
    lines += [f"noticed: {text}" for text in noticed(view.report, only=number).values()]
    head = _cut([Line(text) for text in _wrapped(lines, size.width)], size.height - MIN_ROWS)
    batches = batches_of(number, view.digests, view.tables, size.height - len(head) - 2)
    return [*head, Line(""), batch_table(batches)] if batches else [*head]


def _crowd(scene: Scene, focus: Focus, rows: int, *, keys: bool) -> TextTable:
    """The table of nodes, or of one node's ranks: ``rows`` of them, with the chosen one."""
    host = scene.host(focus)
    names = scene.names(focus)
    at = window(focus.cursor(names), len(names), rows)
    if host:
        ranks = next(node.ranks for node in scene.nodes if node.host == host)
        table = rank_table(ranks[at.start : at.stop])
    else:
        table = node_table(scene.nodes[at.start : at.stop], short_names([node.host for node in scene.nodes]))
    if len(at) < len(names):
        counted = table.columns[0]._replace(name=f"{table.columns[0].name} {at.start + 1}-{at.stop}/{len(names)}")
        table = table._replace(columns=(counted, *table.columns[1:]))
    return _with_cursor(table, focus.cursor(names) - at.start) if keys else table


def _with_cursor(table: TextTable, index: int) -> TextTable:
    rows = [
        TableRow((("> " if at == index else "  ") + row.cells[0], *row.cells[1:]), row.style + " reverse" * (at == index))
        for at, row in enumerate(table.rows)
    ]
    first = table.columns[0]
    return TextTable((first._replace(name=f"  {first.name}"), *table.columns[1:]), rows)


def _modules(view: View, focus: Focus) -> Sequence[Headroom]:
    """Those to look at: where the dtype ends too far away, only what has changed much, unless growth is asked for."""
    if focus.by_growth:
        return sorted(view.headroom, key=lambda one: -(one.growth or 0.0))
    return [one for one in view.headroom if one.is_narrow or is_urgent(one) or not view.recent.losses]


def _notices(view: View, width: int) -> list[Line]:
    texts = [f"noticed: {text}" for text in noticed(view.report).values()]
    return [Line(text, "yellow") for text in _wrapped(texts, width)]


def _desynced(view: View, size: Size) -> list[Line]:
    """A line for each origin; they are wrapped if all of them fit."""
    texts = [f"desync: {text}" for text in desync_lines(view.report.desync, view.report.world_size).values()]
    wrapped = _wrapped(texts, size.width)
    return _cut([Line(text, "red") for text in (wrapped if len(wrapped) <= size.height else texts)], size.height)


def _stalled(view: View, size: Size) -> list[Line]:
    """The stall, and what its ranks are in; in few rows in short. The stacks are in the view of a rank."""
    stall = view.report.stall
    if stall is None:
        return []
    who, waiting = (
        name_spans(ranks) if len(ranks) == count else f"{count} ranks"
        for ranks, count in ((stall.ranks, stall.count), (stall.waiting, stall.count_waiting))
    )
    short = f"{who} stalled" + (f"; {waiting} wait{'s' * (stall.count_waiting == 1)}" if stall.waiting else "")
    found = [stack[0] for stack in stalls.stacks(view.report).values()]
    for text, lines in (
        (_wrapped([stall.text], size.width), _wrapped(found, size.width)),
        ([short], _wrapped(found, size.width)),
        ([short], found),
    ):
        if len(text) + len(lines) <= size.height:
            break
    return [*[Line(line, "red") for line in text], *_cut([Line(line, "yellow") for line in lines], size.height - len(text))]


def _keys(scene: Scene, focus: Focus, width: int) -> str:
    """What the keys do; where it is too long, without the first ones: ``?`` explains all of them."""
    if focus.rank is not None:
        keys = ["n, p: next and previous rank", "b: back"]
    else:
        host, order = scene.host(focus), "g: by headroom" if focus.by_growth else "g: by growth"
        back = ["b: nodes"] if host and len(scene.nodes) > 1 else []
        keys = ["up, down: choose", f"enter: {'the rank' if host else 'its ranks'}", *back, order]
    keys += ["?: help", "q: quit"]
    lines = (KEYS_GAP.join(keys[begin:]) for begin in range(len(keys)))
    return next((line for line in lines if len(line) <= width), "")


def _wrapped(lines: Iterable[str], width: int) -> list[str]:
    """The lines, wrapped; continuation lines are indented as in a report."""
    wrapped = (textwrap.wrap(one_line(line), width, subsequent_indent=INDENT) or [""] for line in lines)
    return list(chain.from_iterable(wrapped))


def _cut(lines: Sequence[Line], most: int) -> list[Line]:
    if len(lines) <= most:
        return list(lines)
    return [*lines[: max(0, most - 1)], Line("[...]")][: max(0, most)]


def _clipped(blocks: Iterable[Block], most: int) -> list[Block]:
    """The first blocks that fit in ``most`` rows; a table may lose its last rows."""
    shown: list[Block] = []
    for block in blocks:
        left = most - sum(map(height, shown))
        if left >= height(block):
            shown.append(block)
        elif left > 1 and isinstance(block, TextTable):
            shown.append(block._replace(rows=block.rows[: left - 1]))
    return shown


def _fitted(block: Block, width: int) -> Block:
    return block.fitted(width) if isinstance(block, TextTable) else Line(shorten(block.text, width), block.style)


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=max(0, int(seconds))))
