"""A rank that was stopped stays until the others have closed their watch: torchrun would end them, in the middle of a save."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from jobs import run_job, torchrun

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ABORTED = 77


@pytest.mark.parametrize(
    ("how", "files"),
    [
        ("torch", ["a-0.pt"]),
        ("two", ["first-0.pt", "a-0.pt"]),
        ("no-hold", ["a-0.pt"]),
        ("safetensors", ["a-0.safetensors"]),
        ("dcp", ["dcp/.metadata"]),
        ("dcp-async", ["dcp/.metadata"]),
        ("transformers", ["model/model.safetensors"]),
        ("lightning", ["a-0.ckpt"]),
    ],
)
def test_a_save_after_the_caught_exception_is_whole(tmp_path: Path, how: str, files: list[str]) -> None:
    job = run_job(tmp_path, torchrun("leaving.py", how, str(tmp_path)))
    assert job.code == ABORTED
    assert (tmp_path / "rank 0 came through").exists(), job.stderr
    for file in files:
        assert (tmp_path / file).stat().st_size
        if file.endswith((".pt", ".ckpt")):
            torch.load(tmp_path / file)
    assert "did not come back" not in job.stderr
    assert not job.left_behind


def test_a_save_after_the_last_batch_that_was_asked_for_is_whole(tmp_path: Path) -> None:
    job = run_job(tmp_path, torchrun("leaving.py", "limit", str(tmp_path)))
    assert job.report["reason"].startswith("stopped after batch 3")
    torch.load(tmp_path / "a-0.pt")


def test_nobody_stays_for_a_rank_that_waits_in_a_collective(tmp_path: Path) -> None:
    """It cannot save. Else both would end by its deadline."""
    job = run_job(tmp_path, torchrun("leaving.py", "in-step", str(tmp_path)))
    assert job.code == ABORTED
    assert (tmp_path / "rank 1 came through").exists()
    assert "did not come back" not in job.stderr
    assert not job.left_behind
