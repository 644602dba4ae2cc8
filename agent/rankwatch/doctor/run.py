"""The examination of a job: rank 0 sends orders, the other ranks follow them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from ..shared.words.text import name_spans
from ..tell.abort import say
from .checks.compare import compare
from .checks.pairs import Wave, first_round, remaining, second_round, without_blamed
from .placement import hosts_of_job
from .rendezvous import Rendezvous
from .report import DoctorReport, PairResult, judge_attendance, judge_pairs
from .result import CheckResult, CheckState, fail, skip
from .tasks import TASKS, Setting, perform, serve_clock
from .time_limit import NO_ANSWER, Watchdog, Work, bounded

MARGIN = 2.0
"""Seconds that an answer may take beyond the time limits of its checks."""
LAST_MARGIN = 20.0
"""Seconds beyond all time limits after which the process is ended by force."""
ALL_PAIRS = 8
"""Up to this number of nodes every pair is tested; with more, only the pairs of two rounds, unless --all-pairs is given."""


class Leader:
    """Rank 0's part."""

    def __init__(self, setting: Setting, rendezvous: Rendezvous) -> None:
        self._setting = setting
        self._rendezvous = rendezvous
        self._orders = 0
        self._silent: set[int] = set()
        """Ranks that did not answer an order; they are not waited for again."""
        self._watchdog = Watchdog(setting.placement.tag)
        self.report = DoctorReport(setting.placement.world_size, setting.options.backend)

    def examine(self) -> DoctorReport:
        began = time.monotonic()
        self._roll_call()
        self._check_each()
        self._compare_clocks()
        self._test_pairs()
        self._try_collectives(without_blamed(len(self.report.units), self.report.blame))
        if self._setting.nccl_log is not None:
            self._order("nccl log", self.report.placements)
        self.report.seconds = time.monotonic() - began
        return self.report

    def dismiss(self, code: int) -> None:
        """Tells the other ranks to end with this exit code."""
        self._rendezvous.order(self._orders, {"check": "over", "code": code})
        self._rendezvous.leave(self._setting.placement.rank)
        self._rendezvous.wait_for_all_to_leave(set(self.report.placements) - self._silent)

    def _roll_call(self) -> None:
        began, patience = time.monotonic(), self._setting.options.timeout
        self._watchdog.renew(patience + LAST_MARGIN, "waiting for all to come")
        size = self.report.world_size
        report, where = self.report, ":".join(map(str, self._rendezvous.address))
        say_waiting = partial(_say_waiting, f"to come, of {size}")
        report.placements = self._rendezvous.roll_call(size, patience, say_waiting)
        took = patience if report.missing else time.monotonic() - began
        attendance = judge_attendance(report, hosts_of_job(self._setting.env), where, took)
        # The ranks that arrived are not to blame for the missing ones.
        report.add(() if report.missing else report.placements, attendance)

    def _check_each(self) -> None:
        report = self.report
        answers = self._order("self", report.placements, nodes=report.nodes)
        facts = {rank: answer["facts"] for rank, answer in answers.items() if "facts" in answer}
        versions = {rank: of["versions"] for rank, of in facts.items()}
        report.versions = versions.get(0, {})
        same_image = "the same image or environment on all nodes"
        report.add(report.placements, *compare("versions", versions, is_fatal=True, advice=same_image))
        environments = {rank: of["environment"] for rank, of in facts.items()}
        advice = "export it the same on all nodes: torchrun and srun pass on only what was set where they were started"
        report.add(report.placements, *compare("environment", environments, is_fatal=False, advice=advice))

    def _compare_clocks(self) -> None:
        own, nodes = self._setting.placement.node, self.report.nodes
        others = [ranks[0] for node, ranks in nodes.items() if node != own and ranks[0] not in self._silent]
        if not others:
            self.report.add([self._setting.placement.rank], skip("clock", "no other node to compare with"))
            return
        self._order("clock", others, beside=lambda: serve_clock(self._rendezvous, others))

    def _test_pairs(self) -> None:
        units = len(self.report.units)
        self._run_waves(1, first_round(units))
        self._run_waves(2, second_round(units, self.report.outcomes))
        if self._setting.options.all_pairs or units <= ALL_PAIRS:
            self._run_waves(3, remaining(units, self.report.outcomes))
        judge_pairs(self.report)

    def _run_waves(self, number: int, waves: list[Wave]) -> None:
        leader = [unit.leader for unit in self.report.units]
        for count, wave in enumerate(waves):
            pairs = [[leader[left], leader[right]] for left, right in wave]
            ranks = [rank for pair in pairs if not self._silent & set(pair) for rank in pair]
            answers = self._send("pair", ranks, pairs=pairs, name=f"pair/{number}.{count}")
            for pair in wave:
                sides = [_results(answers[leader[unit]])[0] for unit in pair if leader[unit] in answers]
                self.report.pair_results.append(PairResult(number, pair, _of_pair(sides)))

    def _try_collectives(self, units: list[int]) -> None:
        """Over all units that can train together. Where that fails, over each node alone, to find the node."""
        report = self.report
        unfit = self._silent | {rank for rank in report.placements if any(f.check == "gpu" for f in report.failures(rank))}
        fit = [[rank for rank in report.units[unit].ranks if rank not in unfit] for unit in units]
        by_node = [ranks for ranks in fit if ranks]
        together = sorted(rank for ranks in by_node for rank in ranks)
        if left_out := sorted(set(report.placements) - set(together) - self._silent):
            report.add(left_out, skip("collectives", "left out, so that the others can be tried"))
        leaders = [ranks[0] for ranks in by_node]
        is_well = self._collect([together], leaders, "") if together else True
        if not is_well and len(by_node) > 1 and any(len(ranks) > 1 for ranks in by_node):
            self._collect(by_node, leaders, " in each node")

    def _collect(self, groups: list[list[int]], leaders: list[int], scope: str) -> bool:
        before = len(self.report.rows)
        ranks = [rank for group in groups for rank in group]
        self._order("collectives", ranks, groups=groups, leaders=leaders, name=f"collectives{scope}", scope=scope)
        return all(row.result.state is not CheckState.FAIL for row in self.report.rows[before:])

    def _order(self, check: str, ranks: Iterable[int], beside: Work | None = None, **more: Any) -> dict[int, Any]:
        """Sends an order and adds the results to the report; returns the answers by rank."""
        answers = self._send(check, ranks, beside, **more)
        for rank, answer in answers.items():
            self.report.add([rank], *_results(answer))
        return answers

    def _send(self, check: str, ranks: Iterable[int], beside: Work | None = None, **more: Any) -> dict[int, Any]:
        """Sends an order, does ``beside`` and rank 0's own part meanwhile, and waits; returns the answers by rank."""
        ranks = sorted(ranks)
        order = {"check": check, "ranks": ranks, "backend": self._setting.options.backend, **more}
        number, self._orders = self._orders, self._orders + 1
        self._rendezvous.order(number, order)
        setting = self._setting
        limit = TASKS[check].limits * setting.options.check_timeout + MARGIN
        self._watchdog.renew(2 * limit + LAST_MARGIN, check)
        began = time.monotonic()
        if beside is not None and bounded(check, beside, setting.options.check_timeout).state is CheckState.FAIL:
            self._rendezvous.abandon_check_connection()
        if setting.placement.rank in ranks:
            self._rendezvous.answer(number, setting.placement.rank, perform(order, setting, self._rendezvous))
        expected = [rank for rank in ranks if rank not in self._silent]
        left = max(MARGIN, limit - (time.monotonic() - began))
        answers = self._rendezvous.answers(number, expected, left, partial(_say_waiting, f"({check})"))
        silent = set(expected) - set(answers)
        self._silent |= silent
        result = fail("rank", f"{NO_ANSWER} {limit:g} s ({check}): it has ended, or hangs", "look at its own output")
        return answers | {rank: {"results": [result.to_json()]} for rank in silent}


