"""A stall, and where its ranks are, for people and for programs."""

from __future__ import annotations

from typing import Any

from rankwatch.shared.types.messages import Inspected
from rankwatch.shared.words.text import name_spans

from ..decide.core.report import RankStack, Report
from .jsonable import pick

INDENT = "  "


def fields(report: Report, most: int | None = None) -> list[tuple[str, str]]:
    """The stall, and the stacks. ``most``: so many lines of each stack; None: all."""
    told = [("stalled", report.stalled)] if report.stalled and report.stalled != report.reason else []
    lines = [line for stack in stacks(report).values() for line in (stack if most is None else _shortened(stack, most))]
    if hidden := unasked(report):
        lines.append(f"{hidden} more were not asked")
    return [*told, ("stacks", "\n".join(lines))] if report.stacks else told


def stacks(report: Report) -> dict[tuple[int, ...], list[str]]:
    """By ranks, where they are: in one line, and then each thread with its frames. Equal stacks are told once."""
    same: dict[RankStack, list[int]] = {}
    for stack in report.stacks:
        same.setdefault(stack._replace(rank=-1), []).append(stack.rank)
    return {
        tuple(ranks): [f"{name_spans(ranks)} {describe(stack, len(ranks))}", *(INDENT + line for line in stack.lines)]
        for stack, ranks in same.items()
    }


def describe(stack: RankStack, ranks: int = 1) -> str:
    """What a rank waits in, in one line, after its name."""
    if stack.why_not:
        return f"gave no stack: {stack.why_not}"
    return f"{'is' if ranks == 1 else 'are'} in {stack.waits or 'no Python of its main thread'}"


def answered(answer: Inspected) -> list[str]:
    """The answer of a rank that a person asked: in one line, and then each thread with its frames."""
    stack = RankStack(0, answer.waits, answer.lines, answer.why_not, answer.collective)
    return [f"{answer.who}; {describe(stack)}", *(INDENT + line for line in answer.lines)]


def unasked(report: Report) -> int:
    """How many ranks of the stall were not asked, where some were."""
    stall = report.stall
    return 0 if stall is None or not report.stacks else max(0, stall.count + stall.count_waiting - len(report.stacks))


def to_dict(report: Report) -> dict[str, Any] | None:
    stall = report.stall
    if stall is None:
        return None
    return {
        **pick(stall, "ranks waiting count count_waiting text"),
        "stacks": [
            {"rank": one.rank, "waits": one.waits, "text": describe(one), "lines": one.lines, "why_not": one.why_not}
            for one in report.stacks
        ],
        "unasked": unasked(report),
    }


def _shortened(stack: list[str], most: int) -> list[str]:
    if len(stack) - 1 <= most + 1:
        return stack
    return [*stack[: most + 1], f"{INDENT}and {len(stack) - 1 - most} more lines: report.txt has them"]
