"""A loss that goes bad on one of two DDP ranks, while all outputs of the model are finite. No option of ``watch`` is set."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs import forked_apart, run_job

pytestmark = pytest.mark.slow

LONG = "60"
"""Decision window in seconds: a verdict comes only if no rank is waited for in vain."""


@pytest.mark.parametrize(
    ("what", "operator"),
    [("ignored", "aten.nll_loss_forward.default"), ("tokens", "aten.div.Tensor"), ("nan", "aten.mul.Tensor")],
)
def test_a_bad_loss_is_its_ranks_in_its_batch(tmp_path: Path, what: str, operator: str) -> None:
    job = run_job(tmp_path, forked_apart("losses.py", what), "--decision-window", LONG)
    assert job.code == 77, job.stderr
    verdict = job.verdict
    assert (verdict["rank"], verdict["batch"], verdict["module"], verdict["reading"]) == (1, 5, "", "loss")
    assert (verdict["state"], verdict["certainty"]) == ("nan", "complete")
    assert "the model's output was finite" in verdict["evidence"]
    closeup = verdict["closeup"]
    assert closeup["operator"] == operator
    assert "not run again: the loss is computed outside of the model's forward; backward was called at " in closeup["note"]
    if what == "nan":
        assert "the code gives it nan as its other" in verdict["evidence"]
    losses = {loss["rank"]: loss for loss in job.report["loss"]}
    assert (losses[1]["batch"], losses[1]["state"]) == (5, "nan")
    assert (losses[0]["batch"] >= 5, losses[0]["state"]) == (True, "finite")  # it may begin a batch more


def test_a_scale_that_shrinks_for_ever_ends_in_a_verdict(tmp_path: Path) -> None:
    job = run_job(tmp_path, forked_apart("losses.py", "shrinks"), "--decision-window", LONG)
    assert job.code == 77, job.stderr
    assert (job.verdict["batch"], job.verdict["cause"]) == (13, "gradient")
    assert "since batch 3" in job.verdict["evidence"]
