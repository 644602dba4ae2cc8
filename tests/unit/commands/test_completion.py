"""``rankwatch completion``: what a real bash completes by its script. tests/e2e/test_completion.py presses the key."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import commands
from jobs import environment
from rankwatch_monitor.cli import COMMANDS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("user")
    for run in ("train-0", "train-1", "$(touch evil)", "a folder"):
        (folder / "rankwatch-runs" / run).mkdir(parents=True)
        if run != "a folder":
            (folder / "rankwatch-runs" / run / "run.db").touch()
    (folder / "rankwatch-runs" / "latest").symlink_to("train-1")
    (folder / "elsewhere" / "gan-0").mkdir(parents=True)
    (folder / "elsewhere" / "gan-0" / "run.db").touch()
    (folder / "file.toml").touch()
    (folder / "script").write_text(commands.printed("completion", "bash"))
    return folder


def completed(folder: Path, *words: str, **env: str) -> list[str]:
    """What bash offers for the last word."""
    code = 'source ./script; COMP_WORDS=(rankwatch "$@"); COMP_CWORD=$#; _shtab_rankwatch; printf "%s\\n" "${COMPREPLY[@]}"'
    done = subprocess.run(
        ["bash", "-c", code, "bash", *words], cwd=folder, env=environment(**env), capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([""], list(COMMANDS)),
        (["rep"], ["report", "replay"]),
        (["report", "--ht"], ["--html"]),
        (["report", "tr"], ["train-0", "train-1"]),
        (["diff", "train-0", "la"], ["latest"]),
        (["tune", "train-0", "--che"], ["--check"]),
        (["tune", "train-0", "--check", ""], ["async", "batch", "frame"]),
        (["run", "--on-stall", ""], ["warn", "abort"]),
        (["run", "--no"], ["--no-status"]),  # and not --no_status
        (["run", "--rankwatch-config", "f"], ["file.toml"]),
        (["list", "ra"], ["rankwatch-runs"]),
        (["report", "rankwatch-runs/tr"], ["rankwatch-runs/train-0", "rankwatch-runs/train-1"]),
        (["completion", "z"], ["zsh"]),
    ],
)
def test_bash_completes(folder: Path, words: list[str], expected: list[str]) -> None:
    assert sorted(completed(folder, *words)) == sorted(expected)


def test_a_hostile_name_is_not_obeyed(folder: Path) -> None:
    assert "$(touch evil)" in completed(folder, "report", "")
    assert not (folder / "evil").exists()


def test_runs_are_looked_for_where_the_environment_says(folder: Path) -> None:
    assert completed(folder, "report", "g", RANKWATCH_RUNS_DIR="elsewhere") == ["gan-0"]


def test_fish_completes(folder: Path) -> None:
    if shutil.which("fish") is None:
        pytest.skip("there is no fish")
    (folder / "script.fish").write_text(commands.printed("completion", "fish"))
    code = 'source script.fish; complete -C "rankwatch report tr"; complete -C "rankwatch run --on-stall w"'
    done = subprocess.run(["fish", "-c", code], cwd=folder, env=environment(), capture_output=True, text=True, check=True)
    assert [line.partition("\t")[0] for line in done.stdout.splitlines()] == ["train-0", "train-1", "warn"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_can_read_their_script(folder: Path, shell: str) -> None:
    text = commands.printed("completion", shell)
    assert "rankwatch_run_dirs" in text
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell}")
    (folder / f"script.{shell}").write_text(text)
    done = subprocess.run([shell, "-n", str(folder / f"script.{shell}")], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
