"""`rankwatch run` around what makes another user of the training: the training starts, and says why it is not watched."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from jobs import ROOT, run_job

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

OTHER = "nobody"
PYTHONS = (sys.executable, f"/usr/bin/python3.{sys.version_info.minor}")
SCRIPT = """\
import os
import torch

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(10):
    optimizer.zero_grad()
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
print("trained to its end as user", os.getuid())
"""
PATHS = os.pathsep.join([str(ROOT / "agent"), *(path for path in sys.path if path.endswith("site-packages"))])


@cache
def python_of_other() -> str:
    """An interpreter with torch that the other user may run; empty: there is none."""
    if os.geteuid() != 0:
        return ""
    for python in PYTHONS:
        try:
            env = {**os.environ, "PYTHONPATH": PATHS}
            subprocess.run([python, "-c", "import torch, rankwatch"], check=True, user=OTHER, extra_groups=[], env=env)
        except (OSError, subprocess.CalledProcessError):
            continue
        return python
    return ""


@pytest.mark.parametrize("by", [f"runuser -u {OTHER} --", f"gosu {OTHER}", f"sudo -E -u {OTHER} --", f"sudo -u {OTHER} --"])
def test_a_training_of_another_user_starts_and_says_why_it_is_not_watched(by: str, tmp_path: Path) -> None:
    program, *options = by.split()
    if shutil.which(program) is None:
        pytest.skip(f"needs {program}")
    if not python_of_other():
        pytest.skip(f"needs root, and a Python with torch that user {OTHER} can run")
    for folder in (tmp_path, *tmp_path.parents):
        if folder.owner() == "root" and not folder.stat().st_mode & 0o001:
            folder.chmod(0o711)
    (script := tmp_path / "train.py").write_text(SCRIPT)
    keeps_path = program != "sudo"  # sudo drops PYTHONPATH, -E or not
    command = [program, *options, *([] if keeps_path else ["env", f"PYTHONPATH={PATHS}"]), python_of_other(), str(script)]
    job = run_job(tmp_path, command, env={"PYTHONPATH": PATHS})
    assert job.code == 0, job.stderr
    assert "trained to its end as user" in job.stdout
    assert "no rank connected" in job.stderr
    assert "or it ran as another user" in job.stderr
    if keeps_path:
        assert "no connection to the collector: cannot read connection file" in job.stderr
        assert "runuser made another user of this process; training goes on without it" in job.stderr
