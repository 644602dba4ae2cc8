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


def test_a_line_is_cut_to_the_columns_of_a_terminal_and_whole_elsewhere() -> None:
    head, line = runs.render([ROW], 60).splitlines()
    assert head.split() == ["run", "state", "ranks", "batches", "why"]
    assert (len(line), line[-3:]) == (60, "...")
    assert runs.render([ROW]).splitlines()[1].endswith(ROW.reason.rstrip())
