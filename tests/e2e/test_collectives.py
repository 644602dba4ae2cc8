"""Real ranks of which one calls another collective than the others: told before they hang, or at the stall or failure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import commands
from browser import browsing, needed
from jobs import SCRIPTS, forked, run_job, torchrun

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SOURCE = (SCRIPTS / "collectives.py").read_text().splitlines()
STALLED = "--stall-after", "10", "--on-stall", "abort", "--abort-grace", "3"
"""More seconds than a busy machine takes for what comes before."""

GRADIENT = "all_reduce of 16 float32 (sum)", "dist.all_reduce(parameter.grad)"
FLAG = "all_reduce of {} float32 (sum)", "dist.all_reduce(flag({}), group=side[0]"


def flag(length: str, of: str | None = None) -> tuple[str, str]:
    return FLAG[0].format(length), FLAG[1].format(of if of is not None else length)


# By the name of a training: the number of the call, how it differs, the odd rank's call and line, and the others'.
LIVE = {
    "barrier": (7, "more", ("barrier", "dist.barrier(side[0]"), flag("1", "")),
    "kind": (7, "other", ("broadcast of 1 float32 from rank 0", "dist.broadcast(flag(), 0, group=side[0],"), flag("1", "")),
    "size": (7, "other", flag("5", "5 if odd else 4"), flag("4", "5 if odd else 4")),
    "group": (13, "other", flag("1", ""), ("broadcast of 1 float32 from rank 0", "group=side[1 if odd else 0]")),
    "order": (13, "other", flag("3"), flag("2")),
}
HANGS = {
    "gathered": (0, 16, "other", ("all_gather_object", "dist.all_gather_object("), GRADIENT),
    "evaluated": (0, 16, "more", ("all_reduce of 16 float32 (max)", "dist.all_reduce(flag(16), dist.R"), GRADIENT),
    "skips": (1, 16, "other", ("all_gather", "dist.all_gather([flag()"), GRADIENT),
    "uneven": (1, 14, "other", ("barrier", "    dist.barrier()"), GRADIENT),
}


def lines_of(part: str) -> set[int]:
    return {number for number, line in enumerate(SOURCE, 1) if part in line}


def check(found: dict[str, Any], rank: int, number: int, how: str, *sides: tuple[str, str]) -> None:
    assert (found["number"], found["how"], found["is_first"]) == (number, how, True)
    assert [side["ranks"] for side in found["sides"]] == [[rank], [one for one in range(3) if one != rank]]
    for side, (what, line) in zip(found["sides"], sides, strict=True):
        assert side["what"] == what
        file, _, rest = side["site"].partition(":")
        assert file.endswith("collectives.py")
        assert int(rest.partition(" ")[0]) in lines_of(line), side["site"]


@pytest.mark.parametrize("name", LIVE)
def test_what_nobody_waits_for_is_told_while_the_run_goes_on(name: str, tmp_path: Path) -> None:
    told = tmp_path / "told"
    tells = f'test "$RANKWATCH_EVENT" != collectives || cat > {told}'
    job = run_job(tmp_path, forked("collectives.py", name, str(told), ranks=3), "--on-verdict", tells, calls_differ=True)
    assert (job.code, job.report["outcome"]) == (0, "finished"), job.stderr
    (found,) = job.report["collectives"]
    check(found, 0, *LIVE[name])
    run = job.report["run"]["id"]
    assert job.stderr.count(f"WARNING rankwatch: run {run}: {found['text']}\n") == 1
    assert f"\n  calls      {found['text']}\n" in (job.run_dir / "report.txt").read_text()
    assert f"\n  calls      {found['text']}\n" in commands.run("report", str(job.run_dir), "--all").stdout  # from the record
    event = json.loads(told.read_text())
    assert (event["event"], event["text"]) == ("collectives", found["text"])


@pytest.mark.parametrize("name", HANGS)
def test_what_others_wait_for_is_told_with_the_stall(name: str, tmp_path: Path) -> None:
    job = run_job(tmp_path, forked("collectives.py", name, ranks=3), *STALLED, calls_differ=True)
    assert job.report["outcome"] == "stalled", job.stderr
    (found,) = job.report["collectives"]
    check(found, *HANGS[name])
    assert f"; {found['text']}" in job.report["reason"]
    assert job.report["advice"]["action"] == "fix-code"


@needed
def test_the_page_of_a_stall_says_once_what_differs(tmp_path: Path) -> None:
    job = run_job(tmp_path, forked("collectives.py", "uneven", ranks=3), *STALLED, calls_differ=True)
    with browsing(job.run_dir.parent) as browser:
        browser.open(f"/run/{job.run_dir.name}")
        browser.shows("rank 1 called another collective than ranks 0, 2", "[aria-label=Stall] li")
        assert not browser.text("[aria-label=Collectives]")


def test_the_root_cause_is_the_rank_that_differs(tmp_path: Path) -> None:
    job = run_job(tmp_path, torchrun("collectives.py", "uneven", ranks=3), *STALLED, calls_differ=True)
    assert job.report["outcome"] == "stalled", job.stderr
    assert "rank      : 1 (local_rank: 1)" in job.root_cause
    assert "rank 1 called another collective than ranks 0, 2: its 14th of the default group is barrier at " in job.root_cause
    assert "only followed" not in job.root_cause


def test_of_a_rank_that_left_the_loop_early_it_is_said_what_it_has_not_called(tmp_path: Path) -> None:
    job = run_job(tmp_path, forked("collectives.py", "leaves", ranks=3), calls_differ=True)
    assert job.report["outcome"] == "failed", job.stderr
    (found,) = job.report["collectives"]
    assert (found["how"], found["number"], found["sides"][0]["ranks"]) == ("awaited", 14, [1])
    assert found["text"].endswith("): it has ended after batch 5")
    assert job.report["reason"].endswith(found["text"])


def test_ranks_that_call_the_same_are_not_told(tmp_path: Path) -> None:
    """Where anything is told, ``run_job`` fails."""
    job = run_job(tmp_path, forked("collectives.py", "healthy", ranks=3))
    assert (job.code, job.report["outcome"]) == (0, "finished")
