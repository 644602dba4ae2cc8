"""Healthy trainings of several ranks, those of the table ``agreeing``: nothing is said of them, and replicas were compared."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from jobs import SCRIPTS, Nursery, run_job
from recorded.replicas import complaints

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

FEEDS = [
    *("ddp", "diloco_under_no_sync", "joined", "compiled_inside", "optimizer_in_backward"),
    *("fsdp1", "fsdp2", "fsdp2_watched_before_it_is_wrapped", "hsdp", "tensor_parallel_and_hsdp"),
    *("gradients_reduced_by_hand", "marked_as_tensor_parallel", "pipeline", "grown_in_mid_run"),
]
"""One for each way in which an agent learns what is to be compared; ``test_recorded_replicas.py`` has all of them."""

NUMBERS = [
    *("replicas_with_gradients", "unused_parameters", "scaler_that_skips", "a_growing_norm", "spikes", "lengths_that_vary"),
    "tensor_parallel",
]
"""In which numbers go up and down, or differ by rank. What ranks send of their batches is in no recording."""


@pytest.mark.parametrize("name", [*FEEDS, *NUMBERS])
def test_replicas_of_a_healthy_training_are_left_in_peace(tmp_path: Path, nursery: Nursery, name: str) -> None:
    assert complaints(nursery.forked, "agreeing", name, tmp_path) == []


def test_a_training_that_loses_a_node_goes_on_with_half_of_its_ranks(tmp_path: Path) -> None:
    elastic = [sys.executable, str(SCRIPTS / "elastic.py"), str(tmp_path)]
    job = run_job(tmp_path, elastic, "--on-lost", "wait", "--job", "train")
    assert job.code == 0, job.stdout + job.stderr
    runs = [path for path in job.run_dir.parent.glob("train-*") if not path.is_symlink()]
    by_restart = {int(path.name.removeprefix("train-")): json.loads((path / "report.json").read_text()) for path in runs}
    for report in by_restart.values():
        assert (report["verdict"], report["notices"], report["desync"]) == (None, [], [])
    # torchrun may start the ranks anew more than once: on a busy machine, an agent takes the other one for dead sooner.
    whole, *resumed = [by_restart[restart] for restart in sorted(by_restart)]
    assert resumed[-1]["outcome"] == "finished"
    for reports, ranks, steps in (([whole], 4, 110), (resumed, 2, 100)):
        compared = [report["replicas"] for report in reports if report["replicas"] is not None]
        assert {(one["parameters"], one["ranks"], one["equal"]) for one in compared} == {(4, ranks, True)}
        assert sum(one["times"] for one in compared) >= steps - 10


def test_a_training_is_resumed_by_other_numbers_of_ranks(tmp_path: Path, nursery: Nursery) -> None:
    """Two replicas of two shards; then the shards of two ranks; then a single rank, which has nobody to be compared with."""
    checkpoint = str(tmp_path / "checkpoint")
    for ranks in (4, 2, 1):
        job = run_job(tmp_path / str(ranks), nursery.forked("resumed.py", checkpoint, ranks=ranks))
        assert job.code == 0, job.stdout + job.stderr
        assert (job.report["verdict"], job.report["notices"], job.report["desync"]) == (None, [], [])
        if ranks > 1:
            assert (job.report["replicas"]["parameters"], job.report["replicas"]["equal"]) == (4, True)
        else:
            assert job.report["replicas"] is None
