"""What pytest said of its tests, read from its JUnit file."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Failure:
    """A test that failed, by the id that pytest takes, and the first line of its error."""

    test: str
    error: str


@dataclass(frozen=True)
class Results:
    """``seconds``: by test, its fixtures included."""

    passed: int
    skipped: int
    failures: tuple[Failure, ...]
    seconds: dict[str, float]


def read(file: Path) -> Results:
    """Raises OSError where pytest wrote no file: it never came to its tests."""
    counts: Counter[str] = Counter()
    failures: dict[str, Failure] = {}
    seconds: dict[str, float] = {}
    for case in ElementTree.parse(file).iter("testcase"):
        # A file that cannot be imported has no attribute ``file``; its name stands in ``name``.
        test = f"{case.get('file')}::{case.get('name')}" if case.get("file") else case.get("name", "")
        seconds[test] = seconds.get(test, 0.0) + float(case.get("time", 0))
        wrong = [child for child in case if child.tag in ("failure", "error")]
        if wrong:
            failures[test] = Failure(test, (wrong[0].get("message") or "no reason given").splitlines()[0][:200])
        else:
            counts["skipped" if case.find("skipped") is not None else "passed"] += 1
    return Results(counts["passed"], counts["skipped"], tuple(failures.values()), seconds)
