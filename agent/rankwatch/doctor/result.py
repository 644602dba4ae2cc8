"""The result of a check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..shared.str_enum import StrEnum


class CheckState(StrEnum):
    """How a check went. Only FAIL makes the exit code 1."""

    OK = "ok"
    SKIP = "skip"
    WARN = "warn"
    FAIL = "fail"


SEVERITY = {state: level for level, state in enumerate(CheckState)}


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One check's result on one rank: what it found, what to try, and its figures (seconds, bytes per second)."""

    check: str
    state: CheckState
    found: str
    advice: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        figures = {"figures": dict(self.figures)} if self.figures else {}
        return {"check": self.check, "state": self.state.value, "found": self.found, "try": self.advice, **figures}

    @staticmethod
    def from_json(body: Mapping[str, Any]) -> CheckResult:
        return CheckResult(body["check"], CheckState(body["state"]), body["found"], body["try"], body.get("figures", {}))


def ok(check: str, found: str, **figures: float) -> CheckResult:
    return CheckResult(check, CheckState.OK, found, figures=figures)


def skip(check: str, found: str) -> CheckResult:
    return CheckResult(check, CheckState.SKIP, found)


def warn(check: str, found: str, advice: str) -> CheckResult:
    return CheckResult(check, CheckState.WARN, found, advice)


def fail(check: str, found: str, advice: str = "") -> CheckResult:
    return CheckResult(check, CheckState.FAIL, found, advice)
