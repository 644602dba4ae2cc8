"""Which slow tests the gate runs: the core, the areas of the change, and a slice that turns with the commits.

Files are named below ``tests/``; sources, below the root of the repository. Seconds are those of ``tests/times.tsv``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .areas import AREAS, CORE, WIDE

WORKERS = 3
"""Of slow tests at once on two cores. A job has two to four ranks: with four workers the machine had a load of 8 to 16."""
BUDGET = 600.0
"""Seconds of wall time for the slow tests. The steps before them take some six minutes, and the gate at most 25."""
SLICES = 8
NEW = 20.0
"""Seconds of a file that was never timed."""


@dataclass(frozen=True)
class SlowFile:
    """``seconds``: of its slow tests, one after another. ``is_alone``: they fill or time the machine, and run serially."""

    name: str
    seconds: float
    is_alone: bool

    @property
    def wall(self) -> float:
        return self.seconds if self.is_alone else self.seconds / WORKERS


@dataclass(frozen=True)
class Choice:
    """``core``: tests. ``areas``, ``slice``: files. ``left``: files for which there was no room."""

    core: tuple[str, ...]
    areas: tuple[str, ...]
    slice: tuple[str, ...]
    left: tuple[str, ...]

    @property
    def tests(self) -> list[str]:
        whole = (*self.areas, *self.slice)
        return [*whole, *(test for test in self.core if file_of(test) not in whole)]


def file_of(test: str) -> str:
    return test.partition("::")[0]


def areas_of(changed: Iterable[str], files: Iterable[str]) -> set[str]:
    """The test files that a change of these paths may break, of ``files``. A test file is its own area."""
    begins = tuple(begin for path in set(changed) for begin in _begins(path))
    return {file for file in files if file.startswith(begins)}


def _begins(path: str) -> list[str]:
    listed = [begin for source, tests in AREAS.items() if path.startswith(source) for begin in tests.split()]
    own = [path.removeprefix("tests/")] if "/test_" in path else []
    folder = re.match(r"(?:agent/rankwatch|monitor/rankwatch_monitor)/(\w+/)", path)
    return [*listed, *own, *(f"{kind}/{folder[1]}" for kind in ("unit", "torch", "net") if folder)]


def is_wide(path: str) -> bool:
    """Whether all tests rest on a path."""
    return path.startswith(WIDE) and "/test_" not in path and path.endswith((".py", ".ci/run", ".toml", ".txt"))


def slices(files: Iterable[SlowFile]) -> list[list[str]]:
    """All files in ``SLICES`` parts of about equal cost: the longest first, each to the part that has least."""
    parts: list[list[SlowFile]] = [[] for _ in range(SLICES)]
    for file in sorted(files, key=lambda file: (-file.wall, file.name)):
        min(parts, key=lambda part: sum(one.wall for one in part)).append(file)
    return [[file.name for file in part] for part in parts]


def choose(changed: Sequence[str], turn: int, files: Sequence[SlowFile], core_seconds: Mapping[str, float]) -> Choice:
    """What fits into ``BUDGET``: the core in any case, then the areas, then the slice whose turn it is.

    A wide change goes on with the slices that follow, as long as there is room. The count of commits is the ``turn``.
    """
    by_name = {file.name: file for file in files}
    room = BUDGET - sum(core_seconds.values()) / WORKERS
    chosen: set[str] = set()

    def take(names: Iterable[str]) -> tuple[str, ...]:
        nonlocal room
        taken = []
        for name in names:
            cost = by_name[name].wall - core_seconds.get(name, 0.0) / WORKERS
            if name not in chosen and cost <= room:
                room -= cost
                chosen.add(name)
                taken.append(name)
        return tuple(taken)

    parts = slices(files)
    turned = [parts[(turn + after) % SLICES] for after in range(SLICES)]
    in_turn = [name for part in turned for name in part]
    touched = areas_of(changed, by_name)
    own = [name for name in in_turn if f"tests/{name}" in changed]
    areas = take([*own, *(name for name in in_turn if name in touched)])
    follows = in_turn if any(is_wide(path) for path in changed) else turned[0]
    turning = take(follows)
    left = tuple(name for name in in_turn if (name in touched or name in follows) and name not in chosen)
    return Choice(tuple(CORE.values()), areas, turning, left)
