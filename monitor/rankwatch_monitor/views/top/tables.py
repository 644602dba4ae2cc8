"""The tables of ``rankwatch top``: nodes, ranks, modules, and the batches of a rank. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rankwatch.shared.types.frame import NARROW_DTYPES, Phase, State
from rankwatch.shared.words.text import PHASE_WORDS, format_spans

from ...record.numbers.headroom import Headroom, RankBatch
from .ranks import STILL_AFTER, Node, RankLine, is_live
from .table import Column, TableRow, TextTable

NEAR = 8.0
"""A reading with a smaller headroom than this factor is drawn in yellow. Agents send a notice there as well."""

STRANGE = 5.0
"""So is a reading that has more than so many doublings above its median, where the headroom says nothing."""

_STYLES = {"lost": "red", "failed": "red", "silent": "yellow", "still": "yellow", "missing": "yellow", "aborted": "magenta"}


def node_table(nodes: Sequence[Node], names: Mapping[str, str]) -> TextTable:
    """``names``: the short name of each host."""
    columns = (
        Column("node", means="its host, without the domain if all have the same; those in trouble come first"),
        Column("ranks", 9, 12, right=False, means="its ranks"),
        Column("state", 12, 27, right=False, means="how many of its ranks are in which state"),
        Column("batch", 7, 10, means="the batch of its slowest rank"),
        Column("lag", 4, 8, means="how many batches that is behind the furthest rank of the run"),
        Column(
            "phase", 9, 9, right=False, means="what its slowest rank does: forward, backward, optimizer, or idle between"
        ),
        Column("still", 6, 6, means="the longest time in which one of its ranks made no progress"),
    )
    return TextTable(columns, [_node_row(node, names[node.host]) for node in nodes])


def rank_table(ranks: Sequence[RankLine]) -> TextTable:
    columns: tuple[Column, ...] = (
        Column("rank", means="its number; those in trouble come first"),
        Column("state", 8, 8, right=False, means="how it is"),
        Column("batch", 8, 10, means="the batch that it is in, or was in last"),
        Column("lag", 5, 8, means="how many batches that is behind the furthest rank"),
        Column("loss", 6, 9, means="its last loss"),
        Column(
            "frame", 6, 7, means="how many modules it has called in this batch; eval 2: it is in its second evaluation since"
        ),
        Column("phase", 9, 9, right=False, means="what it does: forward, backward, optimizer, or idle between"),
        Column("heard", 6, 6, means="time since its last sign of life; it sends one each second, or as --heartbeat says"),
        Column("moved", 6, 6, means="time since it made progress"),
        Column("queue", 5, 6, means="its messages that are not in the record yet"),
        Column("drops", 5, 7, means="its batches that were lost to the record: the collector was out of reach for too long"),
    )
    rows = [_rank_row(rank) for rank in ranks]
    if rows:  # without those of which all cells are empty: the others need the room
        kept = [at for at in range(len(columns)) if any(row.cells[at] for row in rows)]
        columns = tuple(columns[at] for at in kept)
        rows = [row._replace(cells=tuple(row.cells[at] for at in kept)) for row in rows]
    if any(rank.role for rank in ranks):
        role = Column("role", 7, 30, right=False, means="what it has to do with how the run ended; the culprit comes first")
        columns = columns[0], role, *columns[1:]
        rows = [TableRow((cells[0], rank.role, *cells[1:]), style) for rank, (cells, style) in zip(ranks, rows, strict=True)]
    return TextTable(columns, rows)


HEADROOM = (
    "x12: it could be 12 times as large before its dtype ends; inf or nan: it has ended; +3.2: doublings above what is usual, "
    "where the dtype ends too far away"
)
CHANGE = "+3.2: 3.2 doublings above the median of its last 8 batches; 0: as usual"


def module_table(found: Sequence[Headroom], *, by_growth: bool) -> TextTable:
    has_room = any(one.is_narrow for one in found)
    title = "fastest growing" if by_growth else "nearest to overflow" if has_room else "changed most"
    columns = (
        Column(title, means="the module, in its newest batch over all ranks; the most urgent come first"),
        Column("reading", 9, 14, right=False, means="which of its tensors: output, weight, ..."),
        Column("abs max", 8, 8, means="the largest absolute value in it"),
        Column("dtype", 8, 15, right=False, means="its number format"),
        Column("headroom", 8, 9, means=HEADROOM) if has_room else Column("change", 8, 9, means=CHANGE),
        Column("a batch", 7, 8, means="the factor by which it grows from batch to batch, over the last 16"),
        Column("rank", 5, 6, means="the rank that has it"),
    )
    return TextTable(columns, [_module_row(one) for one in found])


def batch_table(batches: Sequence[RankBatch]) -> TextTable:
    has_room = any(one.dtype in NARROW_DTYPES for one in batches)
    title = "nearest to overflow in its last batches" if has_room else "largest in its last batches"
    columns = (
        Column(
            title,
            means="the module and its reading, or the first one that is inf or nan; a backward has its own line",
        ),
        Column("headroom", 8, 9, means=HEADROOM) if has_room else Column("change", 8, 9, means=CHANGE),
        Column("inf/nan", 7, 7, means="how many readings are inf or nan"),
        Column("batch", 7, 10, means="the batch, the newest first"),
        Column("step", 7, 10, means="how many optimizer steps came before it"),
        Column("took", 7, 7, means="how long it took"),
    )
    return TextTable(columns, [_batch_row(one) for one in batches])


def describe_time(seconds: float) -> str:
    """``0.2 s``, ``45 s``, ``12 min`` or ``30 h``: six characters at most, for a year."""
    if seconds < 99.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5970 else f"{seconds / 3600:.0f} h"


def describe_pace(pace: float | None, still: Sequence[float]) -> str:
    """``8.2 batches/s``, or ``no progress for 12 s``; empty before the first batches.

    Args:
        pace: None before the first batches, and while the run stalls: it would be that of the batches before.
        still: for each running rank, seconds since it made progress.
    """
    if still and min(still) > STILL_AFTER:
        return f"no progress for {describe_time(min(still))}"
    return f"{pace:.3g} batches/s" if pace is not None else ""


def describe_times(times: float, state: State = State.FINITE) -> str:
    """``x12``: a reading could be 12 times as large. For 0 the state, such as ``inf``."""
    return (f"x{times:.3g}" if times < 1e6 else f"x{times:.0e}") if times > 0 else state.name.lower()


def describe_change(change: float | None) -> str:
    """``+3.2``: doublings above what is usual. Empty while that is not known."""
    return "" if change is None else f"{change:+.1f}"


def describe_nearness(one: Headroom | RankBatch, state: State = State.FINITE) -> str:
    """The headroom, or where a dtype's end is too far away to say something, the change."""
    if one.times <= 0 or one.dtype in NARROW_DTYPES:
        return describe_times(one.times, state)
    return describe_change(one.change)


