"""A script that ends before any rank connects: its own error is last on the terminal, with one line of ours."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from jobs import Job, run_job

pytestmark = pytest.mark.e2e

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
RAISES = "import os\n\ndef main():\n    raise ValueError('no such data set')\n\nmain()\n"
ENDED = "rankwatch: exit code {} before any rank connected, so there is no report"


def ours(job: Job) -> list[str]:
    return [line for line in job.stderr.splitlines() if "rankwatch: " in line]


@pytest.mark.parametrize(
    ("script", "code", "error"),
    [
        (RAISES, 1, "ValueError: no such data set"),
        ("import sys\nsys.exit(3)\n", 3, ""),
        ("def broken(:\n", 1, "SyntaxError: invalid syntax"),
        (None, 2, "can't open file"),
    ],
)
def test_without_a_launcher_the_error_is_pythons_own(script: str | None, code: int, error: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    if script is not None:
        path.write_text(script)
    job = run_job(tmp_path, [sys.executable, str(path)])
    assert job.code == code
    assert job.stderr.splitlines()[-1].endswith(ENDED.format(code))
    assert len(ours(job)) == 1
    assert error in job.stderr
    assert len([line for line in job.stderr.splitlines() if "Traceback" in line]) == (script == RAISES)


def test_a_command_that_trains_nothing_is_told_so_in_a_line(tmp_path: Path) -> None:
    job = run_job(tmp_path, [sys.executable, "-c", "print('done')"])
    assert (job.code, job.stdout) == (0, "done\n")
    (line,) = job.stderr.splitlines()
    said = "no rank connected: the command trained no model; or its Python has no rankwatch"
    assert re.match(rf"\S+ WARNING rankwatch: {said}", line)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "code", "error"),
    [
        (RAISES, 1, "ValueError: no such data set"),
        ("def broken(:\n", 1, "SyntaxError: invalid syntax"),
        (
            "import rankwatch, torch\nrankwatch.watch(torch.nn.Linear(1, 1), connection='no/connection.json')\n",
            2,
            "rankwatch.errors.ConnectionFileError: ",
        ),
        ("import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'raise KeyError(1)'])\nsys.exit(3)\n", 3, ""),
        (None, 2, ""),
    ],
)
def test_torchruns_summary_has_the_error_of_the_script(script: str | None, code: int, error: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    if script is not None:
        path.write_text(script)
    # Of one rank: a second one that torchrun ends in the same second may come first in its summary.
    job = run_job(tmp_path, [*TORCHRUN[:-1], "1", str(path)])
    assert job.code == 1  # torchrun's
    assert job.stderr.splitlines()[-1].endswith(ENDED.format(1))
    assert len(ours(job)) == 1
    assert f"exitcode  : {code} " in job.root_cause
    if error:
        assert error in job.root_cause
        assert "train.py" in job.root_cause
    else:
        assert "KeyError" not in job.root_cause  # of a child that the rank went on without
