"""The doctor's report as text and as JSON. Pure."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable

from .compare import VERSIONS
from .finding import SEVERITY, Finding, State
from .report import Report, Told
from .words import describe_bandwidth, name_ranks

LONGEST_LIST = 16
"""Pairs that are listed; with more, the slowest."""


def render(report: Report) -> str:
    """The text: a line for each rank, the versions, the table, the pairs, and what to try."""
    parts = [
        "\n".join(_rank_line(report, rank) for rank in sorted(report.places)),
        ", ".join(f"{name} {report.versions[name]}" for name in VERSIONS if name in report.versions),
        "",
        "\n".join(_table(report)),
        *_pairs(report),
        *_remedies(report),
        "",
        _summary(report),
    ]
    return "\n".join(parts) + "\n"


def to_json(report: Report) -> str:
    units = report.units
    body = {
        "ok": report.is_well,
        "seconds": round(report.seconds, 3),
        "backend": report.backend,
        "world_size": report.world_size,
        "versions": report.versions,
        "ranks": [
            {
                "rank": rank,
                "local_rank": place.local_rank,
                "host": place.host,
                "node": place.node,
                "pid": place.pid,
                "ok": not report.failures(rank),
            }
            for rank, place in sorted(report.places.items())
        ],
        "missing": report.missing,
        "checks": [{**one.finding.to_json(), "ranks": list(one.ranks)} for one in _merged(report.told)],
        "pairs": [
            {
                "round": met.round,
                "left": units[met.left].name,
                "right": units[met.right].name,
                "ranks": [units[met.left].leader, units[met.right].leader],
                "ok": met.bandwidth is not None,
                "found": met.found,
                "round_trip_seconds": met.round_trip,
                "bytes_per_second": met.bandwidth,
            }
            for met in report.meetings
        ],
        "to_blame": {
            "units": [units[unit].name for unit in report.blame.units],
            "pairs": [[units[unit].name for unit in pair] for pair in report.blame.pairs],
            "unclear_pairs": [[units[unit].name for unit in pair] for pair in report.blame.unclear],
        },
    }
    return json.dumps(body, indent=2) + "\n"


def _rank_line(report: Report, rank: int) -> str:
    place = report.places[rank]
    of = f"(global rank: {rank}/{report.world_size})"
    failures = report.failures(rank)
    if failures:
        return f"{place.tag} is broken {of}: {failures[0].check}"
    if not report.took_part(rank):
        return f"{place.tag} is here, and took part in no collective {of}"
    return f"{place.tag} is OK {of}"


def _table(report: Report) -> list[str]:
    header = ("check", "state", "who", "found")
    told = _merged(report.told)
    rows = [header, *((one.finding.check, one.finding.state.value, _who(report, one), one.finding.found) for one in told)]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return ["  ".join([*(cell.ljust(width) for cell, width in zip(row[:3], widths, strict=True)), row[3]]) for row in rows]


def _who(report: Report, told: Told) -> str:
    if not told.ranks:
        return ""
    if len(told.ranks) > 1 and len(told.ranks) == len(report.places):
        return f"all {len(told.ranks)}" if not report.missing else name_ranks(told.ranks)
    place = report.places.get(told.ranks[0])
    return name_ranks(told.ranks) + (f" ({place.host})" if len(told.ranks) == 1 and place else "")


def _merged(told: Iterable[Told]) -> list[Told]:
    """Check by check, in the order in which they were made; of what went well on many ranks, what the first of them found."""
    by_check: dict[str, list[Told]] = defaultdict(list)
    for one in told:
        by_check[one.finding.check].append(one)
    merged = []
    for of_check in by_check.values():
        groups: dict[tuple[State, str], list[Told]] = defaultdict(list)
        for one in of_check:
            state = one.finding.state
            groups[state, "" if state is State.OK and one.finding.check != "nccl log" else one.finding.found].append(one)
        for (state, _), alike in sorted(groups.items(), key=lambda item: -SEVERITY[item[0][0]]):
            ranks = tuple(sorted({rank for one in alike for rank in one.ranks}))
            first = alike[0].finding
            merged.append(Told(ranks, Finding(first.check, state, first.found, first.advice, first.figures)))
    return merged


def _pairs(report: Report) -> list[str]:
    """The slowest pairs; those that failed stand in the table."""
    met = sorted((met for met in report.meetings if met.bandwidth), key=lambda met: met.bandwidth or 0.0)
    if not met:
        return []
    more = f" (the slowest {LONGEST_LIST} of {len(met)})" if len(met) > LONGEST_LIST else ""
    names = [f"{report.units[one.left].name} - {report.units[one.right].name}" for one in met[:LONGEST_LIST]]
    width = max(map(len, names))
    lines = [
        f"  {name.ljust(width)}  {1e3 * (one.round_trip or 0):8.2f} ms  {describe_bandwidth(one.bandwidth or 0):>12}"
        for name, one in zip(names, met, strict=False)
    ]
    return ["", f"pairs, round trip and bandwidth{more}", *lines]


def _remedies(report: Report) -> list[str]:
    """What to try, worst first; the same advice once for all that it is good for."""
    advised: dict[str, list[str]] = defaultdict(list)
    for one in sorted(_merged(report.told), key=lambda one: -SEVERITY[one.finding.state]):
        finding = one.finding
        if finding.advice and finding.state in (State.FAIL, State.WARN):
            of = f"{_who(report, one)}: " if len(one.ranks) == 1 and finding.check != "pairs" else ""
            advised[finding.advice].append(f"{finding.state.value.upper()}  {finding.check}: {of}{finding.found}")
    lines = [line for advice, findings in advised.items() for line in (*findings, f"      try: {advice}")]
    return ["", *lines] if lines else []


def _summary(report: Report) -> str:
    merged = [one.finding.state for one in _merged(report.told)]
    nodes = len({place.node for place in report.places.values()})
    tried = f"{len(report.places)} of {report.world_size} ranks" if report.missing else _count(report.world_size, "rank")
    kinds = ((State.FAIL, "failure"), (State.WARN, "warning"))
    counts = [_count(merged.count(state), name) for state, name in kinds if state in merged]
    verdict = ", ".join(counts) or "all is well"
    return f"rankwatch doctor: {verdict}; {tried} on {_count(nodes, 'node')}, {report.backend}, {report.seconds:.1f} s"


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'' if number == 1 else 's'}"
