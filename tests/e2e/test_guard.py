"""A bad gradient of one rank, which the all-reduce gives to all: the weights stay finite, and the verdict names its origin."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from jobs import Job, forked, run_job, torchrun

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SCRIPT = Path(__file__).parent / "scripts" / "guarded.py"
LINE = next(number for number, line in enumerate(SCRIPT.read_text().splitlines(), 1) if "its slope at 0" in line)


def ended(tmp_path: Path, name: str, ranks: int) -> Job:
    job = run_job(tmp_path, forked("guarded.py", name, ranks=ranks))
    assert job.left_behind == []
    assert [f"rank {rank}: weights finite" in job.stdout for rank in range(ranks)] == [True] * ranks, job.stdout
    return job


def operator_of(verdict: dict[str, Any]) -> tuple[str, str, int]:
    closeup = verdict["closeup"]
    return closeup["operator"], closeup["node"], closeup["source"]["line"]


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        *(("plain", 2), ("plain", 4), ("with_gradients", 2), ("clipped", 3), ("late", 2)),
        ("accumulated", 2),
        *(("in_buckets", 3), ("of_a_static_graph", 2), ("with_unused", 2), ("compressed", 4), ("by_hand", 2)),
        *(("compiled_around", 2), ("compiled_within", 2)),
        *(("refused", 2), ("asserted", 4)),
    ],
)
def test_the_rank_and_the_line_that_made_it_are_named(tmp_path: Path, name: str, ranks: int) -> None:
    job = ended(tmp_path, name, ranks)
    assert job.code == 77, job.stderr
    verdict = job.verdict
    assert (verdict["rank"], verdict["batch"], verdict["module"]) == (ranks - 1, 5, "length")
    assert (verdict["cause"], verdict["state"], verdict["certainty"]) == ("gradient", "nan", "complete")
    assert operator_of(verdict) == ("aten.div.Tensor", "SqrtBackward0", LINE)
    assert (verdict["closeup"]["recurred"], verdict["closeup"]["of"]) == (3, 3)
    assert "in SqrtBackward0, the backward of" in job.stdout


def test_an_optimizer_that_steps_within_the_backward(tmp_path: Path) -> None:
    job = ended(tmp_path, "in_the_backward", 2)
    verdict = job.verdict
    assert (job.code, verdict["rank"], verdict["batch"], verdict["cause"]) == (77, 1, 5, "gradient")
    assert (verdict["module"], verdict["reading"]) == ("first", "weight.grad")
    assert "the optimizer steps within the backward" in verdict["evidence"]


def test_an_anomaly_that_torch_itself_detects(tmp_path: Path) -> None:
    """It stops one rank within its backward; the other waits in the all-reduce, and has not answered."""
    job = ended(tmp_path, "anomalous", 2)
    verdict = job.verdict
    assert (job.code, verdict["rank"], verdict["batch"], verdict["module"]) == (77, 1, 5, "length")
    assert operator_of(verdict) == ("aten.div.Tensor", "SqrtBackward0", LINE)


def test_a_step_that_the_scaler_skips_trips_nothing(tmp_path: Path) -> None:
    job = ended(tmp_path, "scaled", 2)
    assert (job.code, job.report["verdict"]) == (0, None), job.stdout + job.stderr


def test_a_penalty_that_all_ranks_make_blames_none(tmp_path: Path) -> None:
    job = ended(tmp_path, "penalised", 2)
    verdict = job.verdict
    assert (job.code, verdict["batch"], verdict["cause"]) == (77, 5, "gradient")
    assert verdict["reading"] == "gradient within the loss"
    assert (verdict["closeup"]["operator"], verdict["closeup"]["node"]) == ("aten.sqrt.default", "SqrtBackward0")
    assert "no single rank" in job.stdout


def test_a_penalty_of_gradients_names_the_rank_that_made_it(tmp_path: Path) -> None:
    """Run again, that rank's own gradient is finite: the penalty does not lead through the model's outputs."""
    job = ended(tmp_path, "penalised_by_gradients", 3)
    verdict = job.verdict
    assert (job.code, verdict["rank"], verdict["optimizer_step"], verdict["cause"]) == (77, 2, 5, "gradient")
    assert (verdict["closeup"]["operator"], verdict["closeup"]["node"]) == ("aten.sqrt.default", "SqrtBackward0")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("synchronised", "communicates by c10d"),
        ("fsdp1", "FullyShardedDataParallel"),
        ("fsdp2", "FSDPModule"),
        ("tensor_parallel", "sharded"),
    ],
)
def test_what_communicates_is_guarded_and_not_run_again(tmp_path: Path, name: str, why: str) -> None:
    job = ended(tmp_path, name, 2)
    verdict = job.verdict
    assert (job.code, verdict["batch"], verdict["cause"]) == (77, 5, "gradient")
    assert verdict["reading"].startswith("weight.grad")
    assert "not run again" in verdict["evidence"]
    assert why in verdict["evidence"]
    assert verdict["rank"] is None or "no single rank" in job.stdout


def test_of_what_is_clipped_and_not_run_again_the_first_one_is_not_known(tmp_path: Path) -> None:
    job = ended(tmp_path, "fsdp2_clipped", 2)
    verdict = job.verdict
    assert (job.code, verdict["batch"], verdict["cause"]) == (77, 5, "gradient")
    assert "no single rank" in job.stdout
    assert "so were all others, as clip_grad_norm_ or a bad loss makes them: which one was bad first" in verdict["evidence"]
    assert "not run again: it communicates (FSDPModule)" in verdict["evidence"]


@pytest.mark.parametrize(
    ("name", "library", "module", "step"),
    [
        ("trainer", "transformers", "length", 2),
        ("lightning", "lightning", "net.length", 5),
        ("asserting", "lightning", "net.length", 5),
        ("accelerate", "accelerate", "length", 2),
    ],
)
def test_a_framework_keeps_its_weights(tmp_path: Path, name: str, library: str, module: str, step: int) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    command = torchrun("frameworks.py", f"guarded_{name}", str(tmp_path / "work"))
    job = run_job(tmp_path, command)
    verdict = job.verdict
    assert job.code == 77, job.stderr
    assert (verdict["rank"], verdict["batch"], verdict["optimizer_step"], verdict["module"]) == (1, 5, step, module)
    assert operator_of(verdict)[:2] == ("aten.div.Tensor", "SqrtBackward0")
    assert verdict["closeup"]["source"]["text"].endswith("# its slope at 0 is infinite")
    assert all(f"rank {rank}: weights finite" in job.stdout for rank in range(2)), (job.stdout[-3000:], job.stderr[-3000:])
