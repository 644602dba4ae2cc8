"""The results of all checks, and who is to blame for the failures. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from ..shared.words.text import name_spans
from .checks.pairs import Blame, Pair, blame, slow_pairs
from .placement import Placement
from .result import CheckResult, CheckState, fail, ok, skip, warn
from .time_limit import NO_ANSWER
from .wording import count, describe_bandwidth

MOST_HOSTS = 16
"""Hosts that a result lists."""


class Unit(NamedTuple):
    """One side of a pair: a node, for which its first rank stands, or a rank where all ranks are on one node."""

    name: str
    leader: int
    ranks: tuple[int, ...]


class ReportRow(NamedTuple):
    """A check's result, and the ranks for which it holds."""

    ranks: tuple[int, ...]
    result: CheckResult


class PairResult(NamedTuple):
    """The test of a pair of units. Where it passed, ``result`` has the figures ``round_trip`` and ``bandwidth``."""

    round: int
    pair: Pair
    result: CheckResult


@dataclass
class DoctorReport:
    """``placements``: the ranks that arrived; ``missing``: those that did not."""

    world_size: int
    backend: str
    placements: dict[int, Placement] = field(default_factory=dict)
    rows: list[ReportRow] = field(default_factory=list)
    pair_results: list[PairResult] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def add(self, ranks: Iterable[int], *results: CheckResult) -> None:
        self.rows += [ReportRow(tuple(ranks), result) for result in results]

    @property
    def missing(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank not in self.placements]

    @cached_property
    def nodes(self) -> dict[str, list[int]]:
        """The ranks of each node, once all have arrived that will."""
        nodes: dict[str, list[int]] = defaultdict(list)
        for rank, placement in sorted(self.placements.items()):
            nodes[placement.node].append(rank)
        return nodes

    @cached_property
    def units(self) -> list[Unit]:
        """The nodes, or the ranks where there is only one node."""
        if len(self.nodes) == 1:
            return [Unit(f"rank {rank}", rank, (rank,)) for rank in sorted(self.placements)]
        hosts = [self.placements[ranks[0]].host for ranks in self.nodes.values()]
        return [
            Unit(host if hosts.count(host) == 1 else f"node {node} ({host})", ranks[0], tuple(ranks))
            for host, (node, ranks) in zip(hosts, self.nodes.items(), strict=True)
        ]

    @property
    def outcomes(self) -> dict[Pair, bool]:
        """Whether each pair passed that was tested."""
        return {one.pair: one.result.state is not CheckState.FAIL for one in self.pair_results}

    @property
    def blame(self) -> Blame:
        return blame(self.outcomes)

    @property
    def failed(self) -> list[CheckResult]:
        return [row.result for row in self.rows if row.result.state is CheckState.FAIL]

    def failures(self, rank: int) -> list[CheckResult]:
        """The failed checks of a rank; timeouts come last, because another rank may have caused them."""
        failed = [row.result for row in self.rows if rank in row.ranks and row.result.state is CheckState.FAIL]
        return sorted(failed, key=lambda result: result.found.startswith(NO_ANSWER))

    def took_part(self, rank: int) -> bool:
        passed = (row for row in self.rows if (row.result.check, row.result.state) == ("all_reduce", CheckState.OK))
        return any(rank in row.ranks for row in passed)


def judge_attendance(report: DoctorReport, hosts: list[str], where: str, seconds: float) -> CheckResult:
    """The result of the rendezvous. ``hosts``: the job's hosts, where they are known."""
    missing = report.missing
    if not missing:
        return ok("rendezvous", f"{count(report.world_size, 'rank')} at {where}", seconds=seconds)
    by_host: dict[str, list[int]] = defaultdict(list)
    for rank, placement in report.placements.items():
        by_host[placement.host].append(rank)
    came = ", ".join(f"{host} ({name_spans(ranks, most=None)})" for host, ranks in list(by_host.items())[:MOST_HOSTS])
    absent = [host for host in hosts if host not in {host.partition(".")[0] for host in by_host}]
    of_host = f"; nobody from {', '.join(absent)}" if absent else ""
    return fail(
        "rendezvous",
        f"{name_spans(missing, most=None)} of {report.world_size} did not come to {where} within {seconds:g} s{of_host}; "
        f"here are {came}",
        "look at their own output: did they start, can their host resolve and reach that address? "
        "If they are only slow to start, raise --timeout",
    )


