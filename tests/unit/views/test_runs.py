"""The list of runs as text."""

from __future__ import annotations

from rankwatch_monitor.record.runs import RunRow
from rankwatch_monitor.views import runs

ROW = RunRow(
    "train-0", world_size=2, batches=60, outcome="aborted", reason="rank 1 of 2, batch 5: " + "head, " * 20, is_over=True
)


def test_what_was_left_out_is_told_once() -> None:
    told = "1 step was left out: batch 4 (rank 1, layer: invalid)"
    assert runs.why(RunRow("train-0", skipped=told)) == told
    assert runs.why(RunRow("train-0", outcome="finished", reason=told, skipped=told, is_over=True)) == told
    assert runs.why(ROW._replace(reason="rank 1; 1 step was left out before", skipped=told)).endswith(f"before; {told}")


def test_a_run_that_finished_and_did_not_go_well_is_amber_on_a_terminal() -> None:
    doubtful = ROW._replace(outcome="finished", judged="the loss has grown x6.3 since batch 11")
    well = ROW._replace(outcome="finished", reason="")
    head, *lines = runs.render([doubtful, well], 60, is_coloured=True).splitlines()
    assert [line.startswith("\x1b[33mtrain-0  finished, but  ") for line in lines] == [True, False]
    assert lines[0].endswith("...\x1b[0m")
    assert "\x1b" not in head + lines[1] + runs.render([doubtful], 60)


def test_a_line_is_cut_to_the_columns_of_a_terminal_and_whole_elsewhere() -> None:
    head, line = runs.render([ROW], 60).splitlines()
    assert head.split() == ["run", "state", "ranks", "batches", "why"]
    assert (len(line), line[-3:]) == (60, "...")
    assert runs.render([ROW]).splitlines()[1].endswith(ROW.reason.rstrip())
