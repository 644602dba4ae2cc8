"""What real processes are doing, as this one sees it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from collectors import until
from rankwatch.shared.system.waiting import doing, python_stack

has_calls = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "aarch64"), reason="calls of the system have other numbers"
)
needs_spy = pytest.mark.skipif(shutil.which("py-spy") is None, reason="needs py-spy: pip install py-spy")

READER = "import sys\ndef slow():\n    return open(sys.argv[1]).read()\nslow()"


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[tuple[int, str]]:
    """A process that waits for what comes out of a FIFO, and the FIFO."""
    fifo = tmp_path / "part-7"
    os.mkfifo(fifo)
    process = subprocess.Popen([sys.executable, "-c", READER, str(fifo)])
    end = os.open(fifo, os.O_WRONLY)  # returns once it is opened there
    yield process.pid, str(fifo)
    os.close(end)
    process.wait()


@has_calls
def test_a_process_that_reads_is_told_with_its_file(reader: tuple[int, str]) -> None:
    pid, fifo = reader
    until(lambda: f"reading {fifo}" in doing(pid))
    assert doing(pid).startswith("sleeps")


@needs_spy
def test_a_process_of_python_is_told_with_its_stack(reader: tuple[int, str]) -> None:
    until(lambda: "slow" in [frame.name for frame in python_stack(reader[0], 30.0)])


def test_a_process_that_has_ended_says_so() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    until(lambda: doing(ended.pid) == "has ended")
    ended.wait()
    assert doing(ended.pid) == "has ended"
    assert python_stack(ended.pid, 5.0) == []
