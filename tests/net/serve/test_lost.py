"""Ranks that fall silent, with real processes: a dead one is lost, one that is merely busy is not."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from collectors import Running, until
from jobs import environment
from rankwatch_monitor.decide.core.report import Outcome, RankState

RANK = """
import ctypes, os, torch, rankwatch
model = torch.nn.Linear(1, 1)
watch = rankwatch.watch(model)
model(torch.ones(1)).backward()
print("ready", flush=True)
while os.read(0, 1):
    ctypes.PyDLL(None).read(0, bytes(1), 1)  # a call into C that holds the interpreter lock: no Python thread runs
    print("back", flush=True)
"""


@pytest.fixture
def rank(collector: Running, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", RANK],
        env=environment(RANKWATCH_CONNECTION=str(tmp_path / "connection.json"), RANK="0", WORLD_SIZE="1"),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def test_a_killed_rank_is_lost(collector: Running, rank: subprocess.Popen[str]) -> None:
    (run,) = collector.collector.ledger.runs.values()
    until(lambda: run.ranks[0].last_batch == 0)  # its batch was received
    rank.kill()
    until(lambda: collector.reports)
    (report,) = collector.reports
    assert (report.outcome, report.ranks[0].state) == (Outcome.LOST, RankState.LOST)
    assert "was lost: killed by SIGKILL; last seen in batch 0, frame 2, phase backward" in report.reason


@pytest.mark.slow
def test_a_rank_that_was_stopped_for_a_moment_and_is_then_killed_is_lost(
    collector: Running, rank: subprocess.Popen[str]
) -> None:
    (run,) = collector.collector.ledger.runs.values()
    rank.send_signal(signal.SIGSTOP)
    until(lambda: run.ranks[0].quiet)
    rank.kill()
    until(lambda: collector.reports)
    assert collector.reports[0].outcome is Outcome.LOST


def test_a_rank_that_keeps_the_interpreter_to_itself_is_not_lost(collector: Running, rank: subprocess.Popen[str]) -> None:
    assert rank.stdin is not None
    assert rank.stdout is not None
    (run,) = collector.collector.ledger.runs.values()
    print(end="g", file=rank.stdin, flush=True)
    until(lambda: run.ranks[0].quiet)
    print(end="b", file=rank.stdin, flush=True)
    assert rank.stdout.readline() == "back\n"
    until(lambda: not run.ranks[0].quiet)
    assert (run.ranks[0].state, collector.reports) == (RankState.RUNNING, [])
