"""The status line of ``rankwatch run``, on real terminals."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from jobs import Training, forked
from rankwatch_monitor.serve.printer import ERASE
from terminals import Pty, Tmux

pytestmark = pytest.mark.e2e


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    training = Training(tmp_path)
    yield training
    training.overflow()


@pytest.mark.slow
def test_run_shows_a_line_and_leaves_a_clean_terminal(training: Training) -> None:
    with closing(Tmux(training.job, FAULT_FILE=training.env["FAULT_FILE"])) as terminal:
        screen = terminal.await_text("  change +")
        (line,) = [line for line in screen.splitlines() if "  change +" in line]
        assert line.startswith("rankwatch: train-0  2/2 ranks  batch ")
        training.overflow()
        terminal.await_text("ended 77")
    with closing(Pty([*training.command, "--", *forked("train.py", "healthy")], training.env)) as bare:
        assert bare.end() == 0
    shown, _, after = bare.seen.decode().rpartition(ERASE)
    assert "rankwatch: train-0.2  " in shown
    assert "rankwatch: run train-0.2 finished" in after
    assert " ranks  batch" not in after


@pytest.mark.slow
@pytest.mark.parametrize("how", ["option", "environment", "dumb"])
def test_run_shows_no_line_where_it_is_disabled(training: Training, how: str) -> None:
    env = {**training.env, **({"RANKWATCH_STATUS": "0"} if how == "environment" else {})}
    env_command = ["env", "TERM=dumb"] if how == "dumb" else []
    options = ["--no-status"] if how == "option" else []
    command = [*env_command, *training.command, *options, "--", *forked("train.py", "healthy")]
    with closing(Pty(command, env)) as terminal:
        assert terminal.end() == 0
    assert ERASE.encode() not in terminal.seen
    assert b"run train-0 finished" in terminal.seen
    assert b"is no option" not in terminal.seen
