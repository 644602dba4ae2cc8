"""What a check found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..shared.str_enum import StrEnum


class State(StrEnum):
    """How a check went; FAIL alone makes the exit code 1."""

    OK = "ok"
    SKIP = "skip"
    WARN = "warn"
    FAIL = "fail"


SEVERITY = {state: level for level, state in enumerate(State)}


@dataclass(frozen=True, slots=True)
class Finding:
    """One check's result on one rank: what was found, what to try, and what was measured (seconds, bytes per second)."""

    check: str
    state: State
    found: str
    advice: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        figures = {"figures": dict(self.figures)} if self.figures else {}
        return {"check": self.check, "state": self.state.value, "found": self.found, "try": self.advice, **figures}

    @staticmethod
    def from_json(body: Mapping[str, Any]) -> Finding:
        return Finding(body["check"], State(body["state"]), body["found"], body["try"], body.get("figures", {}))


def ok(check: str, found: str, **figures: float) -> Finding:
    return Finding(check, State.OK, found, figures=figures)


def skip(check: str, found: str) -> Finding:
    return Finding(check, State.SKIP, found)


def warn(check: str, found: str, advice: str) -> Finding:
    return Finding(check, State.WARN, found, advice)


def fail(check: str, found: str, advice: str = "") -> Finding:
    return Finding(check, State.FAIL, found, advice)
