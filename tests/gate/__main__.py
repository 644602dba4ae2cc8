"""The gate after its first steps: judges the quick tests that README's command has run, and runs the slow ones.

    python -m gate RESULTS CHECKOUT CODE [all]

``RESULTS``: the folder of the JUnit files, of which ``quick.xml`` is there, and of ``parts``, what the steps before took.
``CHECKOUT``: the working tree that is tested; in it stand ``tests/second-tries.md`` and ``tests/times.tsv`` for those who commit.
``CODE``: what the quick tests exited with.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from . import second_tries, times
from .choice import WORKERS, Choice, choose
from .results import Failure, Results, read

HOURS = 6
"""Where no branch says what has landed, the commits of so many hours before the newest one are the change."""

EMPTY_TREE = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"
"""git's name of a tree without files: with no commit before the change, all files are the change."""


def git(folder: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=False).stdout.strip()


def changed_in(checkout: Path) -> list[str]:
    """The paths that differ from what has landed: from the branch that this one follows, else from what is ``HOURS`` old."""
    base = git(checkout, "merge-base", "HEAD", "@{upstream}")
    head = git(checkout, "rev-parse", "HEAD")
    if base in ("", head):
        newest = int(git(checkout, "log", "-1", "--format=%ct"))
        base = git(checkout, "rev-list", "-1", f"--before={newest - HOURS * 3600}", "HEAD")
    return git(checkout, "diff", "--name-only", base or EMPTY_TREE, "HEAD").splitlines()


@dataclass
class Gate:
    """``told``: what passed only at the second try. ``passed`` and so on: over all steps."""

    results: Path
    checkout: Path
    changed: list[str]
    told: list[Failure] = field(default_factory=list)
    failed: list[Failure] = field(default_factory=list)
    passed: int = 0
    skipped: int = 0
    parts: list[tuple[str, float]] = field(default_factory=list)
    seconds: dict[str, dict[str, float]] = field(default_factory=dict)

    def run(self, step: str, *options: str) -> bool:
        """Runs the tests of a step; whether it is green, at the first try or the second."""
        began = time.monotonic()
        code = self._pytest(step, *options)
        self.parts.append((step, time.monotonic() - began))
        return self.judge(step, code)

    def judge(self, step: str, code: int) -> bool:
        """Judges a step by its JUnit file, ``code`` being what pytest exited with. Exit code 5: it had no test to run."""
        if code == 5:
            return True
        try:
            found = read(self._file(step))
        except OSError:
            print(f"{step}: pytest came to no test, see above")
            return False
        self._count(step, found)
        if not found.failures:
            return code == 0
        if not second_tries.may_be_tried_again(found.failures, self.changed):
            self.failed += found.failures
            return False
        print(
            f"{step}: a second try, one at a time, of {len(found.failures)} that the change cannot have broken", flush=True
        )
        return self._again(step, found)

    def _again(self, step: str, first: Results) -> bool:
        again = f"{step}-again"
        began = time.monotonic()
        code = self._pytest(again, "-m", "", "-n", "0", *(failure.test for failure in first.failures))
        self.parts.append((again, time.monotonic() - began))
        second = read(self._file(again))
        self.passed += second.passed
        self.failed += second.failures
        if code != 0:
            return False
        self.told += first.failures
        today = datetime.now(timezone.utc).date()
        rows = [second_tries.entry(failure, today) for failure in first.failures]
        second_tries.remember(self.checkout / "tests" / "second-tries.md", rows)
        return True

    def _count(self, step: str, found: Results) -> None:
        self.passed += found.passed
        self.skipped += found.skipped
        kind = "quick" if step == "quick" else "slow"
        self.seconds.setdefault(kind, {}).update(found.seconds)

    def _pytest(self, step: str, *options: str) -> int:
        junit = [f"--junitxml={self._file(step)}", "-o", "junit_family=xunit1"]
        return subprocess.run([sys.executable, "-m", "pytest", *junit, *options], check=False).returncode

    def _file(self, step: str) -> Path:
        return self.results / f"{step}.xml"

    def close(self) -> None:
        """The last lines of the log: the time of each part, what passed at the second try, and the counts."""
        before = (line.split("\t") for line in (self.results / "parts").read_text().splitlines())
        parts = [*((name, float(seconds)) for name, seconds in before), *self.parts]
        parts.append(("all", sum(seconds for _, seconds in parts)))
        print("\n".join(["", *(f"{seconds:6.0f} s  {name}" for name, seconds in parts)]))
        for failure in self.failed:
            print(f"FAILED: {failure.test} ({failure.error})")
        for failure in self.told:
            print(f"PASSED AT THE SECOND TRY: {failure.test} (first: {failure.error})")
        print(f"{self.passed} passed, {len(self.failed)} failed, {self.skipped} skipped")


def describe(choice: Choice) -> str:
    """What is run and what is not, for the log."""
    lines = {
        f"core, {len(choice.core)} tests": (),
        "areas of the change": choice.areas,
        "slice": choice.slice,
        "no room for these, which `.ci/run all` runs": choice.left,
    }
    return "\n".join(" ".join([f"{what}:", *files]) for what, files in lines.items())


def main() -> int:
    results, checkout = (Path(word).resolve() for word in sys.argv[1:3])
    gate = Gate(results, checkout, changed_in(checkout))
    try:
        return 0 if gate.judge("quick", int(sys.argv[3])) and _slow_is_green(gate, everything=sys.argv[4:] == ["all"]) else 1
    finally:
        gate.close()


def _slow_is_green(gate: Gate, *, everything: bool) -> bool:
    tests: list[str] = []
    if not everything:
        known = times.read()
        files = times.slow_files(known)
        turn = int(git(gate.checkout, "rev-list", "--count", "HEAD"))
        choice = choose(gate.changed, turn, files, times.core_seconds(known))
        print(describe(choice), flush=True)
        tests = [f"tests/{test}" for test in choice.tests]
    steps = {"slow": ("slow and not alone", str(WORKERS)), "alone": ("slow and alone", "0")}
    is_green = True
    for step, (marked, workers) in steps.items():
        if is_green or everything:
            is_green = gate.run(step, "-m", marked, "-n", workers, *tests) and is_green
    if everything:
        times.write(gate.checkout / "tests" / "times.tsv", gate.seconds)
    return is_green


if __name__ == "__main__":
    sys.exit(main())
