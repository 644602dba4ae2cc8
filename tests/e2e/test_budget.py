"""Real jobs under the default budget: what goes bad late is named as with every=1, and all ranks have the same full batches."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs import Job, run_job, torchrun
from rankwatch_monitor.record.reader import RunRecord

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ABORTED, BAD, BATCHES = 77, 797, 900
LOSS_AND_ROOT = 2
"""The frames of a batch of which the root alone is measured."""

TRUTHS = {
    "forward": ("layers.1", "output", "inf", "overflow"),
    "loss": ("", "loss", "inf", None),
    "gradient": ("layers.3", "grad_input[0]", "nan", None),
}
"""Module, reading, state and cause."""


def trained(folder: Path, how: str) -> Job:
    """Beats come often, as these batches are short."""
    return run_job(folder, torchrun("budgeted.py", how), "--heartbeat", "0.1", env={"RANKWATCH_BUDGET": ""})


@pytest.mark.parametrize("how", TRUTHS)
def test_a_late_fault_is_named_as_if_all_batches_were_measured(tmp_path: Path, how: str) -> None:
    job = trained(tmp_path, how)
    assert job.code == ABORTED, job.stderr
    module, reading, state, cause = TRUTHS[how]
    verdict = job.verdict
    assert (verdict["rank"], verdict["batch"]) == (1, BAD)
    assert (verdict["module"], verdict["state"]) == (module, state)
    assert verdict["reading"].startswith(reading)
    assert cause in (None, verdict["cause"])
    assert job.report["measured"].startswith("every ")


def test_a_healthy_job_has_the_same_full_batches_on_all_ranks(tmp_path: Path) -> None:
    job = trained(tmp_path, "well")
    assert job.code == 0, job.stderr
    measured = job.report["measured"]
    assert f"measured   {measured}" in (job.run_dir / "report.txt").read_text()
    since = int(measured.partition("since ")[2].partition(";")[0] or 0)
    with RunRecord(job.run_dir / "run.db") as record:
        full = [
            {part.batch for part in record.history(rank, (since, BATCHES)) if len(part.table.specs) > LOSS_AND_ROOT}
            for rank in range(2)
        ]
    assert full[0] == full[1]
    assert full[0]


def test_a_sharded_model_is_measured_in_each_batch(tmp_path: Path) -> None:
    job = trained(tmp_path, "fsdp")
    assert job.code == 0, job.stderr
    assert job.report["measured"] in (
        None,
        "every batch: it communicates (FSDPModule) (rank 0)",
    )
