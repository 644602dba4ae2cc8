"""Real ranks that leave out steps: the run ends as without these steps, or with a verdict where that does not help."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from jobs import RANKWATCH, SCRIPTS, Job, environment, forked, run_job, torchrun

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SOURCE = (SCRIPTS / "skipped.py").read_text().splitlines()
LINE = next(number for number, line in enumerate(SOURCE, 1) if "# 0 / 0" in line)

SKIP = "--on-bad-step", "skip"


def told(job: Job) -> list[tuple[int, int, str]]:
    return [(one["step"], one["verdict"]["rank"], one["verdict"]["cause"]) for one in job.report["skipped"]]


def test_two_bad_steps_are_left_out(tmp_path: Path) -> None:
    """Weights, running statistics and the batches they count are those of a training that never ran the bad batches."""
    job = run_job(tmp_path / "skip", torchrun("skipped.py", "nan"), *SKIP)
    assert job.code == 0, job.stdout + job.stderr
    assert (job.report["outcome"], job.report["verdict"]) == ("finished", None)
    assert told(job) == [(5, 1, "data"), (9, 1, "data")]
    names = ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
    assert [(one["restored"], one["budget_left"]) for one in job.report["skipped"]] == [(names, 2), (names, 1)]
    assert "finished, but 2 steps were left out: batch 5 (rank 1, unit: data), batch 9 (rank 1, unit: data);" in job.stderr
    assert "WARNING rankwatch: run skipped-0: optimizer step 5 was left out: rank 1 of 2" in job.stderr
    by_hand = run_job(tmp_path / "by_hand", forked("skipped.py", "by_hand"))
    weights, expected = (
        sorted(line for line in one.stdout.splitlines() if line.startswith("rank ")) for one in (job, by_hand)
    )
    assert len(weights) == 2
    assert weights == expected


def test_an_operator_that_is_bad_for_the_third_time_ends_the_run(tmp_path: Path) -> None:
    job = run_job(tmp_path, forked("skipped.py", "zeros"), "--on-bad-step", "skip=9/128")
    assert job.code == 77, job.stdout + job.stderr
    assert told(job) == [(3, 1, "invalid"), (6, 1, "invalid"), (9, 1, "invalid")]
    assert (job.verdict["rank"], job.verdict["batch"], job.verdict["closeup"]["source"]["line"]) == (1, 9, LINE)
    assert job.report["reason"].endswith(f"skipped.py:{LINE} for the third time: steps 3, 6 and 9 were left out")


def test_more_bad_steps_than_may_be_left_out_end_the_run(tmp_path: Path) -> None:
    job = run_job(tmp_path, forked("skipped.py", "all"), *SKIP)
    assert job.code == 77, job.stdout + job.stderr
    assert told(job) == [(step, 1, "data") for step in (5, 6, 7)]
    assert (job.verdict["rank"], job.verdict["batch"], job.verdict["began"]) == (
        1,
        8,
        None,
    )  # not in a step that was left out
    assert job.report["reason"].endswith("; 3 steps were left out before")


@pytest.mark.parametrize(("name", "outcome"), [("killed", "lost"), ("stands", "stalled")])
def test_no_rank_is_left_where_one_never_comes_to_the_bad_step(tmp_path: Path, name: str, outcome: str) -> None:
    options = (*SKIP, "--stall-after", "3", "--on-stall", "abort", "--abort-grace", "2")
    job = run_job(tmp_path, torchrun("skipped.py", name), *options)
    assert job.code != 0
    assert (job.report["outcome"], job.left_behind) == (outcome, [])
    assert "rank 1" in job.report["reason"]


def test_without_its_collector_a_training_leaves_steps_out_all_the_same(tmp_path: Path) -> None:
    """The ranks decide by themselves; what they have to tell waits for a collector."""
    runs = tmp_path / "runs"
    collect = [*RANKWATCH, "collector", "--listen", "tcp://127.0.0.1:0", "--runs-dir", str(runs)]
    with subprocess.Popen(collect, env=environment(), stderr=subprocess.PIPE, text=True) as collector:
        assert collector.stderr is not None
        assert "collecting on" in collector.stderr.readline()
        collector.kill()
    env = environment(RANKWATCH_CONNECTION=str(runs / "connection.json"), RANKWATCH_ON_BAD_STEP="skip")
    job = subprocess.run(torchrun("skipped.py", "nan"), env=env, capture_output=True, text=True, check=False)
    assert job.returncode == 0, job.stderr
    by_hand = run_job(tmp_path / "by_hand", forked("skipped.py", "by_hand"))
    found, expected = (
        sorted(line for line in out.splitlines() if line[:5] == "rank ") for out in (job.stdout, by_hand.stdout)
    )
    assert found == expected != []


def test_an_error_of_our_own_on_one_rank_leaves_no_rank_waiting(tmp_path: Path) -> None:
    """Its detector is off from batch 2 on. The other rank asks before each step, is answered, and the bad step is left out."""
    job = run_job(tmp_path / "broken", torchrun("skipped.py", "broken"), *SKIP, "--stall-after", "30", "--on-stall", "abort")
    assert job.code == 0, job.stdout + job.stderr
    assert "switched itself off" in job.stderr
    expected = run_job(tmp_path / "without", forked("skipped.py", "without"))
    first, second = ([weights(one, rank) for rank in range(2)] for one in (job, expected))
    assert first[0] == second[0]


def weights(job: Job, rank: int) -> str:
    (line,) = [line for line in job.stdout.splitlines() if line.startswith(f"rank {rank}: ")]
    return line
