"""Ranks that leave out steps, over real sockets, and a collector that is killed meanwhile: each step is told once."""

from __future__ import annotations

import json
import logging
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import makers
import ports
from collectors import PATIENCE, Running, until
from jobs import RANKWATCH, environment
from left_out import end_of, guilty, innocent
from links import Rank
from rankwatch.shared.link import connection
from rankwatch.shared.link.connection import Connection
from rankwatch_monitor.decide.core.effects import Trouble
from rankwatch_monitor.decide.core.report import Outcome
from rankwatch_monitor.record.runs import read_row

pytestmark = pytest.mark.timeout(2 * PATIENCE)


def connected(to: Connection) -> tuple[Rank, Rank]:
    ranks = Rank(to, 0, 2), Rank(to, 1, 2)
    for rank in ranks:
        assert rank.link.start()
    return ranks


def leave_out(ranks: tuple[Rank, Rank], step: int, culprit: int) -> None:
    """As ranks do: before the step they tell that it is left out, after it the culprit looks closer, and all train on."""
    for rank in ranks:
        rank.moment = end_of(step)
    ranks[culprit].link.send_trip(guilty(step, within=30.0, line=step))
    ranks[1 - culprit].link.send_trip(innocent(step))
    ranks[culprit].link.send_closeup(makers.closeup(operator=None))
    for rank in ranks:
        rank.link.send_batch(makers.table(), makers.summary(step + 1))
        rank.moment = end_of(step + 1)


def told(collector: Running) -> list[tuple[int, int, bool]]:
    (run,) = collector.collector.ledger.runs.values()
    return [(one.step, one.verdict.tripped, one.closeup is not None) for one in run.report().skipped]


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    texts = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    return [text for text in texts if "was left out" in text]


def end(ranks: tuple[Rank, Rank]) -> None:
    for rank in ranks:
        rank.link.close("finished")
    assert not any(rank.aborted.is_set() for rank in ranks)


def written(folder: Path) -> list[tuple[int, int]]:
    path = folder / "runs" / "train-0" / "report.json"
    until(lambda: path.exists() and json.loads(path.read_text())["outcome"])
    report = json.loads(path.read_text())
    assert report["outcome"] == "finished"
    return [(one["step"], one["verdict"]["rank"]) for one in report["skipped"]]


def test_two_steps_are_told_and_the_run_finishes(collector: Running, caplog: pytest.LogCaptureFixture) -> None:
    ranks = connected(collector.collector.connection)
    leave_out(ranks, 4, 1)
    leave_out(ranks, 6, 0)
    until(lambda: told(collector) == [(4, 1, True), (6, 0, True)])
    until(lambda: len(collector.alerts) == len(warned(caplog)) == 2)  # they follow what the ledger holds
    assert [(alert.trouble, len(alert.report.skipped)) for alert in collector.alerts] == [
        (Trouble.SKIP, 1),
        (Trouble.SKIP, 2),
    ]
    assert all(text.startswith("run train-0:") for text in warned(caplog))
    end(ranks)
    until(lambda: collector.reports)
    assert collector.reports[0].outcome is Outcome.FINISHED
    assert written(collector.folder) == [(4, 1), (6, 0)]


@contextmanager
def killed(folder: Path) -> Iterator[Connection]:
    """A collector in a process of its own, which is killed at the end."""
    file = folder / "connection.json"
    words = "collector", "--listen", ports.address(), "--connection-file", str(file), "--runs-dir", str(folder / "runs")
    with subprocess.Popen([*RANKWATCH, *words], env=environment(), stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "collecting on" in process.stderr.readline()
        yield connection.read(file)
        process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("is_half_told", [False, True])
def test_a_collector_that_takes_over_has_the_same_list(tmp_path: Path, is_half_told: bool) -> None:
    """The one before was killed after a step, or when the culprit's trip alone had come."""
    with killed(tmp_path) as first:
        ranks = connected(first)
        leave_out(ranks, 4, 1)
        until(lambda: read_row(tmp_path / "runs" / "train-0").skipped)
        if is_half_told:
            ranks[1].link.send_trip(guilty(6, within=30.0, line=6))
        until(lambda: not any(rank.link._spool for rank in ranks))
    second = Running(tmp_path, listen=None)
    until(lambda: second.collector.ledger.runs and all(rank.link.is_online for rank in ranks))
    assert told(second)[0] == (4, 1, True)
    if is_half_told:
        ranks[0].link.send_trip(innocent(6))
        ranks[1].link.send_closeup(makers.closeup(operator=None))
    else:
        leave_out(ranks, 6, 1)
    leave_out(ranks, 9, 0)
    until(lambda: told(second) == [(4, 1, True), (6, 1, True), (9, 0, True)])
    end(ranks)
    assert written(tmp_path) == [(4, 1), (6, 1), (9, 0)]
    second.stop()
