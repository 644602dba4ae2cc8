"""All that the doctor found out, and what to make of it. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from .bounded import NO_ANSWER
from .finding import Finding, State, fail, ok, skip, warn
from .pairs import Blame, Pair, slow_pairs
from .place import Place
from .words import describe_bandwidth, name_ranks

MOST_HOSTS = 16
"""Hosts that are listed."""


class Unit(NamedTuple):
    """What meets in pairs: a node, by its first rank, or on a single node a rank."""

    name: str
    leader: int
    ranks: tuple[int, ...]


class Told(NamedTuple):
    """A finding, and the ranks it is about."""

    ranks: tuple[int, ...]
    finding: Finding


@dataclass(frozen=True, slots=True)
class Met:
    """How a meeting of two went. ``left`` and ``right`` are units; without figures it failed."""

    round: int
    left: int
    right: int
    found: str
    round_trip: float | None
    bandwidth: float | None


@dataclass
class Report:
    """``places``: the ranks that came. ``missing``: those that did not."""

    world_size: int
    backend: str
    places: dict[int, Place] = field(default_factory=dict)
    missing: list[int] = field(default_factory=list)
    units: list[Unit] = field(default_factory=list)
    told: list[Told] = field(default_factory=list)
    meetings: list[Met] = field(default_factory=list)
    blame: Blame = field(default_factory=Blame)
    versions: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def tell(self, ranks: Iterable[int], *findings: Finding) -> None:
        self.told += [Told(tuple(ranks), finding) for finding in findings]

    @property
    def is_well(self) -> bool:
        return not any(told.finding.state is State.FAIL for told in self.told)

    def failures(self, rank: int) -> list[Finding]:
        """What failed on a rank, its own faults before what it waited for in vain."""
        failed = [told.finding for told in self.told if rank in told.ranks and told.finding.state is State.FAIL]
        return sorted(failed, key=lambda finding: finding.found.startswith(NO_ANSWER))

    def took_part(self, rank: int) -> bool:
        """Whether it came through a collective."""
        return any(
            rank in told.ranks and told.finding.check == "all_reduce" and told.finding.state is State.OK
            for told in self.told
        )


def units_of(places: Mapping[int, Place]) -> list[Unit]:
    """The nodes; where there is but one, its ranks."""
    by_node: dict[str, list[Place]] = defaultdict(list)
    for rank in sorted(places):
        by_node[places[rank].node].append(places[rank])
    if len(by_node) == 1:
        return [Unit(f"rank {rank}", rank, (rank,)) for rank in sorted(places)]
    hosts = [of_node[0].host for of_node in by_node.values()]
    units = []
    for node, of_node in by_node.items():
        host = of_node[0].host
        name = host if hosts.count(host) == 1 else f"node {node} ({host})"
        units.append(Unit(name, of_node[0].rank, tuple(place.rank for place in of_node)))
    return units


def judge_attendance(
    world_size: int, places: Mapping[int, Place], missing: list[int], hosts: list[str], where: str, seconds: float
) -> Finding:
    """The rendezvous. ``hosts``: those that the job was given, where that is known."""
    if not missing:
        return ok("rendezvous", f"{world_size} rank{'' if world_size == 1 else 's'} at {where}", seconds=seconds)
    came = ", ".join(f"{host} ({name_ranks(ranks)})" for host, ranks in _by_host(places))
    absent = [host for host in hosts if host not in {place.host.partition(".")[0] for place in places.values()}]
    of_host = f"; nobody from {', '.join(absent)}" if absent else ""
    return fail(
        "rendezvous",
        f"{name_ranks(missing)} of {world_size} did not come to {where} within {seconds:g} s{of_host}; here are {came}",
        "look at their own output: did they start, can their host resolve and reach that address? "
        "If they are only slow to start, raise --timeout",
    )


def judge_pairs(report: Report, blamed: Blame, results: Mapping[Pair, bool]) -> None:
    """Names who is to blame for the meetings that failed, and the pairs that are slow."""
    units = report.units
    if len(units) < 2:
        report.tell(report.places, skip("pairs", "a single rank: nobody to meet"))
        return
    why = {(met.left, met.right): met.found for met in report.meetings}
    report.blame = blamed
    for unit in blamed.units:
        failed = [pair for pair in results if unit in pair]
        met = " and ".join(units[left if right == unit else right].name for left, right in failed)
        found = f"{units[unit].name} speaks with none it met, {met}: {why[failed[0]]}"
        on_it = _trap(report, units[unit].ranks) or _PORTS
        report.tell(units[unit].ranks, fail("pairs", found, f"start without {units[unit].name} meanwhile; on it: {on_it}"))
    _judge_failed_pairs(report, blamed, any(results.values()), why)
    _judge_bandwidth(report)


def _judge_failed_pairs(report: Report, blamed: Blame, is_any_well: bool, why: Mapping[Pair, str]) -> None:
    units = report.units
    if len(blamed.unclear) > 1 and not is_any_well:
        everybody = [unit.leader for unit in units]
        found = f"none of {len(blamed.unclear)} pairs speak with each other: {why[blamed.unclear[0]]}"
        report.tell(everybody, fail("pairs", found, _trap(report, everybody) or _PORTS))
        return
    between = "look for a firewall rule, a route or a cable between just these two"
    for pair, how, advice in (
        *((pair, "; both do with others", between) for pair in blamed.pairs),
        *((pair, "; which side it is, no third can tell", _PORTS) for pair in blamed.unclear),
    ):
        left, right = (units[unit] for unit in pair)
        found = f"{left.name} and {right.name} do not speak with each other{how}: {why[pair]}"
        leaders = left.leader, right.leader
        report.tell(leaders, fail("pairs", found, _trap(report, leaders) or advice))


def _trap(report: Report, ranks: Iterable[int]) -> str:
    """What to try about the interface of these ranks; it explains why they cannot be reached."""
    of_interface = [told for told in report.told if told.finding.check == "interface" and set(told.ranks) & set(ranks)]
    return next((told.finding.advice for told in of_interface if told.finding.advice), "")


_PORTS = (
    "open all TCP ports between the nodes, not the master's alone; set GLOO_SOCKET_IFNAME / NCCL_SOCKET_IFNAME to an "
    "interface that reaches the others"
)


def _judge_bandwidth(report: Report) -> None:
    measured = {(met.left, met.right): met for met in report.meetings if met.bandwidth is not None}
    if not measured:
        return
    bandwidth = {pair: met.bandwidth or 0.0 for pair, met in measured.items()}
    for pair in slow_pairs(bandwidth):
        left, right = (report.units[unit] for unit in pair)
        found = f"{left.name} and {right.name} are slow: {describe_bandwidth(bandwidth[pair])}, the others' median is "
        others = sorted(value for other, value in bandwidth.items() if other != pair)
        found += describe_bandwidth(others[len(others) // 2])
        advice = "ethtool (speed, errors) on both; is it the interface you meant? other traffic on it?"
        report.tell((left.leader, right.leader), warn("pairs", found, advice))
    trips = [met.round_trip or 0.0 for met in measured.values()]
    slowest = min(bandwidth.values())
    count = f"{len(measured)} pair{'' if len(measured) == 1 else 's'} well"
    found = f"{count}: round trip at most {1e3 * max(trips):.2f} ms, bandwidth at least {describe_bandwidth(slowest)}"
    spoke = sorted({report.units[unit].leader for pair in measured for unit in pair})
    report.tell(spoke, ok("pairs", found))


def _by_host(places: Mapping[int, Place]) -> list[tuple[str, list[int]]]:
    """The first hosts, and who is there."""
    by_host: dict[str, list[int]] = defaultdict(list)
    for rank, place in places.items():
        by_host[place.host].append(rank)
    return list(by_host.items())[:MOST_HOSTS]
