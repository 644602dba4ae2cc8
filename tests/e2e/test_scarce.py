"""A training starts, with a warning, where descriptors, memory or a place to write are missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from collectors import PATIENCE, Running
from jobs import RANKWATCH, environment, finished

pytestmark = pytest.mark.e2e

LIMIT = "import os, resource, sys; resource.setrlimit({what}, ({least}, {least})); os.execv(sys.argv[1], sys.argv[1:])"


def run(*prefix: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = [*prefix, *RANKWATCH, "run", "--", "sh", "-c", "echo trained; exit 3"]
    return finished(command, cwd, **env)


@pytest.mark.slow
def test_a_command_runs_unwatched_without_descriptors(tmp_path: Path) -> None:
    done = run(sys.executable, "-c", LIMIT.format(what="resource.RLIMIT_NOFILE", least=8), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (3, "trained\n"), done.stderr
    assert "no collector can start: fewer than 24 file descriptors are left" in done.stderr


@pytest.mark.slow
def test_a_command_runs_unwatched_without_threads(tmp_path: Path) -> None:
    privileges = ("--inh-caps", "+dac_override", "--ambient-caps", "+dac_override")
    as_user = ["setpriv", "--reuid", "65534", "--clear-groups", *privileges]
    limited = [sys.executable, "-c", LIMIT.format(what="resource.RLIMIT_NPROC", least=4)]
    done = run(*(as_user if os.geteuid() == 0 else []), *limited, cwd=tmp_path, OPENBLAS_NUM_THREADS="1")
    assert (done.returncode, done.stdout) == (3, "trained\n"), done.stderr
    assert "no collector can start: fewer than 16 threads can be started" in done.stderr


ALL = "<&- >&- 2>&-"


@pytest.mark.parametrize("closed", [*(pytest.param(one, marks=pytest.mark.slow) for one in ALL.split()), ALL])
def test_a_command_is_watched_where_streams_are_closed(tmp_path: Path, closed: str) -> None:
    done = run("sh", "-c", f'exec "$@" {closed}', "sh", cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    assert (done.stdout == "trained\n") == (" >&-" not in f" {closed}")
    assert ("before any rank connected" in done.stderr) == ("2>&-" not in closed)


def test_a_command_is_watched_from_a_folder_that_takes_no_file() -> None:
    done = run(cwd=Path("/proc"))
    assert (done.returncode, done.stdout) == (3, "trained\n"), done.stderr
    assert "cannot write to the runs folder rankwatch-runs" in done.stderr
    assert "the run is recorded in " in done.stderr


RANK = """
import os, resource, sys, torch, rankwatch
what, left = sys.argv[1], int(sys.argv[2])
if what == "descriptors":
    least = len(os.listdir("/proc/self/fd")) - 1 + left
    resource.setrlimit(resource.RLIMIT_NOFILE, (least, least))
else:
    least = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE") + (left << 20)
    resource.setrlimit(resource.RLIMIT_AS, (least, least))
model = torch.nn.Linear(2, 2)
with rankwatch.watch(model):
    model(torch.ones(1, 2)).sum().backward()
print("trained")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("what", "left"), [("descriptors", 2), ("descriptors", 4), ("memory", 100)])
def test_a_rank_trains_without_a_connection(tmp_path: Path, what: str, left: int) -> None:
    running = Running(tmp_path)
    command = [sys.executable, "-c", f"import rankwatch.api.watch_object{RANK}", what, str(left)]
    done = finished(command, RANKWATCH_CONNECTION=str(tmp_path / "connection.json"))
    running.stop()
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    assert "training goes on without it" in done.stderr


ALONE = """
import torch, rankwatch
model = torch.nn.Linear(2, 2)
with rankwatch.watch(model, capsule="off"):
    model(torch.full((1, 2), float("inf"))).sum().backward()
"""


@pytest.mark.slow
def test_a_rank_without_a_collector_trips_where_streams_are_closed() -> None:
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", sys.executable, "-c", ALONE],
        env=environment(),
        check=False,
        timeout=PATIENCE,
    )
    assert done.returncode == 77
