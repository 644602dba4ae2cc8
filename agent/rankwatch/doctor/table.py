"""The doctor's report as text and as JSON. Pure."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable

from ..shared.words.text import name_spans
from .checks.compare import VERSIONS
from .report import DoctorReport, ReportRow
from .result import SEVERITY, CheckResult, CheckState
from .wording import count, describe_bandwidth

LONGEST_LIST = 16
"""Pairs that are listed; of more pairs, the slowest."""


def render(report: DoctorReport) -> str:
    """As text: a line for each rank, the versions, the table, the pairs, and what to try."""
    parts = [
        "\n".join(_rank_line(report, rank) for rank in sorted(report.placements)),
        ", ".join(f"{name} {report.versions[name]}" for name in VERSIONS if name in report.versions),
        "",
        "\n".join(_table(report)),
        *_pairs(report),
        *_remedies(report),
        "",
        _summary(report),
    ]
    return "\n".join(parts) + "\n"


def to_json(report: DoctorReport) -> str:
    units, blamed = report.units, report.blame
    body = {
        "ok": not report.failed,
        "seconds": round(report.seconds, 3),
        "backend": report.backend,
        "world_size": report.world_size,
        "versions": report.versions,
        "ranks": [
            {
                "rank": rank,
                "local_rank": placement.local_rank,
                "host": placement.host,
                "node": placement.node,
                "pid": placement.pid,
                "ok": not report.failures(rank),
            }
            for rank, placement in sorted(report.placements.items())
        ],
        "missing": report.missing,
        "checks": [{**row.result.to_json(), "ranks": list(row.ranks)} for row in _merged(report.rows)],
        "pairs": [
            {
                "round": number,
                "left": units[pair[0]].name,
                "right": units[pair[1]].name,
                "ranks": [units[unit].leader for unit in pair],
                "ok": result.state is not CheckState.FAIL,
                "found": result.found,
                "round_trip_seconds": result.figures.get("round_trip"),
                "bytes_per_second": result.figures.get("bandwidth"),
            }
            for number, pair, result in report.pair_results
        ],
        "to_blame": {
            "units": [units[unit].name for unit in blamed.units],
            "pairs": [[units[unit].name for unit in pair] for pair in blamed.pairs],
            "unclear_pairs": [[units[unit].name for unit in pair] for pair in blamed.unclear],
        },
    }
    return json.dumps(body, indent=2) + "\n"


def _rank_line(report: DoctorReport, rank: int) -> str:
    placement = report.placements[rank]
    of = f"(global rank: {rank}/{report.world_size})"
    failures = report.failures(rank)
    if failures:
        return f"{placement.tag} is broken {of}: {failures[0].check}"
    if not report.took_part(rank):
        return f"{placement.tag} is here, and took part in no collective {of}"
    return f"{placement.tag} is OK {of}"


def _table(report: DoctorReport) -> list[str]:
    header = ("check", "state", "who", "found")
    cells = ((row.result.check, row.result.state.value, _who(report, row), row.result.found) for row in _merged(report.rows))
    rows = [header, *cells]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return ["  ".join([*(cell.ljust(width) for cell, width in zip(row[:3], widths, strict=True)), row[3]]) for row in rows]


def _who(report: DoctorReport, row: ReportRow) -> str:
    if not row.ranks:
        return ""
    if len(row.ranks) > 1 and len(row.ranks) == len(report.placements):
        return f"all {len(row.ranks)}" if not report.missing else name_spans(row.ranks, most=None)
    placement = report.placements.get(row.ranks[0])
    return name_spans(row.ranks, most=None) + (f" ({placement.host})" if len(row.ranks) == 1 and placement else "")


def _merged(rows: Iterable[ReportRow]) -> list[ReportRow]:
    """Groups rows by check, in the order of the checks. Ranks with the same result share a row.

    So do all ranks where a check went well: their row has what the first of them found.
    """
    by_check: dict[str, list[ReportRow]] = defaultdict(list)
    for row in rows:
        by_check[row.result.check].append(row)
    merged = []
    for of_check in by_check.values():
        groups: dict[tuple[CheckState, str], list[ReportRow]] = defaultdict(list)
        for row in of_check:
            is_shared = row.result.state is CheckState.OK and row.result.check != "nccl log"
            groups[row.result.state, "" if is_shared else row.result.found].append(row)
        for (state, _), alike in sorted(groups.items(), key=lambda item: -SEVERITY[item[0][0]]):
            ranks = tuple(sorted({rank for row in alike for rank in row.ranks}))
            first = alike[0].result
            merged.append(ReportRow(ranks, CheckResult(first.check, state, first.found, first.advice, first.figures)))
    return merged


def _pairs(report: DoctorReport) -> list[str]:
    """The slowest pairs. Pairs that failed are in the table."""
    measured = [(one.pair, one.result.figures) for one in report.pair_results if one.result.figures]
    if not measured:
        return []
    measured.sort(key=lambda one: one[1]["bandwidth"])
    more = f" (the slowest {LONGEST_LIST} of {len(measured)})" if len(measured) > LONGEST_LIST else ""
    shown = [(" - ".join(report.units[unit].name for unit in pair), figures) for pair, figures in measured[:LONGEST_LIST]]
    width = max(len(name) for name, _ in shown)
    lines = [
        f"  {name.ljust(width)}  {1e3 * figures['round_trip']:8.2f} ms  {describe_bandwidth(figures['bandwidth']):>12}"
        for name, figures in shown
    ]
    return ["", f"pairs, round trip and bandwidth{more}", *lines]


def _remedies(report: DoctorReport) -> list[str]:
    """What to try, failures first. Results with the same advice are listed over it together."""
    advised: dict[str, list[str]] = defaultdict(list)
    for row in sorted(_merged(report.rows), key=lambda row: -SEVERITY[row.result.state]):
        result = row.result
        if result.advice and result.state in (CheckState.FAIL, CheckState.WARN):
            of = f"{_who(report, row)}: " if len(row.ranks) == 1 and result.check != "pairs" else ""
            advised[result.advice].append(f"{result.state.value.upper()}  {result.check}: {of}{result.found}")
    lines = [line for advice, results in advised.items() for line in (*results, f"      try: {advice}")]
    return ["", *lines] if lines else []


def _summary(report: DoctorReport) -> str:
    states = [row.result.state for row in _merged(report.rows)]
    tried = f"{len(report.placements)} of {report.world_size} ranks" if report.missing else count(report.world_size, "rank")
    kinds = ((CheckState.FAIL, "failure"), (CheckState.WARN, "warning"))
    counts = [count(states.count(state), name) for state, name in kinds if state in states]
    verdict = ", ".join(counts) or "all is well"
    return f"rankwatch doctor: {verdict}; {tried} on {count(len(report.nodes), 'node')}, {report.backend}, {report.seconds:.1f} s"
