"""The examples of ``deploy/examples``: complete and short; they train, resume and fail as they say."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed.fsdp

from jobs import ROOT, Job, forked, run_job, torchrun

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

EXAMPLES = ROOT / "deploy" / "examples"
NAMES = ["train_ddp.py", "train_fsdp.py"]
LOGGING = {"log_tensorboard.py": "tensorboard", "log_wandb.py": "wandb"}
"""By the library that it needs."""


def train(tmp_path: Path, start: Callable[..., list[str]], name: str, *options: str) -> Job:
    if name == "train_fsdp.py" and not hasattr(torch.distributed.fsdp, "fully_shard"):
        pytest.skip("torch.distributed.fsdp.fully_shard came with torch 2.6")
    checkpoint = ["--checkpoint", str(tmp_path / "checkpoint.pt")] if name == "train_ddp.py" else []
    return run_job(tmp_path, start(str(EXAMPLES / name), *checkpoint, *options))


def losses(job: Job) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)$", job.stdout, re.MULTILINE)]


def log(tmp_path: Path, name: str, option: str) -> Job:
    pytest.importorskip(LOGGING[name])
    job = run_job(tmp_path, forked(str(EXAMPLES / name), option, str(tmp_path / "log"), "--batches", "21"))
    assert job.code == 0, job.stderr
    assert job.report["outcome"] == "finished"
    return job


@pytest.mark.parametrize("name", [*NAMES, *LOGGING])
def test_each_example_is_short(name: str) -> None:
    assert len((EXAMPLES / name).read_text().splitlines()) < 80


@pytest.mark.parametrize("name", NAMES)
def test_each_example_learns(tmp_path: Path, name: str) -> None:
    job = train(tmp_path, torchrun, name)
    assert job.code == 0, job.stderr
    assert job.report["outcome"] == "finished"
    first, *_, last = losses(job)
    assert last < 0.75 * first
    if name == "train_ddp.py":  # a restart resumes from its checkpoint
        again = train(tmp_path, forked, name, "--epochs", "4")
        assert re.findall(r"^epoch (\d)", again.stdout, re.MULTILINE) == ["3"]


@pytest.mark.parametrize("name", NAMES)
def test_each_example_fails_as_its_first_lines_say(tmp_path: Path, name: str) -> None:
    assert "With --lr 1e30 it goes wrong" in (EXAMPLES / name).read_text()
    job = train(tmp_path, forked, name, "--lr", "1e30")
    assert job.code == 77, job.stderr
    assert (job.verdict["batch"], job.verdict["optimizer_step"]) == (1, 1)
    assert job.left_behind == []


def test_tensorboard_has_what_was_measured(tmp_path: Path) -> None:
    log(tmp_path, "log_tensorboard.py", "--logdir")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "log"))
    events.Reload()
    for tag in ("loss", "abs_max/0/weight", "abs_min/2/output", "abs_max/(root)/grad_output"):
        assert [scalar.step for scalar in events.Scalars(tag)] == [0, 10, 20]
    assert all(0 < scalar.value < 10 for scalar in events.Scalars("abs_max/2/output"))


def test_wandb_has_what_was_measured(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    job = log(tmp_path, "log_wandb.py", "--dir")
    (run,) = (tmp_path / "log" / "wandb").glob("offline-run-*/run-*.wandb")
    kept = run.read_bytes()
    for name in (b"loss", b"abs_max/0/weight", b"abs_min/2/output", b"abs_max/(root)/grad_output"):
        assert kept.count(name) >= 3
    assert re.search(r"abs_max/\(root\)/output \d\.\d+", job.stderr)  # wandb's summary, from the last logged batch
