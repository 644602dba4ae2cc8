"""Models that communicate: the close-up issues no collective, says what it did not run, and the job ends as always."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jobs import SCRIPTS, Job, forked, run_job

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def ended(tmp_path: Path, how: str) -> tuple[Job, dict[str, Any]]:
    job = run_job(tmp_path, forked("closer.py", how), "--decision-window", "30")
    assert job.code == 77, job.stderr
    assert job.left_behind == []
    assert (job.verdict["rank"], job.verdict["batch"]) == (1, 3)
    closeup: dict[str, Any] = job.verdict["closeup"]
    return job, closeup


def line_of(mark: str) -> int:
    lines = (SCRIPTS / "closer.py").read_text().split("\n")
    (line,) = [number for number, text in enumerate(lines, 1) if text.endswith(f"  # {mark}")]
    return line


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("fsdp2", "it communicates (FSDPModule)"),
        ("ddp-inside", "DistributedDataParallel inside of it communicates"),
        ("tp", "its tensors are sharded: computing with them communicates"),
        ("sync-norm", "it communicates by c10d.allgather_.default"),
    ],
)
def test_what_communicates_is_not_run_again(tmp_path: Path, how: str, why: str) -> None:
    job, closeup = ended(tmp_path, how)
    assert (closeup["recurred"], closeup["of"], closeup["note"]) == (None, None, f"not run again: {why}")
    assert f"not run again: {why}" in (job.run_dir / "report.txt").read_text()


def test_up_to_a_collective_the_origin_is_found(tmp_path: Path) -> None:
    _, closeup = ended(tmp_path, "own")
    assert (closeup["operator"], closeup["source"]["line"]) == ("aten.log.default", line_of("sums"))
    assert closeup["note"] == "not run again: it communicates by c10d.allreduce_.default"


@pytest.mark.parametrize("how", ["fsdp2-module", "sync-norm-module"])
def test_a_module_inside_that_communicates_with_nobody_is_run_again(tmp_path: Path, how: str) -> None:
    _, closeup = ended(tmp_path, how)
    assert (closeup["source"]["line"], closeup["recurred"], closeup["of"]) == (line_of("inner"), 3, 3)
