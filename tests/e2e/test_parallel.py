"""Models sharded over four ranks: the verdict uses the user's own names, and weight readings cover the right shard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from torch import Tensor

from jobs import Job, forked, run_job, torchrun

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

RANKS = 4
BLOCKS = [f"blocks.{index}.{part}" for index in range(3) for part in ("up", "down")]
SPLIT = ("blocks.0.up.weight", "blocks.0.up.bias", "blocks.0.down.weight", "blocks.1.up.weight", "blocks.1.up.bias")
"""What tensor parallelism splits of the modules that had run in the culprit's batch."""
ALONE = ("first.weight", "first.bias")
"""What is a unit of FSDP2 of its own there."""
SHARDS = {
    "fsdp1": set(),
    "fsdp2": {f"{name} (shard of 4)" for name in ALONE},
    "tp": {f"{name} (shard of 4)" for name in SPLIT},
    "fsdp2+tp": {f"{name} (shard of 2)" for name in ALONE + SPLIT},
}


UNDER_TORCHRUN = ("fsdp2+tp", "1f1b")


def job_of(tmp_path: Path, script: str, how: str) -> Job:
    files = {"WEIGHTS_FILE": str(tmp_path / "weights.pt"), "RUNS_DIR": str(tmp_path / "runs")}
    start = torchrun if how in UNDER_TORCHRUN else forked
    job = run_job(tmp_path, start(script, how, ranks=RANKS), "--decision-window", "30", env=files)
    assert job.code == 77, job.stderr
    assert job.verdict["certainty"] == "complete"
    assert job.left_behind == []
    return job


@pytest.mark.parametrize("how", ["fsdp1", "fsdp2", "tp", "fsdp2+tp"])
def test_overflow_in_a_sharded_model(tmp_path: Path, how: str) -> None:
    if "fsdp2" in how and not hasattr(torch.distributed.fsdp, "fully_shard"):
        pytest.skip("torch.distributed.fsdp.fully_shard came with torch 2.6")
    job = job_of(tmp_path, "sharded.py", how)
    assert "did not come back" not in job.stderr  # a rank that waits for the culprit is known to be stuck
    verdict = job.verdict
    assert (verdict["rank"], verdict["batch"], verdict["optimizer_step"], verdict["stage"]) == (2, 3, 3, None)
    assert (verdict["module"], verdict["module_class"]) == ("blocks.1.scale", "Scale")
    assert (verdict["reading"], verdict["state"], verdict["cause"]) == ("output", "inf", "overflow")
    names = {frame["module"] for frame in job.report["frames"]}
    assert names <= {"", "first", "head", *BLOCKS, *(f"blocks.{i}{part}" for i in range(3) for part in ("", ".scale"))}
    assert {frame["module_class"] for frame in job.report["frames"]} <= {"Model", "Block", "Linear", "Scale"}
    whole = torch.load(tmp_path / "weights.pt")
    expected = largest(whole, how, verdict["rank"])
    found = weights(job)
    assert found
    assert found == pytest.approx({key: expected[key] for key in found})
    assert {key for key in found if "shard" in key} == SHARDS[how]
    text = (job.run_dir / "report.txt").read_text()
    for key in SHARDS[how]:
        assert f" {key.rpartition('.')[2]}\n" in text


def weights(job: Job) -> dict[str, float]:
    """The abs max of each parameter in the frames of the culprit's batch."""
    return {
        f"{frame['module']}.{reading['label']}": reading["abs_max"]
        for frame in job.report["frames"]
        if frame["batch"] == job.verdict["batch"]
        for reading in frame["readings"]
        if reading["kind"] == "parameter"
    }


def largest(whole: dict[str, Tensor], how: str, rank: int) -> dict[str, float]:
    """The abs max that this rank should read for each parameter. During a forward, FSDP has gathered the shards of its
    dimension, except in a module that is an FSDP2 unit by itself: FSDP2 reshards it before its output is seen."""
    tensor_ranks = {"tp": 4, "fsdp2+tp": 2}.get(how, 1)
    expected = {}
    for name, values in whole.items():
        dim, parts, part = 0, 1, 0
        if name.startswith("first.") and "fsdp2" in how:
            parts = RANKS // tensor_ranks
            part = rank // tensor_ranks
        elif ".up." in name or name.endswith(".down.weight"):
            dim, parts, part = int(".down." in name), tensor_ranks, rank % tensor_ranks
        label = f"{name} (shard of {parts})" if parts > 1 else name
        expected[label] = values.chunk(parts, dim)[part].abs().max().item()
    return expected


@pytest.mark.parametrize("how", ["gpipe", "1f1b"])
def test_overflow_in_a_pipeline(tmp_path: Path, how: str) -> None:
    """Two stages trip in one micro-batch. The later stage is first by frame and by clock, but not in the pipeline's order."""
    job = job_of(tmp_path, "pipeline.py", how)
    verdict = job.verdict
    assert (verdict["rank"], verdict["stage"], verdict["batch"], verdict["frame"]) == (1, 1, 6, 4)
    assert (verdict["module"], verdict["reading"], verdict["state"]) == ("layers.3.gain", "output", "inf")
    assert verdict["frames_in_batch"] == 7
    assert verdict["cause"] == "overflow"
    (also,) = verdict["also"]
    assert (also["rank"], also["stage"], also["batch"], also["frame"], also["module"]) == (2, 2, 6, 0, "layers.4.linear")
    assert [rank["stage"] for rank in job.report["ranks"]] == list(range(RANKS))
    assert "rank 1 of 4" in job.stdout
    assert "local rank 1, stage 1), step 1\n" in job.stdout


def test_overflow_in_the_backward_of_a_pipeline(tmp_path: Path) -> None:
    job = job_of(tmp_path, "pipeline.py", "backward")
    expected: dict[str, Any] = {
        "rank": 2, "stage": 2, "batch": 6, "phase": "backward", "module": "layers.5.gain", "reading": "grad_input[0]",
        "state": "inf", "cause": "gradient", "also": [],
    }  # fmt: skip
    assert {key: job.verdict[key] for key in expected} == expected
