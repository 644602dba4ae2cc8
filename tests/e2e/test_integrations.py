"""Frameworks with their real libraries, two ranks each: an overflow on rank 1, and its verdict."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from jobs import Job, run_job, torchrun

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def train(tmp_path: Path, library: str, name: str, variant: str = "") -> Job:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    command = torchrun("frameworks.py", name, str(tmp_path), variant)
    return run_job(tmp_path, command, env={"DS_ACCELERATOR": "cpu"})


def check(job: Job, *, batch: int, step: int, module: str = "block.gain") -> None:
    assert job.code == 77, job.stderr
    verdict = job.verdict
    assert (verdict["rank"], verdict["batch"], verdict["optimizer_step"]) == (1, batch, step)
    assert (verdict["module"], verdict["module_class"]) == (module, "Gain")
    assert (verdict["reading"], verdict["state"], verdict["cause"]) == ("output", "inf", "overflow")
    assert [rank["state"] for rank in job.report["ranks"]] == ["aborted", "aborted"]
    assert "the script went on" not in job.stdout
    assert job.left_behind == []


def test_the_hugging_face_trainer(tmp_path: Path) -> None:
    job = train(tmp_path, "transformers", "trainer")
    # Resumed at step 4, after 5 micro-batches of the first epoch and 2 of the second (one step); eval is no batch.
    check(job, batch=8, step=4)
    assert job.report["frames"][0]["batch"] == 7
    # The step was finished and counted, but did not change the weights and was not saved; all were notified of the end.
    for rank in (0, 1):
        assert f"rank {rank}: on_train_end at step 4, weights changed" in job.stdout
        assert f"rank {rank}: on_train_end at step 5, weights kept" in job.stdout
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("checkpoint-*"))[-1] == "checkpoint-4"
    assert job.stderr.count("leaves inf and nan out of the loss it logs; logging_nan_inf_filter=False") == 2  # rank 0, twice
    assert "batch 8: block.gain (Gain), output: inf" in job.root_cause


def test_lightning(tmp_path: Path) -> None:
    job = train(tmp_path, "lightning", "lightning")
    check(job, batch=11, step=5, module="net.block.gain")  # resumed after two epochs of 4 batches and 2 steps each
    assert {frame["module"].partition(".")[0] for frame in job.report["frames"]} == {"", "net"}
    assert "rank 1: on_exception at step 5: OverflowDetected" in job.stdout
    assert "batch 11: net.block.gain (Gain), output: inf" in job.root_cause


def test_the_hugging_face_trainer_by_zero_code_is_watched_instead_of_by_its_own_detector(tmp_path: Path) -> None:
    job = train(tmp_path, "transformers", "trainer", "plain")
    check(job, batch=3, step=1)  # two micro-batches a step
    assert "DebugUnderflowOverflow" not in job.stderr


def test_lightning_by_zero_code_has_the_callback(tmp_path: Path) -> None:
    job = train(tmp_path, "lightning", "lightning", "plain")
    check(job, batch=11, step=5, module="net.block.gain")


@pytest.mark.parametrize("order", ["before", "after"])
def test_accelerate_prepares_a_model_that_is_watched_before_or_after(tmp_path: Path, order: str) -> None:
    job = train(tmp_path, "accelerate", "accelerate", order)
    check(job, batch=2, step=2)
    assert job.verdict["dtype"] == "bfloat16"  # prepare() makes the model compute in it


@pytest.mark.parametrize("stage", ["1", "2"])
def test_deepspeed_zero(tmp_path: Path, stage: str) -> None:
    check(train(tmp_path, "deepspeed", "deepspeed", stage), batch=3, step=1)
