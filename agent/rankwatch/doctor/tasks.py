"""What a rank does when rank 0 gives an order. Each check has a time limit, and what it says is what was found."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed import Store  # type: ignore[attr-defined]

from . import device, explain, machine, reach
from .bounded import Work, bounded, in_turn
from .clock import QUESTIONS, Stamps, judge
from .compare import environment_of
from .finding import Finding, State, skip
from .groups import Group, meet, timed
from .place import Place
from .room import Room

ABORT_TIMEOUT = 1.0
MEETING_SHARE = 0.25
"""Of a check's time, that two may take to send each other much."""
_failed: list[Group] = []
"""Kept, for what a destructor waits for may never come."""
GROUP_SHARE = 0.8
"""Of a check's time, after which the group itself gives up, and says of whom it heard nothing."""


class Setting(NamedTuple):
    """What holds for all checks. ``env`` is the environment as the rank was started with it."""

    place: Place
    env: Mapping[str, str]
    backend: str
    timeout: float
    nccl_log: Path | None


def perform(order: Mapping[str, Any], setting: Setting, room: Room) -> dict[str, Any]:
    """Carries out an order; returns the answer."""
    facts: dict[str, dict[str, str]] = {}
    if order["check"] == "self":
        findings = _check_self(order, setting, room)
        facts = {"versions": device.versions(), "environment": environment_of(setting.env)}
    elif order["check"] == "clock":
        findings = [bounded("clock", partial(_ask_clock, room, setting.place.rank), setting.timeout)]
    elif order["check"] == "pair":
        findings = [_meet(order, setting, room)]
    elif order["check"] == "collectives":
        findings = _collectives(order, setting, room)
    else:
        findings = _read_nccl_log(setting.nccl_log)
    if order["check"] != "self" and any(finding.state is State.FAIL for finding in findings):
        room.abandon_line()
    return {"findings": [finding.to_json() for finding in findings], "facts": facts}


def _check_self(order: Mapping[str, Any], setting: Setting, room: Room) -> list[Finding]:
    """What a rank can see alone. What is of a node, and not of a rank, its first rank looks at."""
    place, backend = setting.place, order["backend"]
    mine = order["local_ranks"][place.node]
    steps: list[tuple[str, Work]] = [
        ("gpu", partial(device.gpu, backend, place.local_rank, mine)),
        ("open files", machine.open_files),
    ]
    if place.rank in order["leaders"]:
        steps += [
            ("shared memory", partial(machine.shared_memory, mine)),
            ("name service", partial(machine.name_service, room.address)),
            ("interface", partial(machine.interface, room.address, order["nodes"], backend, setting.env)),
            ("collector", partial(reach.collector, setting.env.get("RANKWATCH_CONNECTION", ""), setting.timeout / 2)),
        ]
    return [bounded(check, work, setting.timeout) for check, work in steps]


def serve_clock(room: Room, ranks: list[int]) -> Finding:
    """Rank 0's side: answers one rank after the other."""
    line = room.line("clock")
    for rank in ranks:
        for number in range(QUESTIONS):
            line.get(f"{rank}/{number}/asked")
            heard = time.time()
            line.set(f"{rank}/{number}/answer", f"{heard!r} {time.time()!r}")
    return skip("clock", "")


def _ask_clock(room: Room, rank: int) -> Finding:
    line = room.line("clock")
    stamps = []
    for number in range(QUESTIONS):
        asked = time.time()
        line.set(f"{rank}/{number}/asked", "")
        heard, answered = map(float, line.get(f"{rank}/{number}/answer").split())
        stamps.append(Stamps(asked, heard, answered, time.time()))
    return judge(stamps)


def _meet(order: Mapping[str, Any], setting: Setting, room: Room) -> Finding:
    rank = setting.place.rank
    pair = next(pair for pair in order["pairs"] if rank in pair)
    group: list[Group] = []

    def work() -> Finding:
        line = room.line(f"{order['name']}/{pair[0]}-{pair[1]}")
        group.append(_group(order["backend"], setting, line, pair))
        return meet(group[0], MEETING_SHARE * setting.timeout)

    finding = bounded("pair", work, setting.timeout)
    _let_go(group, finding)
    return finding


def _collectives(order: Mapping[str, Any], setting: Setting, room: Room) -> list[Finding]:
    rank, scope = setting.place.rank, order["scope"]
    members = next(group for group in order["groups"] if rank in group)
    group: list[Group] = []

    def connect() -> None:
        group.append(_group(order["backend"], setting, room.line(f"{order['name']}/{members[0]}"), members))

    def broadcast() -> None:
        for root in roots:
            group[0].broadcast(root)

    roots = [members.index(leader) for leader in order["leaders"] if leader in members]
    from_all = f"from {len(roots)} rank{'' if len(roots) == 1 else 's'}"
    steps: list[tuple[str, Work]] = [
        (f"{name}{scope}", partial(timed, f"{name}{scope}", work, what))
        for name, work, what in (
            ("group", connect, f"{order['backend']}, {len(members)} rank{'' if len(members) == 1 else 's'}"),
            ("all_reduce", lambda: group[0].all_reduce(), "sums right"),
            ("broadcast", broadcast, f"right {from_all}"),
            ("all_gather", lambda: group[0].all_gather(), "order right"),
        )
    ]
    findings = in_turn(steps, setting.timeout)
    for finding in findings:
        _let_go(group, finding)
    return findings


def _group(backend: str, setting: Setting, line: Store, members: list[int]) -> Group:
    device_of_rank = device.target(backend, setting.place.local_rank)
    index = members.index(setting.place.rank)
    return Group(backend, line, index, len(members), device_of_rank, GROUP_SHARE * setting.timeout)


def _let_go(group: list[Group], finding: Finding) -> None:
    def abort() -> Finding:
        group[0].abort()
        return skip("abort", "")

    if group and finding.state is State.FAIL:
        bounded("abort", abort, ABORT_TIMEOUT)
        _failed.append(group[0])


def _read_nccl_log(path: Path | None) -> list[Finding]:
    if path is None or not path.exists():
        return [skip("nccl log", "NCCL was not used")]
    with open(path, errors="replace") as log:
        return [line.as_finding() for line in explain.explain(log)]
