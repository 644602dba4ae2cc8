"""Real jobs that have ended, shared by many tests."""

from __future__ import annotations

import fcntl
import pickle
from collections.abc import Callable
from pathlib import Path

from jobs import Job, run_job


class Ended:
    """Jobs of four ranks that have ended, with their runs in one folder. A test that changes a run copies it first.

    A job costs ten CPU seconds, so each runs once for all workers of pytest.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.runs = folder / "runs"

    def job(self, name: str, start: Callable[..., list[str]], scenario: str) -> Job:
        """The first worker that asks for a job runs it; the others wait for it."""
        told = self._folder / f"{name}.pickle"
        with open(self._folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not told.exists():
                job = run_job(self._folder, start("train.py", scenario, ranks=4), "--job", name)
                told.write_bytes(pickle.dumps(job))
        found: Job = pickle.loads(told.read_bytes())
        return found
