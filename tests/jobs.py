"""Real torchrun jobs under a real collector, and their results."""

from __future__ import annotations

import atexit
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from collectors import PATIENCE

SCRIPTS = Path(__file__).parent / "e2e" / "scripts"
RANKWATCH = [sys.executable, "-m", "rankwatch_monitor"]
ROOT = Path(__file__).parent.parent
INTERPRETER = shlex.quote(sys.executable)
"""This interpreter, quoted for a shell: the path of the virtual environment may have spaces."""
COMES_BACK = "60"
"""The grace of an abort, in seconds, where all ranks come back by themselves: a busy machine may need more than the default."""


@dataclass(frozen=True)
class Job:
    """A job that has ended. ``run_dir``: the folder of its newest run. ``left_behind``: its processes that still run."""

    code: int
    stdout: str
    stderr: str
    run_dir: Path
    left_behind: list[str]

    @property
    def report(self) -> dict[str, Any]:
        text = (self.run_dir / "report.json").read_text()
        parsed: dict[str, Any] = json.loads(text, parse_constant=_no_such_literal)
        return parsed

    @property
    def verdict(self) -> dict[str, Any]:
        verdict: dict[str, Any] = self.report["verdict"]
        return verdict

    @property
    def root_cause(self) -> str:
        """The root cause in torchrun's summary."""
        return self.stderr.rpartition("Root Cause (first observed failure):")[2]

    def state(self, rank: int) -> str:
        state: str = self.report["ranks"][rank]["state"]
        return state


def torchrun(script: str, *arguments: str, ranks: int = 2) -> list[str]:
    """The command that starts one of the test's scripts on one node."""
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [sys.executable, *run, str(SCRIPTS / script), *arguments]


def forked(script: str, *arguments: str, ranks: int = 2) -> list[str]:
    """The same without torchrun, and from one process for all jobs: a job costs a second or two."""
    return _nursery().forked(script, *arguments, ranks=ranks)


def forked_apart(script: str, *arguments: str, ranks: int = 2) -> list[str]:
    """The same from a process of the job's own, which imports torch in the job's environment."""
    return [sys.executable, str(SCRIPTS / "forked.py"), str(ranks), str(SCRIPTS / script), *arguments]


class Nursery:
    """A process that has imported torch and the ``modules``, and forks the ranks of jobs; see ``scripts/nursery.py``."""

    def __init__(self, folder: Path, *modules: str) -> None:
        self._socket = folder / "nursery"
        self._script = [sys.executable, str(SCRIPTS / "nursery.py"), str(self._socket), *modules]

    def __enter__(self) -> Nursery:
        self._process = subprocess.Popen(self._script, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        assert self._process.stdout.readline(), "the nursery has failed"
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.communicate()

    def forked(self, script: str, *arguments: str, ranks: int = 2) -> list[str]:
        born = [sys.executable, "-S", "-E", str(SCRIPTS / "born.py"), str(self._socket)]
        return [*born, str(ranks), str(SCRIPTS / script), *arguments]


@cache
def _nursery() -> Nursery:
    """That of this process, which ends with it."""
    stack = ExitStack()
    atexit.register(stack.close)
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="nursery-"))
    return stack.enter_context(Nursery(Path(folder), "torch.distributed.fsdp", "torch.distributed.tensor.parallel"))


def run_job(
    tmp_path: Path,
    command: Sequence[str],
    *options: str,
    env: Mapping[str, str] | None = None,
    calls_differ: bool = False,
) -> Job:
    """Runs ``rankwatch run OPTIONS -- COMMAND`` to its end. An abort waits until its ranks come back, if no option says less.

    ``calls_differ``: whether the training is one whose ranks call different collectives. Of any other, none may be told.
    """
    runs = tmp_path / "runs"
    marker = uuid.uuid4().hex
    done = subprocess.run(
        [*RANKWATCH, "run", "--runs-dir", str(runs), "--abort-grace", COMES_BACK, *options, "--", *command],
        capture_output=True,
        text=True,
        env=environment(TEST_JOB_MARKER=marker, **(env or {})),
        check=False,
    )
    assert calls_differ or not (told := unequal_calls(runs)), told
    return Job(done.returncode, done.stdout, done.stderr, (runs / "latest").resolve(), left_behind(marker))


def unequal_calls(runs: Path) -> list[str]:
    """Of the runs in a folder, what is told of ranks that call different collectives."""
    reports = [json.loads(path.read_text()) for path in runs.glob("*/report.json")]
    return [one["text"] for report in reports for one in report["collectives"] if one["how"] != "awaited"]


class Training:
    """A job of two ranks that trains until ``overflow`` is called."""

    def __init__(self, folder: Path) -> None:
        self.runs = folder / "runs"
        self._file = folder / "overflow"
        self.env = environment(FAULT_FILE=str(self._file))
        self.command = [*RANKWATCH, "run", "--runs-dir", str(self.runs), "--job", "train", "--abort-grace", COMES_BACK]
        self.job = [*self.command, "--", *forked_apart("train.py", "overflow_when_told")]

    @contextmanager
    def begun(self) -> Iterator[subprocess.Popen[str]]:
        pipe = subprocess.PIPE
        with subprocess.Popen(self.job, env=self.env, stdout=pipe, stderr=pipe, text=True) as process:
            try:
                yield process
            finally:
                self.overflow()  # also after a failed test, so that no rank continues to train
                process.communicate()

    def overflow(self) -> None:
        self._file.touch()


def environment(**more: str) -> dict[str, str]:
    """This process's environment, without options of rankwatch, for small jobs from the sources.

    A close-up has as long as a busy machine may need for it. All batches are measured in full: how many are by default depends
    on how fast the machine is (``e2e/test_budget.py`` has jobs of the default).
    """
    path = os.pathsep.join([str(ROOT / "agent"), str(ROOT / "monitor"), os.environ.get("PYTHONPATH", "")])
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RANKWATCH_")}
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "RANKWATCH_CLOSEUP": "60", "RANKWATCH_BUDGET": "0", **more}


def finished(
    command: Sequence[str], cwd: Path | None = None, env: Mapping[str, str] | None = None, /, **more: str
) -> subprocess.CompletedProcess[str]:
    """A command that has ended, with its output. ``more``: of its environment, beside ``env`` or that for small jobs."""
    whole = {**(environment() if env is None else env), **more}
    return subprocess.run(command, env=whole, cwd=cwd, capture_output=True, text=True, check=False, timeout=PATIENCE)


def is_ours(source: str | os.PathLike[str]) -> bool:
    """Whether a source file belongs to the agent. The repository's folder may have any name."""
    return Path(source).resolve().is_relative_to((ROOT / "agent" / "rankwatch").resolve())


def left_behind(marker: str) -> list[str]:
    """The command lines of a job's processes that do not end. Some may be about to end when the job does."""
    deadline = time.monotonic() + PATIENCE / 4
    while (found := processes_of(marker)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def processes_of(marker: str) -> list[str]:
    """The command lines of the processes whose environment has the marker, or which a nursery forked with it."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            is_marked = f"TEST_JOB_MARKER={marker}".encode() in (entry / "environ").read_bytes()
            if is_marked or any(f"memfd:{marker}" in os.readlink(file) for file in (entry / "fd").iterdir()):
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:  # it has ended, or belongs to another user
            continue
    return found


def _no_such_literal(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
