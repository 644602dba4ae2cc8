"""A training whose bad steps were left out ends, bit for bit, as the one without these steps, on each of its ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch.distributed.fsdp

from jobs import SCRIPTS, environment, torchrun

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(torch.distributed.fsdp, "fully_shard"), reason="fully_shard came with torch 2.6"),
]


FOUR = [(4, 140), (4, 160), (4, 180)]


def tried(*what: str, ranks: int) -> list[dict[str, Any]]:
    command = torchrun("left_out.py", *what, ranks=ranks)
    job = subprocess.run(command, capture_output=True, text=True, env=environment(OMP_NUM_THREADS="1"), check=False)
    assert job.returncode == 0, job.stderr[-4000:]
    lines = [line.partition("left out ")[2] for line in job.stdout.splitlines() if line.startswith("left out ")]
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("third", range(3))
@pytest.mark.parametrize("ranks", [2, 4])
def test_each_way_of_training(ranks: int, third: int) -> None:
    lines = tried("table", str(third), ranks=ranks)
    assert len(lines) > 17
    assert [line for line in lines if not all(line["same"])] == []
    assert [line for line in lines if not any(line["left_out"])] == []


def test_on_a_device() -> None:
    """With torch's own SyncBatchNorm. Without a device, the same ways on the CPU."""
    lines = tried("device", ranks=2)
    assert len(lines) == 10
    assert [line for line in lines if not all(line["same"]) or not any(line["left_out"])] == []


@pytest.mark.parametrize(("ranks", "first"), [*[(2, first) for first in range(0, 100, 20)], (3, 100), (3, 120), *FOUR])
def test_schedules_that_are_drawn(ranks: int, first: int) -> None:
    """Two hundred in all, by their seeds."""
    lines = tried("drawn", str(first), "20", ranks=ranks)
    assert len(lines) == 20
    assert [line for line in lines if not all(line["same"])] == []


@pytest.mark.parametrize(
    ("way", "ranks"), [("gan", 1), *[(way, ranks) for way in ("accelerate", "lightning", "trainer") for ranks in (1, 2)]]
)
def test_frameworks_and_a_gan(way: str, ranks: int) -> None:
    """The frameworks call the optimizers in their own ways; of a GAN, the step of one optimizer alone is bad."""
    pytest.importorskip({"gan": "torch", "trainer": "transformers"}.get(way, way))
    alone = [sys.executable, str(SCRIPTS / "left_out_by.py"), way]
    command = alone if ranks == 1 else torchrun("left_out_by.py", way, ranks=ranks)
    job = subprocess.run(command, capture_output=True, text=True, env=environment(OMP_NUM_THREADS="1"), check=False)
    assert job.stdout.count("same: True, left out: 1") == ranks, job.stdout + job.stderr[-4000:]
