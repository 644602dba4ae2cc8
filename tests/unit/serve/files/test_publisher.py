"""Reports on their way: which run of a process that ended follows from another one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rankwatch_monitor.decide.core.effects import Publish
from rankwatch_monitor.decide.core.report import End, Outcome, RankRow, RankState, Report
from rankwatch_monitor.serve.files.publisher import Publisher
from rankwatch_monitor.serve.files.run_folder import RunsFolder
from rankwatch_monitor.serve.files.unwritten import FileWrite
from rankwatch_monitor.serve.processes.notifier import Notifier


def ended(run: str, model: int, outcome: Outcome = Outcome.FAILED, *, pids: tuple[int, int] = (11, 12)) -> Report:
    rows = tuple(RankRow(rank, rank, "node0", pid, 4, RankState.FAILED, False, 0, "") for rank, pid in enumerate(pids))
    end = End.FINISHED if outcome is Outcome.FINISHED else End.FAILED
    return Report(run, "gan", 0, 2, outcome, "rank 1 failed: KeyError", None, None, None, rows, model=model, end=end)


@pytest.mark.parametrize(
    ("second", "follows"),
    [
        (ended("gan-0.2", 1), "gan-0"),
        (ended("gan-0.2", 1, Outcome.ABORTED), "gan-0"),
        (ended("gan-0.2", 1, Outcome.FINISHED), ""),
        (ended("gan-0.2", 0), ""),  # the same model, trained again
        (ended("other-0", 1, pids=(21, 22)), ""),
    ],
)
def test_one_failure_of_a_process_is_told_once(tmp_path: Path, second: Report, follows: str) -> None:
    shown: list[Report] = []
    notifier = Notifier(f"echo $RANKWATCH_RUN >> {tmp_path}/told")

    def show(report: Report, news: bool) -> None:
        shown.append(report)
        notifier.tell(report)

    def write(run: str, action: FileWrite) -> None:
        (tmp_path / run).mkdir(exist_ok=True)
        action.without_record()

    publisher = Publisher(RunsFolder(tmp_path), write, show, lambda run, late: ())
    for report in (ended("gan-0", 0), second):
        publisher.publish(Publish(report, news=True))
    notifier.close()
    assert [report.follows for report in shown] == ["", follows]
    assert json.loads((tmp_path / second.run / "report.json").read_text())["follows"] == (follows or None)
    is_told = not follows and second.outcome is not Outcome.FINISHED
    assert (tmp_path / "told").read_text().split() == ["gan-0", *[second.run] * is_told]
