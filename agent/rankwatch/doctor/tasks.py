"""The checks that a rank runs on rank 0's orders, each under a time limit."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from torch.distributed import Store  # type: ignore[attr-defined]

from .checks import device, explain, machine, reach
from .checks.clock import QUESTIONS, Stamps, judge
from .checks.compare import environment_of
from .checks.groups import Group, measure_pair, timed
from .doctor_options import DoctorOptions
from .placement import Placement
from .rendezvous import Rendezvous
from .result import CheckResult, CheckState, skip
from .time_limit import Work, bounded, in_turn
from .wording import count

ABORT_TIMEOUT = 1.0
BANDWIDTH_SHARE = 0.25
"""The share of a check's time limit that large messages between two ranks may take."""
GROUP_SHARE = 0.8
"""The share of a check's time limit after which the process group itself times out, with an error that names the silent rank."""
_failed: list[Group] = []
"""Groups that failed. They are never destroyed, because their destructor may wait for ever."""


class Setting(NamedTuple):
    """What all checks need. ``env``: with which the rank was started. ``options``: with the backend that this rank would take."""

    placement: Placement
    env: Mapping[str, str]
    options: DoctorOptions
    nccl_log: Path | None


Order: TypeAlias = Mapping[str, Any]
"""What rank 0 asks for: ``check``, a name among TASKS, ``ranks``, ``backend``, and what that check needs."""


def perform(order: Order, setting: Setting, rendezvous: Rendezvous) -> dict[str, Any]:
    """Runs the checks of an order; returns the answer."""
    results = TASKS[order["check"]].run(order, setting, rendezvous)
    answer: dict[str, Any] = {"results": [result.to_json() for result in results]}
    if order["check"] == "self":
        answer["facts"] = {"versions": device.versions(), "environment": environment_of(setting.env)}
    elif any(result.state is CheckState.FAIL for result in results):
        rendezvous.abandon_check_connection()
    return answer


def _check_self(order: Order, setting: Setting, rendezvous: Rendezvous) -> list[CheckResult]:
    """The checks that need no other rank. The first rank of each node also checks the node."""
    placement, backend = setting.placement, order["backend"]
    here, timeout = order["nodes"][placement.node], setting.options.check_timeout
    steps: list[tuple[str, Work]] = [
        ("gpu", partial(device.gpu, backend, placement.local_rank, len(here))),
        ("open files", machine.open_files),
    ]
    if placement.rank == here[0]:
        steps += [
            ("shared memory", partial(machine.shared_memory, len(here))),
            ("name service", partial(machine.name_service, rendezvous.address)),
            ("interface", partial(machine.interface, rendezvous.address, len(order["nodes"]), backend, setting.env)),
            ("collector", partial(reach.collector, setting.env.get("RANKWATCH_CONNECTION", ""), timeout / 2)),
        ]
    return [bounded(check, work, timeout) for check, work in steps]


def serve_clock(rendezvous: Rendezvous, ranks: list[int]) -> CheckResult:
    """Rank 0's side: answers the questions of one rank after the other."""
    store = rendezvous.store_for("clock")
    for rank in ranks:
        for number in range(QUESTIONS):
            store.get(f"{rank}/{number}/asked")
            heard = time.time()
            store.set(f"{rank}/{number}/answer", f"{heard!r} {time.time()!r}")
    return skip("clock", "")


def _ask_clock(order: Order, setting: Setting, rendezvous: Rendezvous) -> list[CheckResult]:
    rank = setting.placement.rank

    def work() -> CheckResult:
        store = rendezvous.store_for("clock")
        stamps = []
        for number in range(QUESTIONS):
            asked = time.time()
            store.set(f"{rank}/{number}/asked", "")
            heard, answered = map(float, store.get(f"{rank}/{number}/answer").split())
            stamps.append(Stamps(asked, heard, answered, time.time()))
        return judge(stamps)

    return [bounded("clock", work, setting.options.check_timeout)]


def _test_pair(order: Order, setting: Setting, rendezvous: Rendezvous) -> list[CheckResult]:
    rank = setting.placement.rank
    pair = next(pair for pair in order["pairs"] if rank in pair)
    group: list[Group] = []

    def work() -> CheckResult:
        store = rendezvous.store_for(f"{order['name']}/{pair[0]}-{pair[1]}")
        group.append(_group(order["backend"], setting, store, pair))
        return measure_pair(group[0], BANDWIDTH_SHARE * setting.options.check_timeout)

    result = bounded("pair", work, setting.options.check_timeout)
    _abandon(group, result)
    return [result]


def _try_collectives(order: Order, setting: Setting, rendezvous: Rendezvous) -> list[CheckResult]:
    rank, scope = setting.placement.rank, order["scope"]
    members = next(group for group in order["groups"] if rank in group)
    group: list[Group] = []

    def connect() -> None:
        group.append(_group(order["backend"], setting, rendezvous.store_for(f"{order['name']}/{members[0]}"), members))

    def broadcast() -> None:
        for root in roots:
            group[0].broadcast(root)

    roots = [members.index(leader) for leader in order["leaders"] if leader in members]
    steps: list[tuple[str, Work]] = [
        (f"{name}{scope}", partial(timed, f"{name}{scope}", work, what))
        for name, work, what in (
            ("group", connect, f"{order['backend']}, {count(len(members), 'rank')}"),
            ("all_reduce", lambda: group[0].all_reduce(), "sums right"),
            ("broadcast", broadcast, f"right from {count(len(roots), 'rank')}"),
            ("all_gather", lambda: group[0].all_gather(), "order right"),
        )
    ]
    results = in_turn(steps, setting.options.check_timeout)
    for result in results:
        _abandon(group, result)
    return results


def _group(backend: str, setting: Setting, store: Store, members: list[int]) -> Group:
    device_of_rank = device.target(backend, setting.placement.local_rank)
    index = members.index(setting.placement.rank)
    return Group(backend, store, index, len(members), device_of_rank, GROUP_SHARE * setting.options.check_timeout)


def _abandon(group: list[Group], result: CheckResult) -> None:
    def abort() -> CheckResult:
        group[0].abort()
        return skip("abort", "")

    if group and result.state is CheckState.FAIL:
        bounded("abort", abort, ABORT_TIMEOUT)
        _failed.append(group[0])


def _read_nccl_log(order: Order, setting: Setting, rendezvous: Rendezvous) -> list[CheckResult]:
    path = setting.nccl_log
    if path is None or not path.exists():
        return [skip("nccl log", "NCCL was not used")]
    with open(path, errors="replace") as log:
        return explain.explain(log)


class Task(NamedTuple):
    """What a rank does on an order, and for how many time limits of a check rank 0 waits for the answers."""

    run: Callable[[Order, Setting, Rendezvous], list[CheckResult]]
    limits: int


TASKS = {
    "self": Task(_check_self, 2),
    "clock": Task(_ask_clock, 1),
    "pair": Task(_test_pair, 2),
    "collectives": Task(_try_collectives, 5),
    "nccl log": Task(_read_nccl_log, 1),
}
