"""The examination: rank 0 leads, the others follow."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from ..tell.abort import say
from .bounded import NO_ANSWER, LastResort, Work, bounded
from .compare import compare
from .finding import Finding, State, fail, skip
from .pairs import Heat, Pair, blame, first_round, remaining, second_round, without_blamed
from .place import hosts_of_job
from .report import Met, Report, judge_attendance, judge_pairs, units_of
from .room import Room
from .tasks import Setting, perform, serve_clock
from .words import name_ranks

MARGIN = 2.0
"""Seconds that an answer may take beyond the check."""
LAST_MARGIN = 20.0
"""Seconds beyond all time limits after which the process is ended by force."""
STEPS = {"self": 2, "clock": 1, "pair": 2, "collectives": 5, "nccl log": 1}
"""Checks in each order, each with its own time limit."""
ALL_PAIRS = 8
"""So many nodes, or fewer, all meet all; of more, those of two rounds do, unless --all-pairs says otherwise."""


class Leader:
    """Rank 0's part.

    Args:
        patience: seconds to wait for ranks to come.
    """

    def __init__(self, setting: Setting, room: Room, patience: float, *, all_pairs: bool) -> None:
        self._setting = setting
        self._room = room
        self._patience = patience
        self._all_pairs = all_pairs
        self._orders = 0
        self._gone: set[int] = set()
        self._last_resort = LastResort(setting.place.tag)
        self.report = Report(setting.place.world_size, setting.backend)

    def examine(self) -> Report:
        began = time.monotonic()
        self._roll_call()
        self._check_each()
        self._compare_clocks()
        results = self._meet()
        self._try_collectives(without_blamed(len(self.report.units), blame(results)))
        if self._setting.nccl_log is not None:
            self._order("nccl log", self.report.places)
        self.report.seconds = time.monotonic() - began
        return self.report

    def dismiss(self, code: int) -> None:
        """Tells the others that all is over, and with which exit code."""
        self._room.order(self._orders, {"check": "over", "code": code})
        self._room.leave(self._setting.place.rank)
        self._room.wait_for_all_to_leave(set(self.report.places) - self._gone)

    def _roll_call(self) -> None:
        began = time.monotonic()
        self._last_resort.renew(self._patience + LAST_MARGIN, "waiting for all to come")
        size = self.report.world_size
        places = self._room.roll_call(size, self._patience, partial(_wait_for, f"to come, of {size}"))
        report, where = self.report, ":".join(map(str, self._room.address))
        report.places = places
        report.missing = [rank for rank in range(size) if rank not in places]
        report.units = units_of(places)
        took = self._patience if report.missing else time.monotonic() - began
        hosts = hosts_of_job(self._setting.env)
        attendance = judge_attendance(size, places, report.missing, hosts, where, took)
        # Those who came are not to blame.
        report.tell(() if report.missing else places, attendance)

    def _check_each(self) -> None:
        report = self.report
        nodes = [place.node for place in report.places.values()]
        order: dict[str, Any] = {
            "nodes": len(set(nodes)),
            "local_ranks": {node: nodes.count(node) for node in nodes},
            "leaders": self._leaders,
        }
        facts = self._order("self", report.places, **order)
        versions = {rank: of["versions"] for rank, of in facts.items()}
        report.versions = versions.get(0, {})
        same_image = "the same image or environment on all nodes"
        report.tell(report.places, *compare("versions", versions, is_fatal=True, advice=same_image))
        environments = {rank: of["environment"] for rank, of in facts.items()}
        advice = "export it the same on all nodes: torchrun and srun pass on only what was set where they were started"
        report.tell(report.places, *compare("environment", environments, is_fatal=False, advice=advice))

    def _compare_clocks(self) -> None:
        own = self._setting.place.node
        others = [rank for rank in self._leaders if self.report.places[rank].node != own and rank not in self._gone]
        if not others:
            self.report.tell([self._setting.place.rank], skip("clock", "no other node to compare with"))
            return
        self._order("clock", others, beside=lambda: serve_clock(self._room, others))

    def _meet(self) -> dict[Pair, bool]:
        """The rounds of pairs; whether each went well."""
        units, results = len(self.report.units), dict[Pair, bool]()
        self._heats(1, first_round(units), results)
        self._heats(2, second_round(units, results), results)
        if self._all_pairs or units <= ALL_PAIRS:
            self._heats(3, remaining(units, results), results)
        judge_pairs(self.report, blame(results), results)
        return results

    def _heats(self, number: int, heats: list[Heat], results: dict[Pair, bool]) -> None:
        leader = [unit.leader for unit in self.report.units]
        for count, heat in enumerate(heats):
            pairs = [[leader[left], leader[right]] for left, right in heat]
            ranks = [rank for pair in pairs if not self._gone & set(pair) for rank in pair]
            answers = self._send("pair", ranks, pairs=pairs, name=f"pair/{number}.{count}")
            for left, right in heat:
                sides = [_findings(answers, leader[unit])[0] for unit in (left, right)]
                met = _met(number, left, right, sides)
                self.report.meetings.append(met)
                results[left, right] = met.bandwidth is not None

    def _try_collectives(self, units: list[int]) -> None:
        """All who can speak with each other; where that fails, each node alone, to find which."""
        report = self.report
        unfit = self._gone | {rank for rank in report.places if any(f.check == "gpu" for f in report.failures(rank))}
        fit = [[rank for rank in report.units[unit].ranks if rank not in unfit] for unit in units]
        by_node = [ranks for ranks in fit if ranks]
        together = sorted(rank for ranks in by_node for rank in ranks)
        if left_out := sorted(set(report.places) - set(together) - self._gone):
            report.tell(left_out, skip("collectives", "left out, so that the others can be tried"))
        leaders = [ranks[0] for ranks in by_node]
        is_well = self._collect([together], leaders, "") if together else True
        if not is_well and len(by_node) > 1 and any(len(ranks) > 1 for ranks in by_node):
            self._collect(by_node, leaders, " in each node")

    def _collect(self, groups: list[list[int]], leaders: list[int], scope: str) -> bool:
        before = len(self.report.told)
        ranks = [rank for group in groups for rank in group]
        self._order("collectives", ranks, groups=groups, leaders=leaders, name=f"collectives{scope}", scope=scope)
        return all(told.finding.state is not State.FAIL for told in self.report.told[before:])

    @property
    def _leaders(self) -> list[int]:
        """The first rank of each node."""
        first: dict[str, int] = {}
        for rank, place in sorted(self.report.places.items()):
            first.setdefault(place.node, rank)
        return list(first.values())

    def _order(self, check: str, ranks: Iterable[int], beside: Work | None = None, **more: Any) -> dict[int, Any]:
        """Gives an order and takes the findings to the report; returns the facts by rank."""
        answers = self._send(check, ranks, beside, **more)
        for rank in answers:
            self.report.tell([rank], *_findings(answers, rank))
        return {rank: answer["facts"] for rank, answer in answers.items() if answer.get("facts")}

    def _send(self, check: str, ranks: Iterable[int], beside: Work | None = None, **more: Any) -> dict[int, Any]:
        ranks = sorted(ranks)
        order = {"check": check, "ranks": ranks, "backend": self._setting.backend, **more}
        number, self._orders = self._orders, self._orders + 1
        self._room.order(number, order)
        setting = self._setting
        limit = STEPS[check] * setting.timeout + MARGIN
        self._last_resort.renew(2 * limit + LAST_MARGIN, check)
        began = time.monotonic()
        if beside is not None and bounded(check, beside, setting.timeout).state is State.FAIL:
            self._room.abandon_line()
        if setting.place.rank in ranks:
            self._room.answer(number, setting.place.rank, perform(order, setting, self._room))
        expected = [rank for rank in ranks if rank not in self._gone]
        left = max(MARGIN, limit - (time.monotonic() - began))
        answers = self._room.answers(number, expected, left, partial(_wait_for, f"({check})"))
        silent = set(expected) - set(answers)
        self._gone |= silent
        finding = fail("rank", f"{NO_ANSWER} {limit:g} s ({check}): it has ended, or hangs", "look at its own output")
        return answers | {rank: {"findings": [finding.to_json()]} for rank in silent}


def follow(setting: Setting, room: Room, patience: float) -> int:
    """The other ranks' part: does what it is told until all is over; returns the exit code.

    Raises:
        RuntimeError: rank 0 is not heard of for too long, or the store is gone.
    """
    number, rank = 0, setting.place.rank
    last_resort = LastResort(setting.place.tag)
    longest = patience + (max(STEPS.values()) + 1) * setting.timeout + 2 * MARGIN
    while True:
        last_resort.renew(2 * longest + LAST_MARGIN, f"order {number} of rank 0")
        order = room.next_order(number, longest)
        if order["check"] == "over":
            room.leave(rank)
            return int(order["code"])
        if rank in order["ranks"]:
            room.answer(number, rank, perform(order, setting, room))
        number += 1


def _findings(answers: Mapping[int, Any], rank: int) -> list[Finding]:
    if rank not in answers:  # or its partner does not, and it was not asked
        return [fail("rank", "one of them does not answer any more")]
    return [Finding.from_json(body) for body in answers[rank]["findings"]]


def _met(number: int, left: int, right: int, sides: list[Finding]) -> Met:
    failed = sorted(
        (side.found for side in sides if side.state is State.FAIL), key=lambda found: found.startswith(NO_ANSWER)
    )
    if failed:
        return Met(number, left, right, failed[0], None, None)
    figures = sides[0].figures
    return Met(number, left, right, sides[0].found, figures["round_trip"], figures["bandwidth"])


def _wait_for(what: str, missing: list[int]) -> None:
    say(f"doctor: waiting for {name_ranks(missing)} {what}")
