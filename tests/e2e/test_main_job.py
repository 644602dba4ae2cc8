"""The main job with real processes: a fault on one rank of a torchrun training, and how the run ends."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from commands import printed as rankwatch
from jobs import SCRIPTS, Job, forked, run_job, torchrun

pytestmark = pytest.mark.e2e

ABORTED = 77


def test_overflow_on_one_rank(bad: Job) -> None:
    job = bad
    assert job.code == ABORTED
    verdict = job.verdict
    assert (verdict["rank"], verdict["batch"], verdict["optimizer_step"]) == (1, 5, 5)
    assert (verdict["module"], verdict["module_class"]) == ("blocks.2.square", "Square")
    assert (verdict["frame"], verdict["frames_in_batch"]) == (7, 14)
    assert (verdict["reading"], verdict["state"], verdict["dtype"]) == ("output", "inf", "float32")
    assert (verdict["cause"], verdict["certainty"], verdict["missing_ranks"]) == ("overflow", "complete", [])
    assert job.report["outcome"] == "aborted"
    assert [row["acknowledged"] for row in job.report["ranks"]] == [True] * 4
    assert {row["state"] for row in job.report["ranks"]} == {"aborted"}
    assert job.report["frames"][-1]["module"] == "blocks.2.square"
    assert job.report["frames"][-1]["readings"][-1] == {
        "label": "output", "kind": "output", "dtype": "float32",
        "abs_min": pytest.approx(0, abs=1e39), "abs_max": None, "state": "inf",
    }  # fmt: skip
    assert job.left_behind == []
    # The report is the last text on the screen, and torchrun's summary names the culprit.
    assert "rankwatch: first inf in run bad-0: rank 1, batch 5, blocks.2.square, output (" in job.stdout
    assert "\n  culprit    rank 1 of 4" in job.stdout
    assert "4 of 4 ranks answered; the other 3 were finite here" in (job.run_dir / "report.txt").read_text()
    assert "rank      : 1 (local_rank: 1)" in job.root_cause, job.stderr
    assert "exitcode  : 77" in job.root_cause
    assert "blocks.2.square (Square), output: inf" in job.root_cause


@pytest.mark.slow
def test_overflow_between_the_batches_that_are_measured_in_full(tmp_path: Path, bad: Job) -> None:
    """The fault lies in batch 5. The verdict is the same as with every=1, up to the operator and its line."""
    job = run_job(tmp_path, torchrun("train.py", "overflow", ranks=4), env={"RANKWATCH_EVERY": "10"})
    assert job.code == ABORTED
    for key in ("rank", "batch", "optimizer_step", "module", "module_class", "frame", "frames_in_batch", "reading", "state"):
        assert job.verdict[key] == bad.verdict[key], key
    for key in ("cause", "evidence", "certainty", "missing_ranks", "nan_count", "inf_count", "shape"):
        assert job.verdict[key] == bad.verdict[key], key
    closeup, full = job.verdict["closeup"], bad.verdict["closeup"]
    for key in ("operator", "source", "recurred", "of"):
        assert closeup[key] == full[key], key
    # In a wider precision the model runs up to the module, and not the module alone.
    assert {name: one["state"] for name, one in closeup["precision"].items()} == {"float32": "inf", "float64": "finite"}
    assert closeup["precision"]["float64"]["abs_max"] == pytest.approx(full["precision"]["float64"]["abs_max"], rel=1e-5)
    assert job.report["frames"][-1] == bad.report["frames"][-1]
    assert job.left_behind == []


@pytest.mark.slow
def test_the_report_is_printed_again(tmp_path: Path) -> None:
    job = run_job(tmp_path, forked("train.py", "overflow_at_once"))
    assert (job.verdict["batch"], job.verdict["optimizer_step"], job.verdict["frame"]) == (0, 0, 1)
    assert job.verdict["frames_in_batch"] in (None, 14)  # rank 0 may or may not have reached the end of the batch
    for option, name in ((["--all"], "report.txt"), (["--json"], "report.json")):
        assert rankwatch("report", str(job.run_dir), *option) == (job.run_dir / name).read_text()
    assert rankwatch("report", str(job.run_dir)) in job.stdout


@pytest.mark.slow
def test_two_ranks_in_one_batch_the_earlier_frame_wins(tmp_path: Path) -> None:
    job = run_job(tmp_path, forked("train.py", "overflow_on_two", ranks=4))
    assert job.code == ABORTED
    assert (job.verdict["rank"], job.verdict["module"]) == (3, "blocks.1.square")
    also = [(other["rank"], other["batch"], other["module"], other["state"]) for other in job.verdict["also"]]
    # The collector only asks whether rank 1 is past the frame: it may report that before it trips at a later frame.
    assert also in ([], [(1, 5, "blocks.2.square", "inf")])
    assert job.verdict["certainty"] == "complete"


@pytest.mark.slow
def test_the_others_wait_in_all_reduce(tmp_path: Path) -> None:
    job = run_job(tmp_path, torchrun("train.py", "others_in_all_reduce"), "--decision-window", "0.5")
    assert job.code == ABORTED
    assert job.run_dir.name == "train-0"  # named after the script
    assert (job.verdict["rank"], job.verdict["batch"], job.verdict["module"]) == (1, 5, "blocks.0.square")
    # Rank 0 never reaches this batch: the verdict says so instead of guessing.
    assert (job.verdict["certainty"], job.verdict["missing_ranks"]) == ("partial", [0])
    assert "blocks.0.square" in job.root_cause
    assert job.left_behind == []


@pytest.mark.slow
def test_the_others_are_in_eval(tmp_path: Path) -> None:
    job = run_job(tmp_path, forked("train.py", "others_in_eval"))
    assert job.code == ABORTED
    assert (job.verdict["rank"], job.verdict["batch"], job.verdict["eval"]) == (1, 5, 0)
    assert job.verdict["certainty"] == "complete"
    assert "TrainingAborted: rank 1 of 2" in job.stderr
    assert job.left_behind == []


@pytest.mark.slow
def test_nothing_trips(good: Job) -> None:
    job = good
    assert job.code == 0
    assert (job.report["outcome"], job.report["verdict"], job.report["frames"]) == ("finished", None, [])
    assert [(row["last_batch"], row["state"]) for row in job.report["ranks"]] == [(11, "finished")] * 4
    assert job.stdout == ""
    assert "run good-0 finished: 4 ranks, 12 batches, no inf or nan" in job.stderr


@pytest.mark.slow
def test_abort_after_stops_every_rank(tmp_path: Path) -> None:
    traced = {"RANKWATCH_ABORT_AFTER_BATCH_NUM": "3", "RANKWATCH_TRACE_BATCH_NUMS": "1,3"}
    job = run_job(tmp_path, forked("train.py", "healthy"), env=traced)
    assert job.code == 1
    assert (job.report["outcome"], job.report["verdict"]) == ("aborted", None)
    assert "abort_after_batch_num=3" in job.report["reason"]
    assert job.stderr.count("BatchLimitReached: stopped after batch 3") >= 2
    assert [(row["last_batch"], row["state"]) for row in job.report["ranks"]] == [(3, "aborted")] * 2
    # Traced batches are printed by each rank, and recorded by rank.
    traces = sorted(path.name for path in (job.run_dir / "trace").iterdir())
    assert traces == [f"batch-{batch}.rank-{rank}.txt" for batch in (1, 3) for rank in (0, 1)]
    for name in traces:
        assert (job.run_dir / "trace" / name).read_text() in job.stdout


@pytest.mark.slow
def test_a_users_own_exception_is_not_reported_as_a_trip(tmp_path: Path) -> None:
    job = run_job(tmp_path, torchrun("train.py", "user_error"))
    assert job.code == 1
    assert (job.report["outcome"], job.report["verdict"]) == ("failed", None)
    assert 'KeyError: "a bug of the user\'s own"' in job.report["reason"]
    assert job.state(1) == "failed"
    # torchrun shows the exception itself as the cause, also without its @record.
    assert "rank      : 1 (local_rank: 1)" in job.root_cause, job.stderr
    assert 'KeyError: "a bug of the user\'s own"' in job.root_cause
    assert job.left_behind == []


@pytest.mark.slow
def test_a_killed_rank_is_lost(tmp_path: Path) -> None:
    job = run_job(tmp_path, torchrun("train.py", "killed"), "--log-format", "json")
    assert job.code == 1
    assert (job.report["outcome"], job.report["verdict"]) == ("lost", None)
    died, _, followed = job.report["reason"].partition("; then ")
    assert died.startswith("rank 1 of 2 ")
    assert " was lost: killed by SIGKILL; last seen in batch " in died
    assert job.state(1) == "lost"
    if followed:  # it may have been ended before it could say so
        assert " failed: gloo: " in followed
        assert "gloo/transport/tcp/pair.cc" in job.report["ranks"][0]["farewell"]
    said = [json.loads(line) for line in job.stderr.splitlines() if line.startswith('{"time": ')]
    assert said[0]["message"].startswith("run train-0: 2 ranks, first heard of on ")
    assert {line["run"] for line in said if line["logger"].startswith("rankwatch_monitor.")} == {"train-0"}
    assert "rankwatch: " not in job.stderr


@pytest.mark.slow
def test_the_culprit_is_the_root_cause_under_record_too(tmp_path: Path) -> None:
    job = run_job(tmp_path, torchrun("train.py", "overflow"), env={"WITH_RECORD": "1"})
    assert job.code == ABORTED
    assert "rank      : 1 (local_rank: 1)" in job.root_cause, job.stderr
    assert "blocks.2.square (Square), output: inf" in job.root_cause


@pytest.mark.slow
def test_ranks_that_never_come_back_end_by_the_deadline(tmp_path: Path) -> None:
    """Two nodes: the culprit's torchrun ends by itself, the other torchrun has only ranks that hang."""
    job = run_job(tmp_path, [sys.executable, str(SCRIPTS / "two_nodes.py"), "stuck"], "--abort-grace", "2")
    assert job.code == ABORTED
    assert (job.verdict["rank"], job.verdict["module"]) == (3, "blocks.1.square")
    assert [row["acknowledged"] for row in job.report["ranks"]] == [True] * 4
    for rank in (0, 1):
        assert f"rank {rank} of 4" in job.stderr
        assert "this rank did not come back within 2 s and is ended" in job.stderr
    # The node whose ranks hung shows the culprit as their root cause, and our exit code.
    assert "exitcode  : 77" in job.stderr
    summaries = job.stderr.split("Root Cause (first observed failure):")[1:]
    assert len(summaries) == 2
    assert all("blocks.1.square (Square), output: inf" in summary for summary in summaries)
    assert job.left_behind == []
