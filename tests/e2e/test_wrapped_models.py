"""The verdict on models whose parameters are sharded over the ranks, in the user's own names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed.fsdp

from jobs import run_job, torchrun

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("how", ["fsdp1", "fsdp2"])
def test_overflow_in_a_sharded_model(tmp_path: Path, how: str) -> None:
    if how == "fsdp2" and not hasattr(torch.distributed.fsdp, "fully_shard"):
        pytest.skip("torch.distributed.fsdp.fully_shard came with torch 2.6")
    job = run_job(tmp_path, torchrun("sharded.py", how), "--abort-grace", "3")
    assert job.code == 77, job.stderr
    verdict = job.verdict
    assert (verdict["rank"], verdict["batch"], verdict["optimizer_step"]) == (1, 3, 3)
    assert (verdict["module"], verdict["module_class"]) == ("blocks.1.scale", "Scale")
    assert (verdict["reading"], verdict["state"], verdict["cause"]) == ("output", "inf", "overflow")
    names = {frame["module"] for frame in job.report["frames"]}
    assert names <= {"", "head", *(f"blocks.{i}{part}" for i in range(3) for part in ("", ".linear", ".scale"))}
    assert {frame["module_class"] for frame in job.report["frames"]} <= {"Model", "Block", "Linear", "Scale"}
    assert job.left_behind == []