def follow(setting: Setting, rendezvous: Rendezvous) -> int:
    """The part of the other ranks: follows orders until the last one; returns the exit code.

    Raises:
        RuntimeError: rank 0 sends no order for too long, or the store is gone.
    """
    number, rank = 0, setting.placement.rank
    watchdog = Watchdog(setting.placement.tag)
    limits = max(task.limits for task in TASKS.values()) + 1
    longest = setting.options.timeout + limits * setting.options.check_timeout + 2 * MARGIN
    while True:
        watchdog.renew(2 * longest + LAST_MARGIN, f"order {number} of rank 0")
        order = rendezvous.next_order(number, longest)
        if order["check"] == "over":
            rendezvous.leave(rank)
            return int(order["code"])
        if rank in order["ranks"]:
            rendezvous.answer(number, rank, perform(order, setting, rendezvous))
        number += 1


def _results(answer: Mapping[str, Any]) -> list[CheckResult]:
    return [CheckResult.from_json(body) for body in answer["results"]]


def _of_pair(sides: list[CheckResult]) -> CheckResult:
    """The result of a pair: of the sides that failed, one that says why; else what the first one measured."""
    if not sides:  # not asked, because one of them did not answer before
        return fail("rank", "one of them does not answer any more")
    return min(sides, key=lambda side: (side.state is not CheckState.FAIL, side.found.startswith(NO_ANSWER)))


def _say_waiting(what: str, missing: list[int]) -> None:
    say(f"doctor: waiting for {name_spans(missing, most=None)} {what}")
