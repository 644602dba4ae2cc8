"""The norm of the gradients in the record is that of the training, on ranks that hold all gradients or shards of them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch.distributed.fsdp

from jobs import forked, run_job
from rankwatch.shared.types.frame import NO_NORM
from rankwatch_monitor.record.reader import RunRecord

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.mark.parametrize("clips", ["whole", "clipped"])
@pytest.mark.parametrize("how", ["ddp", "fsdp1", "fsdp2"])
def test_the_norm_of_each_step(tmp_path: Path, how: str, clips: str) -> None:
    if how == "fsdp2" and not hasattr(torch.distributed.fsdp, "fully_shard"):
        pytest.skip("torch.distributed.fsdp.fully_shard came with torch 2.6")
    job = run_job(tmp_path, forked("norms.py", how, clips))
    assert job.code == 0, job.stderr
    (line,) = [line for line in job.stdout.splitlines() if "norms [" in line]
    expected = json.loads(line.partition("norms ")[2])
    with RunRecord(job.run_dir / "run.db") as record:
        digests = record.digests()
    found = {(int(one["rank"]), int(one["batch"])): float(one["norm"]) for one in digests}
    by_rank = [[found[rank, batch] for batch in range(4)] for rank in range(2)]
    assert [norms[0] for norms in by_rank] == [NO_NORM, NO_NORM]
    if how == "ddp" or clips == "clipped":
        assert by_rank == [pytest.approx([NO_NORM, *expected[:3]], rel=1e-4)] * 2
    else:  # of its own shards
        joined = [math.hypot(*norms) for norms in zip(*by_rank, strict=True)]
        assert joined[1:] == pytest.approx(expected[:3], rel=1e-4)
