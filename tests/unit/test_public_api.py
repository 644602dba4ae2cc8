"""The public names: they are typed as the reference says, have a docstring, and stand in the reference.

``mypy --strict`` runs over this file: a type that changes fails there, whatever the tests below do.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn
from typing_extensions import assert_type

import rankwatch
from jobs import ROOT, environment
from rankwatch import (
    BatchLimitReached,
    ConnectionFileError,
    DebugUnderflowOverflow,
    OverflowDetected,
    ProtocolError,
    RankwatchError,
    TrainingAborted,
    UsageError,
    Watch,
    detect_overflow,
    watch,
)

REFERENCE = "".join(path.read_text() for path in (ROOT / "docs" / "pages" / "reference").glob("*.md"))

CODES: dict[type[RankwatchError], int] = {
    RankwatchError: 1,
    UsageError: 2,
    ConnectionFileError: 2,
    ProtocolError: 1,
    TrainingAborted: 77,
    OverflowDetected: 77,
    BatchLimitReached: 1,
}


@pytest.mark.parametrize("name", rankwatch.__all__)
def test_a_public_name_is_documented(name: str) -> None:
    found = getattr(rankwatch, name)
    assert found.__doc__
    assert found.__module__.startswith("rankwatch.")
    assert f"\n::: rankwatch.{name}\n" in REFERENCE


def test_nothing_else_is_in_the_reference() -> None:
    shown = {line.removeprefix("::: rankwatch.") for line in REFERENCE.splitlines() if line.startswith("::: rankwatch.")}
    assert shown == {
        *rankwatch.__all__,
        *(f"integrations.{name}.RankwatchCallback" for name in ("transformers", "lightning")),
    }


def test_a_watch() -> None:
    model = nn.Linear(2, 1)
    stopped: list[TrainingAborted] = []
    with watch(model, trace_batch_nums=[7], policy="first", every=1, loss_scale=lambda: 1.0, stop=stopped.append) as found:
        assert_type(found, Watch)
        model(torch.ones(1, 2))
        assert_type(found.is_connected, bool)
        assert not found.is_connected
        assert_type(found.summaries(), dict[str, float])
        found.optimizer_step = assert_type(found.optimizer_step, int) + 1
    assert assert_type(found.root, nn.Module) is model
    found.close()


def test_the_drop_in() -> None:
    batches: Sequence[int] = (1, 3)
    debug = DebugUnderflowOverflow(nn.Linear(1, 1), 100, batches, abort_after_batch_num=3)
    watched: Watch = debug
    assert_type(debug.is_connected, bool)
    watched.close()


def test_a_tensor_that_is_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    assert assert_type(detect_overflow(torch.ones(1), "label"), bool) is False
    assert detect_overflow(torch.full((1,), float("nan")), "label") is True
    assert capsys.readouterr().out == "label has nans\n"


def test_the_exceptions() -> None:
    assert set(CODES) == {found for name in rankwatch.__all__ if issubclass_of_ours(found := getattr(rankwatch, name))}
    for kind, code in CODES.items():
        assert assert_type(kind("text").exit_code, int) == code
    # What a script that catches ValueError, as of Hugging Face's detector, expects.
    assert {kind for kind in CODES if issubclass(kind, ValueError)} == {
        UsageError, ConnectionFileError, OverflowDetected, BatchLimitReached,
    }  # fmt: skip
    assert {kind for kind in CODES if issubclass(kind, TrainingAborted)} == {
        TrainingAborted, OverflowDetected, BatchLimitReached,
    }  # fmt: skip


def issubclass_of_ours(found: object) -> bool:
    return isinstance(found, type) and issubclass(found, RankwatchError)


def test_the_wheel_says_that_it_is_typed(tmp_path: Path) -> None:
    build = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)], cwd=ROOT, env=environment(), capture_output=True, text=True, check=True
    )
    with zipfile.ZipFile(tmp_path / done.stdout.split()[-1]) as wheel:
        names = set(wheel.namelist())
        metadata = wheel.read("rankwatch-0.1.0.dist-info/METADATA").decode()
    assert {"rankwatch/py.typed", "rankwatch_monitor/py.typed", "rankwatch/zero_code/startup/sitecustomize.py"} <= names
    assert not {name.partition("/")[0] for name in names} - {
        "rankwatch",
        "rankwatch_monitor",
        "rankwatch_fleet",
        "rankwatch-0.1.0.dist-info",
    }
    assert "\nLicense-Expression: Apache-2.0\n" in metadata
    assert "\nProject-URL: Changelog, https://" in metadata
