"""The long-lived collector with real jobs: several at once, independent of each other."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest

from collectors import Running
from jobs import RANKWATCH, environment, finished, forked, torchrun

pytestmark = pytest.mark.e2e


@pytest.mark.slow
def test_two_jobs_at_once(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    with subprocess.Popen(
        [*RANKWATCH, "collector", "--listen", "tcp://127.0.0.1:0", "--runs-dir", str(runs)],
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as daemon:  # fmt: skip
        assert daemon.stderr is not None
        assert "collecting on" in daemon.stderr.readline()
        jobs = {
            name: subprocess.Popen(
                forked("train.py", scenario),
                env=environment(RANKWATCH_CONNECTION=str(runs / "connection.json"), RANKWATCH_JOB=name),
                stderr=subprocess.PIPE, text=True,
            )
            for name, scenario in (("bad", "overflow"), ("good", "healthy"))
        }  # fmt: skip
        errors = {name: job.communicate()[1] for name, job in jobs.items()}
        assert {name: job.returncode for name, job in jobs.items()} == {"bad": 1, "good": 0}, errors
        daemon.send_signal(signal.SIGTERM)
        out, _ = daemon.communicate()
    assert daemon.returncode == 0
    reports = {name: json.loads((runs / f"{name}-0" / "report.json").read_text()) for name in jobs}
    assert {name: report["outcome"] for name, report in reports.items()} == {"bad": "aborted", "good": "finished"}
    assert reports["bad"]["verdict"]["module"] == "blocks.2.square"
    # The daemon's stdout consists of the reports, with the last frames above a verdict.
    bad, good = ((runs / f"{name}-0" / "report.txt").read_text() for name in ("bad", "good"))
    assert bad.split("\n\n")[-1].splitlines()[0] in out
    assert bad.count("Linear") > out.count("Linear") > 0
    short = good.partition("  command ")[0]  # with what it was made, the file alone says
    assert f"{short}  record     rankwatch report {runs / 'good-0'} --all\n" in out
    assert not (runs / "connection.json").exists()


@pytest.mark.slow
def test_a_training_continues_without_its_collector(tmp_path: Path) -> None:
    """A connection file without a collector: one warning, and a local report when a frame trips."""
    Running(tmp_path).stop(clean=False)
    connection = {"RANKWATCH_CONNECTION": str(tmp_path / "connection.json")}
    healthy = finished(forked("train.py", "healthy"), **connection)
    assert healthy.returncode == 0
    assert healthy.stderr.count("no collector answers at tcp://127.0.0.1:") == 2
    bad = finished(torchrun("train.py", "overflow"), tmp_path, **connection)
    assert bad.returncode == 1
    assert "rankwatch: first inf of this process\n  culprit    rank 1 of 2" in bad.stdout
    assert "certainty  this rank alone: no collector in reach" in bad.stdout
    assert "blocks.2.square (Square), output: inf" in bad.stderr.rpartition("Root Cause")[2]
