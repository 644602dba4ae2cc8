"""What a run's report says of the steps that its ranks left out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from left_out import REFUSED, TOLD, guilty, innocent, trained, write
from rankwatch.shared.types import messages
from rankwatch_monitor.decide.core.report import Report
from rankwatch_monitor.record import replay
from rankwatch_monitor.record.reader import RunRecord
from rankwatch_monitor.record.runs import read_row
from rankwatch_monitor.record.schema import FILE
from rankwatch_monitor.views import as_json, text
from rankwatch_monitor.views.batches import details, rank
from rankwatch_monitor.views.skipped import MAX_STEPS


def of(folder: Path, *, ends: bool = True) -> Report:
    with RunRecord(write(folder, ends=ends) / FILE) as record:
        return replay.take(record).report


def test_a_run_that_ended_well_says_first_what_was_left_out(tmp_path: Path) -> None:
    shown = text.render(of(tmp_path))
    assert shown.startswith(f"rankwatch: run train-0 finished, but {TOLD}; 2 ranks, 12 batches, no other inf or nan\n")
    first = (
        "  left out   step 4: rank 1 of 2 (node0, local rank 1), batch 4: layer (Linear), output: nan\n"
        "               operator   aten.div at train.py:4, in f"
    )
    assert first in shown
    for line in (
        "               recurs     recurred 3 of 3",
        "               put back   bn.running_mean",
        "             step 9: rank 0 of 2 (node0, local rank 0), batch 9",
        f"               replay     rankwatch replay {tmp_path}/train-0/capsule",
        "             2 more of 3 in 128 steps may be left out",
    ):
        assert f"\n{line}" in shown


def test_each_has_the_fields_of_a_verdict_for_programs(tmp_path: Path) -> None:
    told = json.loads(as_json.render(of(tmp_path)))
    assert (told["outcome"], told["reason"], told["verdict"]) == ("finished", TOLD, None)
    assert [(one["step"], one["batch"], one["restored"], one["budget_left"]) for one in told["skipped"]] == [
        (4, 4, ["bn.running_mean"], 2),
        (9, 9, ["bn.running_mean"], 2),
    ]
    verdict = told["skipped"][0]["verdict"]
    assert (verdict["rank"], verdict["cause"], verdict["closeup"]["recurred"]) == (1, "invalid", 3)
    assert verdict["closeup"]["source"]["line"] == 4
    assert verdict["began_text"]
    report = trained().run.report()
    aborted = replace(report, verdict=report.skipped[0].verdict)
    assert verdict.keys() == as_json.to_dict(aborted)["verdict"].keys()


def test_a_list_of_runs_has_it_while_the_run_goes_on(tmp_path: Path) -> None:
    run = write(tmp_path, ends=False)
    row = read_row(run)
    assert (row.skipped, row.reason) == (TOLD, "")
    with RunRecord(run / FILE) as record:
        so_far = text.render_so_far(replay.take(record).report)
    assert "\n  left out   step 4: rank 1 of 2" in so_far


def test_an_abort_says_why_its_step_was_not_left_out_and_what_was_before() -> None:
    desk = trained(ends=False)
    desk.receive(0, messages.Tripped(900, innocent(20, REFUSED)))
    desk.receive(1, messages.Tripped(900, guilty(20, left_out=REFUSED)))
    report = desk.run.report()
    assert report.reason.endswith("; 2 steps were left out before")
    shown = text.render_head(report)
    assert "\n  no skip    3 of the last 128 steps were left out\n" in shown
    assert "\n  left out   step 4: rank 1 of 2 (node0, local rank 1), batch 4: layer (Linear), output: nan\n" in shown
    assert not any(told in shown for told in ("put back", "may be left out"))
    assert [one["step"] for one in as_json.to_dict(report)["skipped"]] == [4, 9]


def test_of_very_many_the_last_ones_are_shown() -> None:
    report = trained().run.report()
    report = replace(report, skipped=report.skipped * 10, skipped_unkept=7)
    shown = text.render(report)
    assert shown.count("put back") == MAX_STEPS
    assert f"{27 - MAX_STEPS} steps before these: report.json has the last 20" in shown
    assert "27 steps were left out: 19 before, and batch 4" in shown


def test_a_rank_has_what_it_told_of_its_last_step(tmp_path: Path) -> None:
    with RunRecord(write(tmp_path) / FILE) as record:
        culprit, other = (rank.render(details.of_rank(record, number), 1) for number in (0, 1))
    assert "  tripped    the culprit, in a step that was left out, batch 9 (optimizer step 9), frame 1" in culprit
    assert "  recurs     recurred 3 of 3" in culprit
    assert "  tripped    beside the culprit, rank 0, in a step that was left out, batch 9 (optimizer step 9)" in other
    assert "recurs" not in other
