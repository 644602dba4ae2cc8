"""The command of --on-verdict: once an event, with the report; what goes wrong in it is said, and costs nobody anything."""

from __future__ import annotations

import json
import logging
import threading
from dataclasses import replace
from pathlib import Path

import pytest

import left_out
from collectors import until
from rankwatch.shared.system.process import started_at
from rankwatch_monitor.decide.core.effects import Alert, Trouble
from rankwatch_monitor.decide.core.report import End, Outcome, Report
from rankwatch_monitor.serve.processes import notifier
from rankwatch_monitor.serve.processes.notifier import Notifier

LOST = Report(
    "train-0", "train", 0, 2, Outcome.LOST, "rank 1 went silent", None, 7, None, (), folder="runs/train-0", end=End.LOST
)


def told(command: str, report: Report = LOST) -> None:
    one = Notifier(command)
    one.tell(report)
    one.close()


def test_it_has_the_report_and_the_essence_of_it(tmp_path: Path) -> None:
    essence = "$RANKWATCH_RUN/$RANKWATCH_OUTCOME/$RANKWATCH_CAUSE/$RANKWATCH_RUN_DIR/$RANKWATCH_ACTION/$RANKWATCH_HOSTS"
    told(f'cat > {tmp_path}/body; echo "{essence}" > {tmp_path}/env')
    body = json.loads((tmp_path / "body").read_text())
    assert (body["event"], body["text"]) == ("verdict", "lost: rank 1 went silent")
    assert body["advice"]["action"] == "restart"
    assert (body["run"]["id"], body["outcome"], body["reason"]) == ("train-0", "lost", "rank 1 went silent")
    assert (tmp_path / "env").read_text() == "train-0/lost//runs/train-0/restart/\n"


def test_it_is_told_of_trouble_in_a_run_that_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    essence = "$RANKWATCH_TEXT/$RANKWATCH_OUTCOME/$RANKWATCH_RUN"
    one = Notifier(f'cat > {tmp_path}/$RANKWATCH_EVENT; echo "{essence}" >> {tmp_path}/env')
    so_far = replace(LOST, outcome=Outcome.FINISHED, reason="")  # nothing is decided
    for _ in range(notifier.MOST_ALERTS + 3):
        one.alert(Alert(Trouble.STALL, "rank 1 stalled:\nno progress", so_far))
    one.alert(Alert(Trouble.DESYNC, "replicas differ", so_far))
    one.close()
    stall = json.loads((tmp_path / "stall").read_text())
    assert (stall["event"], stall["text"], stall["outcome"]) == ("stall", "rank 1 stalled:\nno progress", None)
    said = (tmp_path / "env").read_text().splitlines()
    assert sorted(said) == ["rank 1 stalled: no progress//train-0"] * notifier.MOST_ALERTS + ["replicas differ//train-0"]
    assert caplog.messages == ["the command of --on-verdict is told of no more than 10 stall events of run train-0"]


def test_a_step_that_was_left_out_has_its_own_cause(tmp_path: Path) -> None:
    one = Notifier(f'cat > {tmp_path}/body; echo "$RANKWATCH_EVENT/$RANKWATCH_CAUSE/$RANKWATCH_OUTCOME" > {tmp_path}/env')
    one.alert(Alert(Trouble.SKIP, "optimizer step 9 was left out", left_out.trained(ends=False).run.report()))
    one.close()
    assert (tmp_path / "env").read_text() == "skip/invalid/\n"
    body = json.loads((tmp_path / "body").read_text())
    assert ([step["step"] for step in body["skipped"]], body["verdict"]) == ([4, 9], None)


def test_of_a_run_that_finished_nothing_is_told(tmp_path: Path) -> None:
    told(f"touch {tmp_path}/called", replace(LOST, outcome=Outcome.FINISHED))
    told("", LOST)
    assert not list(tmp_path.iterdir())


