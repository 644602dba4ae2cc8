"""How long the tests of each file take: ``tests/times.tsv``, which ``.ci/run all`` writes.

A row is seconds, kind and file. The kinds are ``quick``, ``slow``, and ``core``: what the core takes of ``slow``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from .areas import CORE
from .choice import NEW, SlowFile, file_of

TESTS = Path(__file__).parent.parent
TIMES = TESTS / "times.tsv"

Times = Mapping[tuple[str, str], float]
"""By kind and file."""


def read(file: Path = TIMES) -> Times:
    rows = (line.split("\t") for line in file.read_text().splitlines())
    return {(kind, name): float(seconds) for seconds, kind, name in rows}


def write(file: Path, kinds: Mapping[str, Mapping[str, float]]) -> None:
    """``kinds``: by ``quick`` and ``slow``, the seconds of each test."""
    sums: Counter[tuple[str, str]] = Counter()
    for kind, tests in kinds.items():
        for test, seconds in tests.items():
            name = test.removeprefix("tests/")
            sums[kind, file_of(name)] += seconds  # type: ignore[assignment]  # a Counter of seconds
            if kind == "slow" and is_core(name):
                sums["core", file_of(name)] += seconds  # type: ignore[assignment]
    rows = sorted(
        ((round(seconds, 1), kind, name) for (kind, name), seconds in sums.items()), key=lambda row: (-row[0], row)
    )
    file.write_text(
        "".join(f"{seconds}\t{kind}\t{name}\n" for seconds, kind, name in rows if seconds >= 0.1 or kind == "slow")
    )


def is_core(test: str) -> bool:
    """A test stands for all its parameters, unless the table names one."""
    return test in CORE.values() or test.partition("[")[0] in CORE.values()


def test_files(marker: str) -> set[str]:
    """The test files with tests that have a marker."""
    marked = re.compile(rf"\bmark\.{marker}\b")
    return {str(path.relative_to(TESTS)) for path in TESTS.rglob("test_*.py") if marked.search(path.read_text())}


def slow_files(times: Times) -> list[SlowFile]:
    alone = test_files("alone")
    return [SlowFile(name, times.get(("slow", name), NEW), name in alone) for name in sorted(test_files("slow"))]


def core_seconds(times: Times) -> dict[str, float]:
    return {file_of(test): times.get(("core", file_of(test)), NEW) for test in CORE.values()}
