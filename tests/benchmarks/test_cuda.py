"""The command for a machine with a GPU runs on any machine. Its figures are not checked."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import on_device
from jobs import ROOT, environment

WAYS = ("eager", "launches", "compiled", "reduced")
STEPS = ["tests", "doctor", "abort", *(f"steps, {way}" for way in WAYS), "kernel", "launch"]


def results(folder: Path, *options: str) -> list[dict[str, Any]]:
    command = ["bash", str(ROOT / "tests" / "cuda.sh"), *options, str(folder)]
    done = subprocess.run(command, env=environment(PYTHON=sys.executable), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: list[dict[str, Any]] = json.loads((folder / "results.json").read_text())["results"]
    assert sorted(result["step"] for result in found) == sorted(STEPS)
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device: run bash tests/cuda.sh itself")
def test_without_a_device_each_step_is_skipped_with_the_reason(tmp_path: Path) -> None:
    assert {(result["state"], *result["found"]) for result in results(tmp_path)} == {
        ("skipped", "there is no CUDA device here")
    }


@pytest.mark.slow
def test_what_is_missing_comes_from_the_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about = "rwprobe-1.0.dist-info"
    with zipfile.ZipFile(tmp_path / "rwprobe-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("rwprobe.py", "")
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: rwprobe\nVersion: 1.0\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "rwprobe.py,,\n")
    monkeypatch.setenv("WHEELS", str(tmp_path))
    machine = on_device.Machine(tmp_path / "results")
    monkeypatch.setattr(on_device, "NEEDED", {"rwprobe": "rwprobe"})
    assert machine.lack() == ""
    done = subprocess.run([sys.executable, "-c", "import rwprobe"], env=machine.environment, check=False)
    assert done.returncode == 0
    monkeypatch.setattr(on_device, "NEEDED", {"rwnone": "rwnone"})
    assert machine.lack().startswith(f"rwnone cannot be installed: put their wheels into {tmp_path}, or set WHEELS\n")


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device: run bash tests/cuda.sh itself")
def test_the_rehearsal_runs_all_steps(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the benchmark's models are those of transformers")
    for result in results(tmp_path, "--rehearse"):
        if result["found"] != ["triton is not installed"]:
            assert result["state"] == "ok", result
            assert result["step"] in ("tests", "abort") or result["figures"]