def describe_most_urgent(one: Headroom) -> str:
    """``nearest to overflow blocks.3.ffn output x12``, or ``changed most blocks.3.ffn output +3.2``."""
    how = "nearest to overflow" if one.times <= 0 or one.is_narrow else "changed most"
    return f"{how} {describe_reading(one)} {one.label} {describe_nearness(one, one.state)}".rstrip()


def describe_reading(one: Headroom) -> str:
    """The module's name, as in tables and lines."""
    return (one.module or "(root)") + (f" ({PHASE_WORDS[one.phase]})" if one.phase is not Phase.FORWARD else "")


def _node_row(node: Node, name: str) -> TableRow:
    slowest, worst = node.slowest, node.ranks[0]
    spans = format_spans([rank.row.rank for rank in node.ranks], most=2)
    phase = slowest.standing.phase if slowest.standing and is_live(slowest) else ""
    still = describe_time(node.still) if node.still >= 1 else ""
    cells = name, spans, node.counts, _batch(slowest), str(slowest.lag), phase, still
    return TableRow(cells, _style(worst))


def _rank_row(rank: RankLine) -> TableRow:
    cells = str(rank.row.rank), rank.state, _batch(rank), str(rank.lag), "" if rank.loss is None else f"{rank.loss:.3g}"
    standing = rank.standing
    if standing is None:
        return TableRow((*cells, *[""] * 6), _style(rank))
    frame = f"eval {standing.eval}" if standing.eval else str(standing.frame)
    now = describe_time(standing.silent), describe_time(standing.still), str(standing.queued or "")
    return TableRow(
        (*cells, frame, standing.phase, *(now if is_live(rank) else ("", "", "")), str(standing.dropped or "")),
        _style(rank),
    )


def _module_row(one: Headroom) -> TableRow:
    growth = f"x{one.growth:.3f}" if one.growth is not None and one.growth < 1000 else ""
    high = f"{one.high:.2e}" if one.high >= 0 else ""
    style = "red" if one.times <= 0 else "yellow" if is_urgent(one) else ""
    cells = describe_reading(one), one.label, high, one.dtype, describe_nearness(one, one.state), growth, str(one.rank)
    return TableRow(cells, style)


def _batch_row(one: RankBatch) -> TableRow:
    where = f"{one.module or '(root)'} {one.label}"
    took = f"{one.seconds * 1000:.0f} ms" if one.seconds < 0.9995 else describe_time(one.seconds)
    cells = where, describe_nearness(one), str(one.bad or ""), str(one.batch), str(one.step), took
    return TableRow(cells, "red" if one.bad else "yellow" if is_urgent(one) else "")


def is_urgent(one: Headroom | RankBatch) -> bool:
    """Whether a reading is to be looked at, even where the headroom says nothing."""
    return one.times < NEAR if one.dtype in NARROW_DTYPES else (one.change or 0.0) > STRANGE


def _style(rank: RankLine) -> str:
    leaks = "yellow" if rank.standing is not None and rank.standing.leak and is_live(rank) else ""
    return "red" if rank.is_cause else _STYLES.get(rank.state, "") or leaks


def _batch(rank: RankLine) -> str:
    return str(rank.batch) if rank.batch >= 0 else "-"
