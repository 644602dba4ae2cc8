"""`rankwatch run` around what makes another user of the training: the training starts, and says why it is not watched."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from jobs import ROOT, finished, run_job

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


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that the other user can search. Those of pytest are closed again by each pytest that starts."""
    if not python_of_other():
        pytest.skip(f"needs root, and a Python with torch that user {OTHER} can run")
    with tempfile.TemporaryDirectory(prefix="rankwatch-other-user-") as made:
        (path := Path(made)).chmod(0o711)
        yield path


@pytest.mark.parametrize("by", [f"runuser -u {OTHER} --", f"gosu {OTHER}", f"sudo -E -u {OTHER} --", f"sudo -u {OTHER} --"])
def test_a_training_of_another_user_starts_and_says_why_it_is_not_watched(by: str, folder: Path) -> None:
    program, *options = by.split()
    if shutil.which(program) is None:
        pytest.skip(f"needs {program}")
    (script := folder / "train.py").write_text(SCRIPT)
    keeps_path = program != "sudo"  # sudo drops PYTHONPATH, -E or not
    command = [program, *options, *([] if keeps_path else ["env", f"PYTHONPATH={PATHS}"]), python_of_other(), str(script)]
    job = run_job(folder, command, env={"PYTHONPATH": PATHS})
    assert job.code == 0, job.stderr
    assert "trained to its end as user" in job.stdout
    assert "no rank connected" in job.stderr
    assert "or it ran as another user" in job.stderr
    if keeps_path:
        assert "no connection to the collector: cannot read connection file" in job.stderr
        assert "runuser made another user of this process; training goes on without it" in job.stderr


WATCHED = SCRIPT.replace("for _ in", "with rankwatch.watch(model):\n    pass\nfor _ in").replace(
    "import torch", "import rankwatch\nimport torch"
)
DROP_IN = SCRIPT.replace("for _ in", "rankwatch.DebugUnderflowOverflow(model)\nfor _ in").replace(
    "import torch", "import rankwatch\nimport torch"
)


@pytest.mark.parametrize("text", [SCRIPT, WATCHED, DROP_IN], ids=["zero code", "watch", "drop-in"])
@pytest.mark.parametrize("by", ["run", "attach", "RANKWATCH_CONFIG"])
def test_a_training_whose_options_its_user_may_not_read_starts_and_says_why_it_is_not_watched(
    by: str, text: str, folder: Path
) -> None:
    (script := folder / "train.py").write_text(text)
    (options := folder / "options.toml").write_text("every = 2\n")
    options.chmod(0o600)
    command = ["runuser", "-u", OTHER, "--", python_of_other()]
    env = {"PYTHONPATH": PATHS}
    if by == "run":
        job = run_job(folder, [*command, str(script)], "--rankwatch-config", str(options), env=env)
        done = job.code, job.stdout, job.stderr
    else:
        attach = ["-m", "rankwatch.attach", "--rankwatch-config", str(options)] if by == "attach" else []
        env |= {"RANKWATCH_CONFIG": str(options)} if by == "RANKWATCH_CONFIG" else {}
        ran = finished([*command, *attach, str(script)], folder, **env)
        done = ran.returncode, ran.stdout, ran.stderr
    code, stdout, stderr = done
    assert (code, "trained to its end as user" in stdout) == (0, True), stderr
    if by != "RANKWATCH_CONFIG" or text != SCRIPT:  # else nothing of rankwatch runs
        said = f"cannot read the options in {options}: Permission denied, as this process is of user "
        assert stderr.count(said) == 1
        assert "or start as its owner; training goes on, and is not watched" in stderr


def test_a_command_whose_options_its_user_may_not_read_refuses(folder: Path) -> None:
    (options := folder / "options.toml").touch(0o600)
    rankwatch = [python_of_other(), "-m", "rankwatch_monitor", "run", "--rankwatch-config", str(options), "--", "true"]
    done = finished(["runuser", "-u", OTHER, "--", *rankwatch], folder, PYTHONPATH=f"{PATHS}:{ROOT / 'monitor'}")
    assert (done.returncode, "Permission denied" in done.stderr) == (2, True), done.stderr
