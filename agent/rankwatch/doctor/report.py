"""The results of all checks, and who is to blame for the failures. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ..shared.words.text import name_spans
from .bandwidth import describe_bandwidth
from .checks.pairs import Blame, Pair, slow_pairs
from .placement import Placement
from .result import CheckResult, CheckState, fail, ok, skip, warn
from .time_limit import NO_ANSWER

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


@dataclass(frozen=True, slots=True)
class PairResult:
    """The test of a pair. ``left`` and ``right`` are units. The figures are None where it failed."""

    round: int
    left: int
    right: int
    found: str
    round_trip: float | None
    bandwidth: float | None


@dataclass
class DoctorReport:
    """``placements``: the ranks that arrived. ``missing``: the ranks that did not."""

    world_size: int
    backend: str
    placements: dict[int, Placement] = field(default_factory=dict)
    missing: list[int] = field(default_factory=list)
    units: list[Unit] = field(default_factory=list)
    rows: list[ReportRow] = field(default_factory=list)
    pair_results: list[PairResult] = field(default_factory=list)
    blame: Blame = field(default_factory=Blame)
    versions: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def add(self, ranks: Iterable[int], *results: CheckResult) -> None:
        self.rows += [ReportRow(tuple(ranks), result) for result in results]

    @property
    def failed(self) -> list[CheckResult]:
        return [row.result for row in self.rows if row.result.state is CheckState.FAIL]

    def failures(self, rank: int) -> list[CheckResult]:
        """The failed checks of a rank; timeouts come last, because another rank may have caused them."""
        failed = [row.result for row in self.rows if rank in row.ranks and row.result.state is CheckState.FAIL]
        return sorted(failed, key=lambda result: result.found.startswith(NO_ANSWER))

    def took_part(self, rank: int) -> bool:
        """Whether the rank passed an all_reduce."""
        passed = (row for row in self.rows if row.result.state is CheckState.OK)
        return any(rank in row.ranks and row.result.check == "all_reduce" for row in passed)


def units_of(placements: Mapping[int, Placement]) -> list[Unit]:
    """The nodes, or the ranks where there is only one node."""
    by_node: dict[str, list[Placement]] = defaultdict(list)
    for rank in sorted(placements):
        by_node[placements[rank].node].append(placements[rank])
    if len(by_node) == 1:
        return [Unit(f"rank {rank}", rank, (rank,)) for rank in sorted(placements)]
    hosts = [of_node[0].host for of_node in by_node.values()]
    units = []
    for node, of_node in by_node.items():
        host = of_node[0].host
        name = host if hosts.count(host) == 1 else f"node {node} ({host})"
        units.append(Unit(name, of_node[0].rank, tuple(placement.rank for placement in of_node)))
    return units


def judge_attendance(
    world_size: int, placements: Mapping[int, Placement], missing: list[int], hosts: list[str], where: str, seconds: float
) -> CheckResult:
    """The result of the rendezvous. ``hosts``: the job's hosts, where they are known."""
    if not missing:
        return ok("rendezvous", f"{world_size} rank{'' if world_size == 1 else 's'} at {where}", seconds=seconds)
    came = ", ".join(f"{host} ({name_spans(ranks, most=None)})" for host, ranks in _by_host(placements))
    absent = [host for host in hosts if host not in {placement.host.partition(".")[0] for placement in placements.values()}]
    of_host = f"; nobody from {', '.join(absent)}" if absent else ""
    return fail(
        "rendezvous",
        f"{name_spans(missing, most=None)} of {world_size} did not come to {where} within {seconds:g} s{of_host}; "
        f"here are {came}",
        "look at their own output: did they start, can their host resolve and reach that address? "
        "If they are only slow to start, raise --timeout",
    )


def judge_pairs(report: DoctorReport, blamed: Blame, outcomes: Mapping[Pair, bool]) -> None:
    """Adds who is to blame for the pairs that failed, and the pairs that are slow."""
    units = report.units
    if len(units) < 2:
        report.add(report.placements, skip("pairs", "a single rank: nobody to meet"))
        return
    why = {(result.left, result.right): result.found for result in report.pair_results}
    report.blame = blamed
    for unit in blamed.units:
        failed = [pair for pair in outcomes if unit in pair]
        partners = " and ".join(units[left if right == unit else right].name for left, right in failed)
        found = f"{units[unit].name} speaks with none it met, {partners}: {why[failed[0]]}"
        on_it = _interface_advice(report, units[unit].ranks) or _PORTS
        report.add(units[unit].ranks, fail("pairs", found, f"start without {units[unit].name} meanwhile; on it: {on_it}"))
    _judge_failed_pairs(report, blamed, any(outcomes.values()), why)
    _judge_bandwidth(report)


def _judge_failed_pairs(report: DoctorReport, blamed: Blame, is_any_well: bool, why: Mapping[Pair, str]) -> None:
    units = report.units
    if len(blamed.unclear) > 1 and not is_any_well:
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
    measured = {(result.left, result.right): result for result in report.pair_results if result.bandwidth is not None}
    if not measured:
        return
    bandwidth = {pair: result.bandwidth or 0.0 for pair, result in measured.items()}
    for pair in slow_pairs(bandwidth):
        left, right = (report.units[unit] for unit in pair)
        found = f"{left.name} and {right.name} are slow: {describe_bandwidth(bandwidth[pair])}, the others' median is "
        others = sorted(value for other, value in bandwidth.items() if other != pair)
        found += describe_bandwidth(others[len(others) // 2])
        advice = "ethtool (speed, errors) on both; is it the interface you meant? other traffic on it?"
        report.add((left.leader, right.leader), warn("pairs", found, advice))
    trips = [result.round_trip or 0.0 for result in measured.values()]
    slowest = min(bandwidth.values())
    count = f"{len(measured)} pair{'' if len(measured) == 1 else 's'} well"
    found = f"{count}: round trip at most {1e3 * max(trips):.2f} ms, bandwidth at least {describe_bandwidth(slowest)}"
    spoke = sorted({report.units[unit].leader for pair in measured for unit in pair})
    report.add(spoke, ok("pairs", found))


def _by_host(placements: Mapping[int, Placement]) -> list[tuple[str, list[int]]]:
    """The first hosts with their ranks."""
    by_host: dict[str, list[int]] = defaultdict(list)
    for rank, placement in placements.items():
        by_host[placement.host].append(rank)
    return list(by_host.items())[:MOST_HOSTS]
