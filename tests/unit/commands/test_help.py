"""What a person who types sees: examples that work, what was meant, and which runs and programs there are."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest

from rankwatch.errors import UsageError
from rankwatch_monitor.cli import ADMINISTRATORS, COMMANDS, _parser
from rankwatch_monitor.commands.arguments import named_run, no_run, runs_folder
from rankwatch_monitor.commands.collector import MEASURED, REACHED, STOPPED, TOLD
from rankwatch_monitor.commands.records import check_run
from rankwatch_monitor.serve.launcher import _found


@pytest.mark.parametrize("example", [example for _, *examples in COMMANDS.values() for example in examples])
def test_each_example_is_a_command_with_its_options(example: str) -> None:
    program, *arguments = shlex.split(example)
    assert program == "rankwatch"
    assert _parser().parse_args(arguments).function


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        _parser().parse_args([command, "--help"])
    assert ended.value.code == 0
    assert f"  rankwatch {command}" in capsys.readouterr().out.partition("example")[2]


def test_commands_for_administrators_have_their_own_heading(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _parser().parse_args(["--help"])
    usual, _, rest = capsys.readouterr().out.partition("commands for administrators:\n")
    assert [name for name in COMMANDS if f"\n    {name} " in f"\n{rest}"] == sorted(ADMINISTRATORS, key=list(COMMANDS).index)
    assert not [name for name in ADMINISTRATORS if f"\n    {name}" in usual]


@pytest.mark.parametrize("command", ["run", "collector"])
def test_many_options_are_shown_by_groups(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _parser().parse_args([command, "--help"])
    shown = capsys.readouterr().out
    alone = shown.partition("\noptions:\n")[2].partition("\n\n")[0]
    assert [line for line in alone.splitlines() if line.startswith("  -")] == [
        "  -h, --help            show this help message and exit"
    ]
    assert all(f"\n{group}:\n" in shown for group in (STOPPED, REACHED, TOLD, MEASURED))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["repotr"], "did you mean report?"),
        (["run", "--on-stal", "abort"], "did you mean --on-stall?"),
        (["report", "--htm", "x"], "did you mean --html?"),
        (["report", "a", "b", "--htm", "x", "-y"], "did you mean --html?"),
        (["run", "--stall=3", "--", "true"], "unrecognized arguments: --stall=3; did you mean --stall-after?"),
        (["run", "--on_stal", "abort"], "did you mean --on-stall?"),
        (["run", "--stall_after", "x"], "argument --stall-after: 'x': expected seconds"),
        (["doctor", "--check_timeout", "x"], "argument --check-timeout: 'x': expected seconds"),
        (["tune", "--check", "bach"], "did you mean batch?"),
        (["top", "--interval", "soon"], "argument --interval: 'soon': expected seconds"),
        (
            ["run", "--on-bad-step", "skip=9/3"],
            "expected abort, skip, or skip=N/M: at most N steps of the last M, with 0 < N < M",
        ),
        (["run", "--budget", "2"], "'2': expected a share from 0 to 1, such as 0.02"),
        (["run", "--every", "foo"], "expected a whole number K from 1 on"),
        (["list", "--quite-another-thing"], "unrecognized arguments: --quite-another-thing"),
    ],
)
def test_what_is_wrong_comes_first_with_what_was_meant(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        _parser().parse_args(arguments)
    first, *usage = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert "error:" in first
    assert first.endswith(said)
    assert usage[0].startswith("usage: rankwatch")


def test_choices_are_named_as_they_are_typed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _parser().parse_args(["tune", "--check", "foo"])
    first = capsys.readouterr().err.splitlines()[0].replace("'", "")  # Python 3.10 quotes them, and 3.13 does not
    assert first == "rankwatch tune: error: argument --check: invalid choice: foo (choose from async, batch, frame)"


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("run", "--on-verdict"),
        ("collector", "--archive"),
        ("collector", "--runs-dir"),
        ("run", "--on-stall"),
        ("tune", "--connection"),
        ("ui", "--host"),
    ],
)
def test_an_empty_value_is_refused_as_of_a_variable_that_is_not_set(
    command: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in ([option, ""], [f"{option}="]):
        with pytest.raises(SystemExit) as ended:
            _parser().parse_args([command, *words])
        assert ended.value.code == 2
        assert f"error: argument {option}: " in capsys.readouterr().err


def test_an_empty_name_of_a_run_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _parser().parse_args(["tune", "", "--every", "2"])  # without a name, of all runs
    assert "argument RUN: expected a value, not an empty one" in capsys.readouterr().err


def test_empty_values_that_mean_something() -> None:
    assert _parser().parse_args(["tune", "--modules", "", "--ignore="]).modules == ()
    assert _parser().parse_args(["run", "--", "sh", ""]).command[-1] == ""


def test_an_empty_variable_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["run", "true"]
    usual = _parser().parse_args(words)
    for name in ("ON_VERDICT", "ON_STALL", "HEARTBEAT", "ARCHIVE", "RUNS_DIR", "CONNECTION_FILE", "METRICS", "FRAMES"):
        monkeypatch.setenv(f"RANKWATCH_{name}", "")
    found = {**vars(_parser().parse_args(words)), "whole": usual.whole}
    assert found == vars(usual)


def put_run(folder: Path, time: float = 0.0) -> None:
    """``time``: when its record was written last."""
    folder.mkdir(parents=True)
    (folder / "run.db").touch()
    os.utime(folder / "run.db", (time, time))


def test_where_there_is_no_run_the_error_says_what_is_there_and_which_runs_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runs = Path("runs")
    monkeypatch.setenv("RANKWATCH_RUNS_DIR", "runs")
    put_run(runs / "train-0", 1.0)
    put_run(runs / "train-1", 2.0)
    (runs / "bare").mkdir()
    (runs / "latest").symlink_to("gone-0")
    Path("empty").mkdir()
    Path("file").touch()
    there = "in runs there are train-1, train-0"
    for given, said in (
        (runs / "bare", f"runs/bare has no run in it; {there}"),
        (Path("empty"), f"empty has no run in it; {there}"),
        (Path("file"), f"file is a file, and no run's folder; {there}"),
        (runs / "gone-0", f"no run runs/gone-0; {there}"),
        (tmp_path / "no" / "such", f"no run {tmp_path}/no/such; {there}"),
        (runs, "runs is no run's folder, but has those of train-1, train-0: give runs/train-1, say"),
    ):
        assert no_run(given, runs_folder()) == said
        with pytest.raises(UsageError) as raised:
            check_run(given)
        assert str(raised.value) == said


def test_a_run_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    put_run(tmp_path / "rankwatch-runs" / "train-0")
    assert named_run(Path("train-0")) == Path("rankwatch-runs/train-0")
    assert named_run(Path("rankwatch-runs/train-0")) == Path("rankwatch-runs/train-0")
    with pytest.raises(UsageError, match="no run train-1; in rankwatch-runs there is train-0"):
        named_run(Path("train-1"))
    (tmp_path / "train-0").mkdir()  # a path comes first
    assert named_run(Path("train-0")) == Path("train-0")
    monkeypatch.setenv("RANKWATCH_RUNS_DIR", str(tmp_path / "elsewhere"))
    with pytest.raises(UsageError, match="elsewhere there is none"):
        named_run(Path("nosuch"))


def test_of_many_runs_the_nearest_names_come_first_and_then_the_newest_runs(tmp_path: Path) -> None:
    for number in range(20):
        put_run(tmp_path / f"train-0.{number}", number)
    put_run(tmp_path / "base-0.30", 1.5)
    newest = ", ".join(f"train-0.{number}" for number in range(19, 12, -1))
    for name, said in (
        ("nosuch", f"{newest}, train-0.12, and 13 more"),
        ("base-0.31", f"base-0.30, {newest}, and 13 more; did you mean base-0.30?"),
        ("base-31", f"base-0.30, {newest}, and 13 more; did you mean base-0.30?"),
    ):
        assert no_run(tmp_path / name, runs_folder()) == f"no run {tmp_path / name}; in {tmp_path} there are {said}"


def test_a_program_is_looked_for_beside_the_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After `.venv/bin/pip install`, nothing is in PATH."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    torchrun = tmp_path / "torchrun"
    torchrun.write_text("#!/bin/sh\n")
    torchrun.chmod(0o700)
    assert _found(["torchrun", "train.py"], {"PATH": "/nowhere"}) == [str(torchrun), "train.py"]
    assert _found(["sh", "-c", "true"], {"PATH": "/bin"}) == ["sh", "-c", "true"]
    assert _found(["./train", "x"], {"PATH": "/nowhere"}) == ["./train", "x"]
    complaint = "cannot run accelerate launch: there is no program 'accelerate' in PATH, nor beside"
    with pytest.raises(UsageError, match=complaint):
        _found(["accelerate", "launch"], {"PATH": "/nowhere"})
