"""A real training that goes badly for a while: where this is seen meanwhile, and that it goes with the trouble."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from browser import browsing
from collectors import until
from jobs import RANKWATCH, environment, forked

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

GROWN = "the loss has grown x"


def asked(*command: str) -> str:
    return subprocess.run([*RANKWATCH, *command], env=environment(), capture_output=True, text=True, check=True).stdout


def test_a_loss_that_has_grown_is_seen_until_it_has_come_back(tmp_path: Path) -> None:
    runs, log = tmp_path / "runs", tmp_path / "log"
    runs.mkdir()
    command = [
        *RANKWATCH,
        "run",
        "--runs-dir",
        str(runs),
        "--job",
        "comes_back",
        "--",
        *forked("comes_back.py", str(tmp_path)),
    ]
    with log.open("w") as errors, subprocess.Popen(command, env=environment(), stderr=errors) as process:
        try:
            until(lambda: GROWN in asked("list", str(runs)))
            assert "  running, but  2  " in asked("list", str(runs))
            assert f"\n{GROWN}" in asked("top", str(runs), "--once")
            assert f"\n  but        {GROWN}" in asked("report", str(runs))
            assert "\n  written    after the step of batch 79\n" in asked("report", str(runs))
            (reason,) = json.loads(asked("report", str(runs), "--json"))["judgement"]["reasons"]
            assert (reason["kind"], reason["batch"]) == ("loss-grown", 80)
            with browsing(runs) as browser:
                browser.open("/run/comes_back-0")
                browser.shows("running, but", ".badge")
                browser.shows(GROWN, ".panel")
                (tmp_path / "back").touch()
                browser.until(lambda: GROWN not in browser.text())
                browser.shows("running", ".badge")
            assert "running, but" not in asked("list", str(runs))
        finally:
            for name in ("back", "end"):
                (tmp_path / name).touch()
    assert process.returncode == 0
    told = log.read_text()
    assert f"WARNING rankwatch: run comes_back-0: so far: {GROWN}" in told
    assert f"no longer so: {GROWN}" in told
    assert "finished, but" not in told
