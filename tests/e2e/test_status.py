"""The status line of ``rankwatch run``, on real terminals."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path

import pytest

from jobs import Training, forked_apart
from rankwatch_monitor.serve.printer import FREE
from terminals import Pty, Tmux

pytestmark = pytest.mark.e2e


@pytest.mark.slow
def test_run_shows_a_line_and_leaves_a_clean_terminal(training: Training) -> None:
    with closing(Tmux(training.job, FAULT_FILE=training.env["FAULT_FILE"])) as terminal:
        screen = terminal.await_text("  loss ")
        (line,) = [line for line in screen.splitlines() if "  loss " in line]
        assert line.startswith("rankwatch: train-0  2/2 ranks running  batch ")
        training.overflow()
        terminal.await_text("ended 77")
    with closing(Pty([*training.command, "--", *forked_apart("train.py", "healthy")], training.env)) as bare:
        assert bare.end() == 0
    shown, _, after = bare.seen.decode().rpartition(FREE)
    assert "rankwatch: train-0.2  " in shown
    assert "rankwatch: run train-0.2 finished" in after
    assert " ranks running  batch" not in after


@pytest.mark.slow
@pytest.mark.parametrize("how", ["option", "environment", "dumb"])
def test_run_shows_no_line_where_it_is_disabled(training: Training, how: str) -> None:
    env = {**training.env, **({"RANKWATCH_STATUS": "0"} if how == "environment" else {})}
    env_command = ["env", "TERM=dumb"] if how == "dumb" else []
    options = ["--no-status"] if how == "option" else []
    command = [*env_command, *training.command, *options, "--", *forked_apart("train.py", "healthy")]
    with closing(Pty(command, env)) as terminal:
        assert terminal.end() == 0
    assert FREE.encode() not in terminal.seen
    assert b"run train-0 finished" in terminal.seen
    assert b"is no option" not in terminal.seen


SHARED = """
import os, subprocess, sys
from rankwatch_monitor.serve.printer import Printer

def rank(text):
    subprocess.run(["printf", "%b", text])

def print_all(text=""):
    if text:
        printer.print(sys.stderr, text)
    for _ in range(2):  # with the second one, all before it is written
        printer.print(pipe, ".")
        os.read(ours, 1)

ours, its = os.pipe()
pipe = os.fdopen(its, "w")
with Printer(is_shared=True) as printer:
    for step in range(30):
        rank(f"step {step}\\n")
    printer.show("rankwatch: train-0  batch 7")
    print_all()
    rank("  5%|#")
    print_all("12:00:00 INFO rankwatch: a line of the log\\n")
    rank("\\r 10%|##")
    printer.show("rankwatch: train-0  batch 8")
    print_all()
    rank("\\r 15%|###")
    print_all("12:00:01 INFO rankwatch: another line\\n")
    rank("\\r100%|####\\n" + "x" * 80)
    print_all("12:00:02 INFO rankwatch: after a full row\\n")
    rank("looked at\\n")
    input()
    rank("no end of line")
print("rankwatch: run train-0 finished")
input()
"""


@pytest.mark.parametrize(("width", "height"), [(80, 24), (60, 15)])
def test_ranks_and_the_line_share_a_terminal(tmp_path: Path, width: int, height: int) -> None:
    (tmp_path / "shared.py").write_text(SHARED)
    with closing(Tmux([sys.executable, str(tmp_path / "shared.py")], width=width, height=height)) as terminal:
        rows = [row.rstrip() for row in terminal.await_text("looked at").splitlines()]
        assert rows[-1] == "rankwatch: train-0  batch 8"
        told = rows[rows.index("step 29") + 1 : rows.index("looked at")]
        full = ["x" * 80] if width >= 80 else ["x" * width, "x" * (80 - width)]
        assert told == [
            "  5%|#",
            "12:00:00 INFO rankwatch: a line of the log",
            " 15%|###",
            "12:00:01 INFO rankwatch: another line",
            "100%|####",
            *full,
            "12:00:02 INFO rankwatch: after a full row",
        ]
        assert sum("batch" in row for row in rows) == 1
        terminal.press("Enter")
        rows = terminal.await_text("finished").splitlines()
        at = rows.index("rankwatch: run train-0 finished")
        assert rows[at - 1].rstrip() == "no end of line"
        assert not any("batch" in row for row in rows)
        terminal.press("Enter")
        terminal.await_text("ended 0")
        terminal.await_text(f"rows {height};")  # all of them scroll again
