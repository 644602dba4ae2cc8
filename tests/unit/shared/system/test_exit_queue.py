"""A process is ended by its queue while C keeps the GIL, and by nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from files import no_file_stays_open
from rankwatch.errors import EXIT_ABORTED
from rankwatch.shared.system.exit_queue import ExitQueue, end_process

STUCK = """
import ctypes, sys
from rankwatch.shared.system.exit_queue import ExitQueue
queue = ExitQueue("b1")
if "closed" in sys.argv:
    queue.close()
print("kept", flush=True)
ctypes.PyDLL(None).sleep(59 if "closed" not in sys.argv else 1)
"""


@contextmanager
def stuck(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", STUCK, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "kept\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_process_that_keeps_the_gil_is_ended() -> None:
    with stuck() as process:
        assert not end_process(process.pid, "another")
        assert end_process(process.pid, "b1")
        assert process.wait() == EXIT_ABORTED


def test_a_queue_that_was_closed_ends_nothing() -> None:
    with stuck("closed") as process:
        assert not end_process(process.pid, "b1")
        assert process.wait() == 0


def test_a_process_without_a_queue_is_left_alone() -> None:
    assert not end_process(os.getpid(), "b1")
    assert not end_process(2**22 + 1, "b1")


def test_a_queue_leaves_nothing_behind() -> None:
    ExitQueue("first").close()  # the C library opens a socket of its own, once
    with no_file_stays_open():
        for number in range(300):  # the system has 256 names at a time
            queue = ExitQueue(f"q{number}")
            assert queue._c is not None
            queue.close()
            queue.close()


def test_where_there_are_no_queues_nothing_else_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankwatch.shared.system.exit_queue._library", lambda: None)
    ExitQueue("none").close()
    assert not end_process(os.getpid(), "none")
