"""The tab key in a real bash, on a real terminal."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

import commands
from terminals import Tmux

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_bash_completes_what_is_typed(tmp_path: Path) -> None:
    for run in ("train-0", "gan-0"):
        (tmp_path / "rankwatch-runs" / run).mkdir(parents=True)
        (tmp_path / "rankwatch-runs" / run / "run.db").touch()
    (tmp_path / "rc").write_text(f"cd {tmp_path}\nPS1='> '\n{commands.printed('completion', 'bash')}")
    with closing(Tmux(["bash", "--noprofile", "--rcfile", str(tmp_path / "rc"), "-i"])) as terminal:
        terminal.await_text(">")
        terminal.press("rankwatch rep", "Tab")
        terminal.await_text("> rankwatch rep")
        terminal.press("o", "Tab", "tr", "Tab", "--ht", "Tab", "ra", "Tab")
        terminal.await_text("> rankwatch report train-0 --html rankwatch-runs/")
