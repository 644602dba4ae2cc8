"""``deploy/systemd``: the unit is valid and hardened; its collector serves, ends by SIGTERM, and retains its keys."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from jobs import INTERPRETER, ROOT, environment

pytestmark = [pytest.mark.e2e, pytest.mark.cluster, pytest.mark.slow]

UNIT = (ROOT / "deploy" / "systemd" / "rankwatch.service").read_text()
EXPOSURE = 20
"""In tenths, of 100, as ``systemd-analyze security`` counts."""


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The unit, with the path of an installed rankwatch."""
    program = tmp_path / "rankwatch"
    program.write_text(f'#!/bin/sh\nexec {INTERPRETER} -m rankwatch_monitor "$@"\n')
    program.chmod(0o755)
    unit = tmp_path / "rankwatch.service"
    unit.write_text(UNIT.replace("/opt/rankwatch/bin/rankwatch", str(program)))
    return unit


def analyze(*words: str) -> subprocess.CompletedProcess[str]:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not here: apt-get install systemd")
    return subprocess.run(["systemd-analyze", *words], capture_output=True, text=True, check=False)


def test_the_unit_is_valid(unit: Path) -> None:
    done = analyze("verify", "--man=no", str(unit))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_unit_is_hardened(unit: Path) -> None:
    if int(analyze("--version").stdout.split()[1]) < 250:
        pytest.skip("systemd-analyze security --offline came with systemd 250")
    done = analyze("security", "--offline=true", "--no-pager", f"--threshold={EXPOSURE}", str(unit))
    assert done.returncode == 0, done.stdout


def test_the_unit_starts_a_collector_that_serves(unit: Path, tmp_path: Path) -> None:
    text = unit.read_text().replace("/var/lib/rankwatch", str(tmp_path)).replace(":27077", ":0")
    env = dict(line.split("=", 1) for line in re.findall(r"^Environment=(.*)", text, re.MULTILINE))
    (command,) = re.findall(r"^ExecStart=(.*)", text, re.MULTILINE)
    addresses = []
    for _ in range(2):
        with subprocess.Popen(shlex.split(command), env=environment() | env, stderr=subprocess.PIPE, text=True) as collector:
            assert collector.stderr is not None
            addresses += re.findall(r"collecting on (\S+);", collector.stderr.readline())
            collector.terminate()
        assert collector.returncode == 0
    assert len(addresses) == 2
    assert (tmp_path / "connection.json").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "runs").is_dir()
