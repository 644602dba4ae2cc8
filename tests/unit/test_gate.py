"""The gate: which slow tests it runs, and what becomes of a test that fails."""

from __future__ import annotations

import subprocess
from datetime import date
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gate import second_tries, times
from gate.__main__ import Gate, changed_in
from gate.areas import AREAS, CORE
from gate.choice import BUDGET, SLICES, WORKERS, SlowFile, areas_of, choose, file_of, slices
from gate.results import Failure
from jobs import ROOT

SLOW = times.slow_files(times.read())
CORE_SECONDS = times.core_seconds(times.read())
NAMES = [file.name for file in SLOW]
WALL = {file.name: file.wall for file in SLOW}


def test_each_slow_file_has_an_area() -> None:
    assert areas_of([f"{source.rstrip('/')}/" for source in AREAS], NAMES) == set(NAMES)


def test_each_area_is_a_source_and_has_tests() -> None:
    files = [path.relative_to(times.TESTS).as_posix() for path in times.TESTS.rglob("test_*.py")]
    for source, tests in AREAS.items():
        assert (ROOT / source).exists(), source
        assert not [begin for begin in tests.split() if not any(file.startswith(begin) for file in files)], source


def test_each_test_of_the_core_exists() -> None:
    assert len(CORE) > 40
    for test in CORE.values():
        name = test.partition("::")[2].partition("[")[0]
        assert f"def {name}(" in (times.TESTS / file_of(test)).read_text(), test


def test_eight_slices_are_all_slow_files() -> None:
    parts = slices(SLOW)
    assert sorted(name for part in parts for name in part) == sorted(NAMES)
    costs = [sum(WALL[name] for name in part) for part in parts]
    assert max(costs) - min(costs) <= max(WALL.values()) + 0.001
    assert len(parts) == SLICES == 8


@given(
    changed=st.lists(st.sampled_from([*AREAS, "pyproject.toml", *(f"tests/{name}" for name in NAMES)])),
    turn=st.integers(0, 999),
)
def test_what_is_chosen_fits_the_budget(changed: list[str], turn: int) -> None:
    choice = choose(changed, turn, SLOW, CORE_SECONDS)
    whole = [*choice.areas, *choice.slice]
    assert sum(WALL[name] for name in whole) <= BUDGET + 0.001
    assert len(set(choice.tests)) == len(choice.tests)
    assert set(CORE.values()) <= {*choice.tests, *(test for test in CORE.values() if file_of(test) in whole)}
    assert areas_of(changed, NAMES) <= {*whole, *choice.left}


def test_a_change_of_what_all_rests_on_is_followed_by_more_than_one_slice() -> None:
    narrow, wide = (choose([path], 3, SLOW, {}) for path in ("LICENSE", "tests/jobs.py"))
    assert (narrow.areas, wide.areas) == ((), ())
    assert set(narrow.slice) < set(wide.slice)
    assert {*wide.slice, *wide.left} == set(NAMES)


def test_a_slow_test_that_runs_alone_takes_all_workers_time() -> None:
    assert SlowFile("a", 30.0, is_alone=True).wall == WORKERS * SlowFile("a", 30.0, is_alone=False).wall


def test_the_change_is_what_was_committed_since_the_last_landing(tmp_path: Path) -> None:
    def commit(name: str, hour: int) -> None:
        (tmp_path / name).write_text("")
        day = f"2026-11-26T{hour:02}:00:00Z"
        who = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a"}
        subprocess.run(["git", "add", name], cwd=tmp_path, check=True)
        command = ["git", "commit", "-qm", name]
        subprocess.run(command, cwd=tmp_path, check=True, env={**who, "GIT_COMMITTER_DATE": day, "GIT_AUTHOR_DATE": day})

    subprocess.run(["git", "init", "-q", "-b", "main", str(tmp_path)], check=True)
    commit("first", 1)
    assert changed_in(tmp_path) == ["first"]
    commit("second", 10)
    commit("third", 11)
    assert changed_in(tmp_path) == ["second", "third"]
    subprocess.run(["git", "branch", "landed", "HEAD~1"], cwd=tmp_path, check=True)
    subprocess.run(["git", "branch", "-q", "--set-upstream-to", "landed"], cwd=tmp_path, check=True)
    assert changed_in(tmp_path) == ["third"]


# --- a second try ------------------------------------------------------------------------------------------------------


class Project:
    """A folder with tests, each of which fails as often as its name says."""

    def __init__(self, folder: Path, *fails: int) -> None:
        (folder / "tests").mkdir()
        (folder / "parts").write_text("packages\t3\n")
        body = ["import pathlib"]
        for number, times_ in enumerate(fails):
            body.append(
                f"def test_{number}():\n    tries = pathlib.Path('tries_{number}')\n"
                f"    tries.write_text(tries.read_text() + '.' if tries.exists() else '.')\n"
                f"    assert len(tries.read_text()) > {times_}, 'the machine was busy'\n"
            )
        (folder / "tests" / "test_some.py").write_text("\n".join(body))
        self.memory = folder / "tests" / "second-tries.md"
        self.gate = Gate(folder, folder, changed=[])
        self.is_green = self.gate.run("slow")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_what_passes_at_the_second_try_is_told_and_remembered(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    project = Project(here, 0, 1)
    assert project.is_green
    project.gate.close()
    *parts, told, counts = capsys.readouterr().out.splitlines()
    assert told == "PASSED AT THE SECOND TRY: tests/test_some.py::test_1 (first: AssertionError: the machine was busy)"
    assert counts == "2 passed, 0 failed, 0 skipped"
    assert "packages" in "\n".join(parts)
    assert "slow-again" in "\n".join(parts)
    (row,) = project.memory.read_text().splitlines()
    assert row.endswith("| `tests/test_some.py::test_1` | AssertionError: the machine was busy |")


def test_what_fails_twice_is_red(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    project = Project(here, 0, 2)
    assert not project.is_green
    project.gate.close()
    *_, failed, counts = capsys.readouterr().out.splitlines()
    assert failed == "FAILED: tests/test_some.py::test_1 (AssertionError: the machine was busy)"
    assert counts == "1 passed, 1 failed, 0 skipped"
    assert not project.memory.exists()


def test_a_step_that_comes_to_no_test_is_red(here: Path) -> None:
    (here / "parts").write_text("")
    assert not Gate(here, here, []).judge("quick", 1)
    (here / "test_broken.py").write_text("import nothing_of_that_name")
    assert not Gate(here, here, []).run("slow")


@pytest.mark.parametrize(
    ("count", "changed", "may"),
    [
        (3, "agent/rankwatch/doctor/clock.py", True),
        (4, "agent/rankwatch/doctor/clock.py", False),
        (1, "monitor/rankwatch_monitor/views/ui/page.js", False),
        (1, "tests/e2e/test_page.py", False),
    ],
)
def test_three_failures_outside_of_the_change_have_a_second_try(count: int, changed: str, may: bool) -> None:
    failures = [Failure(f"tests/e2e/test_page.py::test_{number}", "why") for number in range(count)]
    assert second_tries.may_be_tried_again(failures, [changed]) is may


def test_a_third_entry_is_a_failure() -> None:
    failure = Failure("tests/a.py::test_b[x|y]", "it `was` | so")
    row = second_tries.entry(failure, date(2026, 11, 26))
    assert second_tries.too_often("\n".join([row] * 2)) == []
    assert second_tries.too_often("\n".join(["# Head", *[row] * 3])) == [failure.test]


def test_no_test_needed_a_second_try_three_times() -> None:
    assert second_tries.too_often((times.TESTS / "second-tries.md").read_text()) == []