def test_a_command_that_does_not_read_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    told("true", replace(LOST, reason="x" * 1_000_000))
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("echo no such channel >&2; exit 3", "exit code 3: no such channel"),
        ("exit 4", "exit code 4: it printed nothing"),
        ("nosuchprogram", "exit code 127"),
    ],
)
def test_its_failure_is_said(command: str, said: str, caplog: pytest.LogCaptureFixture) -> None:
    told(command)
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "the command of --on-verdict for run train-0: " in record.getMessage()
    assert said in record.getMessage()


def test_it_is_ended_with_all_that_it_started(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifier, "LIMIT", 0.2)
    told("sleep 600 & sleep 600")  # the pipe of stdout stays open until both have ended
    assert "was ended: it took more than 0.2 s" in caplog.text


def test_a_signal_ends_it_with_all_that_it_started(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = Notifier(f"sleep 300 & echo $! > {tmp_path}/pid.part; mv {tmp_path}/pid.part {tmp_path}/pid; wait")
    one.tell(LOST)
    until((tmp_path / "pid").exists)
    child = int((tmp_path / "pid").read_text())
    one.stop()
    one.close()
    until(lambda: started_at(child) is None)
    one.tell(LOST)  # too late
    one.close()
    assert caplog.messages == ["the command of --on-verdict for run train-0 was ended by a signal"]


def test_the_one_at_the_terminal_is_told_what_is_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(notifier, "PATIENCE", 0.0)
    one = Notifier(f"until [ -e {tmp_path}/go ]; do sleep 0.01; done")
    one.tell(LOST)
    closing = threading.Thread(target=one.close)
    closing.start()
    until(lambda: caplog.messages == ["waiting for the command of --on-verdict, for at most 30 s; Ctrl-C ends it"])
    (tmp_path / "go").touch()
    closing.join()


def test_of_hundreds_of_failed_runs_one_command_runs_at_a_time_and_the_last_one_says_how_many_there_were(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = Notifier(
        f"echo $$ >> {tmp_path}/begun; until [ -e {tmp_path}/go ]; do sleep 0.01; done; echo $RANKWATCH_TEXT >> {tmp_path}/told"
    )
    one.tell(LOST)
    until((tmp_path / "begun").exists)
    for number in range(400):
        one.tell(replace(LOST, run=f"train-{number}", reason=f"of {number}"))
    one.tell(replace(LOST, run="other-0", job="other", reason="of another job"))
    assert len((tmp_path / "begun").read_text().split()) == 1
    (tmp_path / "go").touch()
    one.close()
    told = (tmp_path / "told").read_text().splitlines()
    waited = [f"lost: of {number}" for number in range(notifier.MOST_WAITING)]
    waited[-1] += "; and 384 more of job train"
    assert told == ["lost: rank 1 went silent", waited[0], "lost: of another job", *waited[1:]]
    assert caplog.messages == ["the command of --on-verdict is told of 384 more events of job train by their number"]


def test_at_the_end_a_few_commands_are_waited_for_and_the_rest_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(notifier, "LIMIT", 0.1)
    one = Notifier("sleep 600")
    for _ in range(notifier.MOST_WAITING):
        one.tell(LOST)
    monkeypatch.setattr(notifier, "LAST_EVENTS", -9)
    one.close()
    assert caplog.messages[-1].startswith("the command of --on-verdict was not told of ")
    assert caplog.messages[-1].endswith(" events: there was no more time")
    one.stop()


def test_of_ctrl_c_nothing_is_told_and_of_what_failed_just_before_it_is(tmp_path: Path) -> None:
    by_hand = replace(LOST, outcome=Outcome.ABORTED, reason="stopped by SIGINT", end=End.SIGNAL)
    told(f"touch {tmp_path}/by_hand", by_hand)
    told(f"touch {tmp_path}/failed", replace(by_hand, reason="stopped by SIGINT; just before, rank 1 failed: KeyError"))
    assert [path.name for path in tmp_path.iterdir()] == ["failed"]
