"""With what a run was made: what its report says of command, options, commit and versions."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from rankwatch.api import made_with as module
from rankwatch.api.made_with import made_with
from rankwatch.shared.types.config import Config


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "train.py"
    path.write_text("lr = 1\n")
    monkeypatch.setattr(sys, "argv", [str(path), "--lr", "1e-3"])
    module._commit.cache_clear()
    yield path
    module._commit.cache_clear()


def told(**options: object) -> dict[str, str]:
    lines = made_with(Config(**options))  # type: ignore[arg-type]
    return {name: text for name, _, text in (line.partition(": ") for line in lines)}


def git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=ann", "-c", "user.email=ann@localhost")
    return subprocess.run(["git", *who, "-C", folder, *words], check=True, capture_output=True, text=True).stdout.strip()


def test_command_options_and_versions(script: Path) -> None:
    found = told(every=10, gradients=True)
    assert found["command"] == f"{script} --lr 1e-3"
    assert found["options"] == "every=10, gradients=True"
    assert f"torch {torch.__version__}" in found["versions"]
    assert "options" not in told()
    assert not {"commit", "wandb"} & found.keys()  # it is no repository, and no run of W&B is open


@pytest.mark.parametrize("is_dirty", [False, True])
def test_the_commit_and_whether_it_is_what_ran(script: Path, is_dirty: bool) -> None:
    git(script.parent, "init", "-q")
    git(script.parent, "add", ".")
    git(script.parent, "commit", "-qm", "Train")
    if is_dirty:
        script.write_text("lr = 2\n")
    head = git(script.parent, "rev-parse", "--short=8", "HEAD")
    assert told()["commit"] == f"{head}, with changes" * is_dirty + head * (not is_dirty)


def test_the_run_of_wandb_that_is_open(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = ModuleType("wandb")
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    assert "wandb" not in told()
    wandb.run = SimpleNamespace(url="https://wandb.ai/ann/lm/runs/1")  # type: ignore[attr-defined]
    assert told()["wandb"] == "https://wandb.ai/ann/lm/runs/1"
