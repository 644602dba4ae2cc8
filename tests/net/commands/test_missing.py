"""A module that cannot be imported here, such as ``resource`` on Windows, fails only the commands that need it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import records
from jobs import environment
from rankwatch.shared.system.installed import to_add

UNIX = "resource fcntl termios tty pwd"
"""Modules of Python that Windows does not have."""


def without(modules: str, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Runs ``python -m COMMAND`` in the folder ``runs``, where the modules cannot be imported."""
    (site := folder / "site").mkdir()
    (runs := folder / "runs").mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(f"import sys; sys.modules.update(dict.fromkeys({modules.split()}))\n")
    env = environment(PYTHONPATH=os.pathsep.join([str(site), environment()["PYTHONPATH"]]))
    return subprocess.run([sys.executable, "-m", *command], cwd=runs, env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("missing", "command"),
    [
        (f"{UNIX} sqlite3 zmq msgpack numpy", "--version"),
        (f"{UNIX} sqlite3 zmq msgpack numpy", "--help"),
        (f"{UNIX} zmq", "list ."),
        (f"{UNIX} zmq", "report --help"),
        (f"{UNIX} zmq sqlite3 numpy", "doctor --help"),
        (UNIX, "invite --help"),
        (UNIX, "top --help"),
    ],
)
def test_other_commands_work(missing: str, command: str, tmp_path: Path) -> None:
    done = without(missing, tmp_path, "rankwatch", *command.split())
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("missing", "command", "remedy"),
    [
        ("resource", "collector", "run it on Linux, with a Python that has it"),
        ("fcntl", "run -- true", "run it on Linux, with a Python that has it"),
        ("sqlite3", "list .", "run it on Linux, with a Python that has it"),
        ("zmq", "tune train --every 2", f"install rankwatch again: {to_add('')}"),
    ],
)
def test_a_command_names_the_module_that_it_needs(missing: str, command: str, remedy: str, tmp_path: Path) -> None:
    done = without(missing, tmp_path, "rankwatch", *command.split())
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"rankwatch: error: this command needs {missing}, which cannot be imported here (")
    assert line.endswith(remedy)


@pytest.mark.parametrize(
    ("missing", "command", "said"),
    [
        ("duckdb", "fleet archive", "this needs duckdb: " + to_add("fleet")),
        ("fsspec", "fleet archive", "this needs fsspec: " + to_add("fleet")),
        ("pyarrow", "archive train-0 archive", "an archive needs pyarrow: " + to_add("export")),
        ("fsspec", "collector --archive archive", "an archive needs fsspec: " + to_add("export")),
        ("pyarrow", "export train-0 --parquet out", "this needs pyarrow: " + to_add("export")),
        ("fsspec", "export train-0 --parquet out", "this needs fsspec: " + to_add("export")),
        ("tensorboardX", "export train-0 --tensorboard out", "this needs tensorboardX: " + to_add("export")),
        ("shtab", "completion bash", "completion scripts are made with shtab: " + to_add("completion")),
        ("prometheus_client", "collector --metrics :0", "--metrics needs prometheus_client: " + to_add("metrics")),
        ("uvicorn", "ui .", "the page needs uvicorn: " + to_add("ui")),
    ],
)
def test_a_command_names_the_extra_that_it_needs(missing: str, command: str, said: str, tmp_path: Path) -> None:
    records.write(tmp_path / "runs" / "train-0", records.part(0, *records.frames(0)))
    done = without(missing, tmp_path, "rankwatch", *command.split())
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"rankwatch: error: {said}\n")
    assert not (tmp_path / "runs" / "out").exists()


def test_a_job_without_metrics_needs_no_extra_for_them(tmp_path: Path) -> None:
    assert without("prometheus_client", tmp_path, "rankwatch", "run", "--", "true").returncode == 0


def test_the_doctor_names_the_module_that_it_needs(tmp_path: Path) -> None:
    done = without("torch zmq", tmp_path, "rankwatch.doctor")
    assert done.returncode == 1
    assert done.stderr.startswith("rankwatch: error: the doctor needs zmq, which cannot be imported here (")
    assert len(done.stderr.splitlines()) == 1


def test_the_doctor_checks_what_it_can(tmp_path: Path) -> None:
    done = without(f"torch {UNIX}", tmp_path, "rankwatch.doctor")
    assert "open files     skip" in done.stdout
    assert "shared memory  ok" in done.stdout or "shared memory  warn" in done.stdout
    assert done.stderr == ""
