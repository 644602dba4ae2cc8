"""Trainings whose replicas are silently not one model, those of the table ``desynced``: each is named, and nothing else is said.

One for each way in which an agent sees it; ``unit/decide/replicas/test_recorded_replicas.py`` has all of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs import Job, Nursery, forked_apart, run_job, torchrun
from recorded.replicas import complaints, run, said
from recorded.truths import desync_lines
from trainings.table import DESYNCED

pytestmark = pytest.mark.e2e

VITAL = "a_flipped_bit_looked_for_at_each_step"
UNDER_TORCHRUN = "a_flipped_bit_of_three"
REAL = [
    VITAL,
    UNDER_TORCHRUN,
    "a_checkpoint_loaded_in_mid_run",
    "a_gather_garbled_for_all_receivers",
    "one_shard_for_two_ranks",
    "a_parameter_in_no_optimizer",
    "a_head_that_came_untied",
    "a_bias_left_out_by_hand",
]


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name == VITAL else pytest.mark.slow) for name in REAL])
def test_it_is_named(tmp_path: Path, nursery: Nursery, name: str) -> None:
    start = torchrun if name == UNDER_TORCHRUN else nursery.forked
    assert complaints(start, "desynced", name, tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a_flipped_bit_of_two", "fsdp1_in_shards_of_one"])
def test_it_is_named_in_a_training_that_is_found(tmp_path: Path, name: str) -> None:
    """A training is found by its interpreter, as that starts: none of a nursery is."""
    found, _ = run(forked_apart, "desynced", name, tmp_path, is_bare=True)
    assert found == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a_flipped_bit_of_three", "a_gather_garbled_for_all_receivers"])
def test_the_run_is_aborted_where_that_is_asked_for(tmp_path: Path, nursery: Nursery, name: str) -> None:
    case, truth = DESYNCED[name], DESYNCED[name].truth.truth
    training = nursery.forked("training.py", "desynced", name, str(tmp_path), ranks=case.ranks)
    job = run_job(tmp_path, training, "--on-desync", "abort", env={"BATCHES": "100000"})
    assert (job.code, job.report["outcome"], job.left_behind) == (77, "aborted", []), job.stderr
    assert {row["state"] for row in job.report["ranks"]} == {"aborted"}
    entry = job.report["desync"][0]
    assert (entry["pattern"], tuple(entry["ranks"])) == (truth.pattern[0], truth.ranks)
    assert entry["parameter"] in job.stdout


@pytest.mark.slow
def test_what_is_only_learned_aborts_nothing(tmp_path: Path, nursery: Nursery) -> None:
    found, _ = run(nursery.forked, "desynced", "a_bias_left_out_by_hand", tmp_path, "--on-desync", "abort")
    assert found == []


def test_an_overflow_says_that_the_replicas_were_equal(bad: Job) -> None:
    compared = bad.report["replicas"]
    assert (compared["equal"], compared["parameters"], compared["ranks"]) == (True, 10, 4)
    assert 2 <= compared["step"] <= 5
    assert (
        f"replicas   equal at step {compared['step']} (all 10 parameters, 4 ranks)"
        in (bad.run_dir / "report.txt").read_text()
    )
    assert bad.report["desync"] == []


def test_a_healthy_run_says_what_was_compared(good: Job) -> None:
    compared = good.report["replicas"]
    assert (compared["equal"], compared["parameters"], compared["ranks"], compared["step"]) == (True, 10, 4, 11)
    assert compared["times"] >= 12
    assert desync_lines(said(good)) == []
    assert "equal at step 11 (all 10 parameters, 4 ranks)" in (good.run_dir / "report.txt").read_text()