def judge_pairs(report: DoctorReport) -> None:
    """Adds who is to blame for the pairs that failed, and the pairs that are slow."""
    units = report.units
    if len(units) < 2:
        report.add(report.placements, skip("pairs", "a single rank: nobody to meet"))
        return
    why = {one.pair: one.result.found for one in report.pair_results}
    for unit in report.blame.units:
        failed = [pair for pair in why if unit in pair]
        partners = " and ".join(units[left if right == unit else right].name for left, right in failed)
        found = f"{units[unit].name} speaks with none it met, {partners}: {why[failed[0]]}"
        on_it = _interface_advice(report, units[unit].ranks) or _PORTS
        report.add(units[unit].ranks, fail("pairs", found, f"start without {units[unit].name} meanwhile; on it: {on_it}"))
    _judge_failed_pairs(report, why)
    _judge_bandwidth(report)


def _judge_failed_pairs(report: DoctorReport, why: Mapping[Pair, str]) -> None:
    units, blamed = report.units, report.blame
    if len(blamed.unclear) > 1 and not any(report.outcomes.values()):
        everybody = [unit.leader for unit in units]
        found = f"none of {len(blamed.unclear)} pairs speak with each other: {why[blamed.unclear[0]]}"
        report.add(everybody, fail("pairs", found, _interface_advice(report, everybody) or _PORTS))
        return
    between = "look for a firewall rule, a route or a cable between just these two"
    for pair, how, advice in (
        *((pair, "; both do with others", between) for pair in blamed.pairs),
        *((pair, "; no test shows which of them it is", _PORTS) for pair in blamed.unclear),
    ):
        left, right = (units[unit] for unit in pair)
        found = f"{left.name} and {right.name} do not speak with each other{how}: {why[pair]}"
        leaders = left.leader, right.leader
        report.add(leaders, fail("pairs", found, _interface_advice(report, leaders) or advice))


def _interface_advice(report: DoctorReport, ranks: Iterable[int]) -> str:
    """The advice on the network interface of these ranks: a wrong interface explains why they cannot be reached."""
    of_interface = [row.result for row in report.rows if row.result.check == "interface" and set(row.ranks) & set(ranks)]
    return next((result.advice for result in of_interface if result.advice), "")


_PORTS = (
    "open all TCP ports between the nodes, not the master's alone; set GLOO_SOCKET_IFNAME / NCCL_SOCKET_IFNAME to an "
    "interface that reaches the others"
)


def _judge_bandwidth(report: DoctorReport) -> None:
    measured = {one.pair: one.result.figures for one in report.pair_results if one.result.figures}
    if not measured:
        return
    bandwidth = {pair: figures["bandwidth"] for pair, figures in measured.items()}
    for pair in slow_pairs(bandwidth):
        left, right = (report.units[unit] for unit in pair)
        found = f"{left.name} and {right.name} are slow: {describe_bandwidth(bandwidth[pair])}, the others' median is "
        others = sorted(value for other, value in bandwidth.items() if other != pair)
        found += describe_bandwidth(others[len(others) // 2])
        advice = "ethtool (speed, errors) on both; is it the interface you meant? other traffic on it?"
        report.add((left.leader, right.leader), warn("pairs", found, advice))
    trip = 1e3 * max(figures["round_trip"] for figures in measured.values())
    slowest = describe_bandwidth(min(bandwidth.values()))
    found = f"{count(len(measured), 'pair')} well: round trip at most {trip:.2f} ms, bandwidth at least {slowest}"
    spoke = sorted({report.units[unit].leader for pair in measured for unit in pair})
    report.add(spoke, ok("pairs", found))
