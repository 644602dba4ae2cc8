"""A real job in which one rank hangs in its own code, and the other waits for it in a collective."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import commands
from browser import browsing, needed
from collectors import until
from jobs import RANKWATCH, environment, forked, run_job, torchrun
from rankwatch.errors import EXIT_ABORTED

pytestmark = pytest.mark.e2e

STALLED = "10"
"""More seconds than a busy machine takes for what comes before."""

SLEEPS = "stalls.py:22 in load: time.sleep(0.2)\n"
WIDER = "return [...document.querySelectorAll('table')].some((of) => of.parentElement.scrollWidth > of.parentElement.clientWidth)"
"""Whether a table has to be scrolled sideways."""

WAITS = "is in all_reduce of 1 float32 (gloo, 2 ranks), called at ", "stalls.py:37 in main: dist.all_reduce(loss.detach())\n"


def stacks_in(text: str) -> bool:
    return SLEEPS in text and all(part in text for part in WAITS)


@contextmanager
def stalling(folder: Path, after: str = STALLED) -> Iterator[subprocess.Popen[bytes]]:
    """The job; when this is left, its rank goes on."""
    told = folder / "go-on"
    runs = ["--runs-dir", str(folder / "runs"), "--job", "train", "--no-status"]
    start = [*RANKWATCH, "run", *runs, "--stall-after", after, "--heartbeat", "0.5", "--", *forked("stalls.py")]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(start, env=environment(STALL_FILE=str(told)), stdout=log, stderr=log)
        try:
            yield process
        finally:
            told.touch()
            process.wait()


def test_a_stall_is_seen_with_its_stacks_while_it_lasts_and_not_afterwards(tmp_path: Path) -> None:
    runs = str(tmp_path / "runs")
    log = tmp_path / "log"

    def said(*arguments: str) -> str:
        return commands.run(*arguments).stdout

    with stalling(tmp_path) as process:
        until(lambda: stacks_in(log.read_text()))
        assert "run train-0: rank 1 of 2 (" in log.read_text()
        until(lambda: stacks_in(said("report", runs)))
        report = json.loads(said("report", runs, "--json"))
        assert (report["stall"]["ranks"], report["stall"]["waiting"]) == ([1], [0])
        (listed,) = json.loads(said("list", runs, "--json"))
        assert (listed["state"], listed["is_over"]) == ("stalled", False)
        assert "rank 1 of 2 (" in listed["stalled"]
        top = said("top", runs, "--once")
        assert "stalls.py:22 in load" in top
        assert "rank 0 is in all_reduce of 1 float32" in top
        assert "main thread" in said("top", runs, "--once", "--rank", "1")
    assert process.returncode == 0
    assert "run train-0: rank 1 went on" in log.read_text()
    report = json.loads(said("report", runs, "--json"))
    assert (report["outcome"], report["stall"], report["stalled"]) == ("finished", None, "")
    assert json.loads(said("list", runs, "--json"))[0]["state"] == "finished"


@pytest.mark.slow
def test_stacks_are_shown_on_demand_before_there_is_a_stall_and_a_stopped_rank_is_named(tmp_path: Path) -> None:
    run = str(tmp_path / "runs" / "train-0")

    def stacks(*options: str) -> str:
        return commands.run("stack", run, *options).stdout

    with stalling(tmp_path, after="300") as process:
        until(lambda: stacks_in(stacks()))
        assert "stalled" not in (tmp_path / "log").read_text()
        assert stacks("--rank", "0").startswith("rank 0 of 2 (")
        rows = json.loads(commands.run("report", run, "--json").stdout)["ranks"]
        stopped = next(row["pid"] for row in rows if row["rank"] == 1)
        os.kill(stopped, signal.SIGSTOP)
        told = stacks("--rank", "1")
        os.kill(stopped, signal.SIGCONT)
        assert "gave no stack: it has been silent for 1" in told
    assert process.returncode == 0
    assert f"no collector has run {Path(run).name} any more" in commands.run("stack", run).stderr


@pytest.mark.slow
def test_the_report_of_a_run_that_a_stall_stopped_has_both_stacks(tmp_path: Path) -> None:
    """Under torchrun. The rank that is stopped in its sleep is ended at its deadline."""
    job = run_job(
        tmp_path,
        torchrun("stalls.py"),
        *("--stall-after", STALLED, "--on-stall", "abort", "--abort-grace", "2"),
        env={"STALL_FILE": str(tmp_path / "never")},
    )
    assert job.report["outcome"] == "stalled"
    assert job.code == EXIT_ABORTED
    assert "rank      : 1 (local_rank: 1)\n" in job.stderr.partition("Root Cause")[2]
    assert {stack["rank"]: stack["why_not"] for stack in job.report["stall"]["stacks"]} == {1: "", 0: ""}
    for text in (job.stderr, (job.run_dir / "report.txt").read_text()):
        assert stacks_in(text)
    assert "stalled: rank 1 of 2" in job.stdout
    again = commands.run("report", str(job.run_dir), "--frames", "100").stdout  # from the record
    assert stacks_in(again)


@pytest.mark.slow
def test_a_rank_that_waits_for_a_collective_it_began_before_says_which(tmp_path: Path) -> None:
    job = run_job(
        tmp_path,
        forked("stalls.py", "async"),
        *("--stall-after", STALLED, "--on-stall", "abort", "--abort-grace", "2"),
        env={"STALL_FILE": str(tmp_path / "never")},
    )
    waits = {stack["rank"]: stack["waits"] for stack in job.report["stall"]["stacks"]}
    assert waits[0].startswith("wait for the all_reduce that was begun before, called at ")
    assert waits[0].endswith("stalls.py:36 in main: work.wait()")


@needed
@pytest.mark.slow
def test_the_page_shows_a_stall_while_it_lasts(tmp_path: Path) -> None:
    with stalling(tmp_path):
        until(lambda: stacks_in((tmp_path / "log").read_text()))
        with browsing(tmp_path / "runs") as browser:
            browser.shows("stalled", ".badge")
            browser.open("/run/train-0")
            browser.shows("stalls.py:22 in load", "[aria-label=Stall]")
            browser.shows("waits for a stalled rank", "tr")
            browser.run("document.querySelector('[aria-label=Stall] details').open = true")
            browser.shows("main thread", "[aria-label=Stall] pre")
            browser.size(390, 844)
            assert not browser.run(WIDER)
            (tmp_path / "go-on").touch()
            browser.until(lambda: "finished" in browser.text(".badge"))
            assert not browser.text("[aria-label=Stall]")
            browser.shows("finished", ".badge")
