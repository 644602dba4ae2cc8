"""How processes of this host end, of real ones."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Queue

import pytest

from jobs import environment
from rankwatch_monitor.decide.core.effects import FollowProcess
from rankwatch_monitor.decide.core.ledger import RankExited
from rankwatch_monitor.decide.ending.exit_text import describe_exit
from rankwatch_monitor.serve.processes.out_of_memory import find_killed
from rankwatch_monitor.serve.processes.process_ends import ExitWatch

SOON = 30
RANK = """
import sys
from rankwatch.shared.system.exit_queue import ExitQueue
queues = [ExitQueue(name) for name in sys.argv[1:]]
print(flush=True)
sys.exit(int(input()))
"""


@contextmanager
def rank(*names: str) -> Iterator[subprocess.Popen[str]]:
    """A process that is known by these names, as a rank is, of several models; it ends with the exit code that it reads."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", RANK, *names]
    with subprocess.Popen(command, env=environment(), stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


@pytest.fixture
def told() -> Queue[RankExited]:
    return Queue()


@pytest.fixture
def watch(told: Queue[RankExited]) -> Iterator[ExitWatch]:
    watch = ExitWatch(told.put)
    yield watch
    watch.close()


def until_followed(watch: ExitWatch, pid: int) -> None:
    pause = threading.Event()
    while not any(ranks[0].pid == pid for ranks, _ in list(watch._followed.values())):
        pause.wait(0.005)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
@pytest.mark.parametrize("is_waited_for", [True, False])
def test_a_signal_is_told(watch: ExitWatch, told: Queue[RankExited], number: int, is_waited_for: bool) -> None:
    with rank("a") as process:
        watch.follow(FollowProcess("train-0", 1, "", process.pid, "a"))
        until_followed(watch, process.pid)
        process.send_signal(number)
        if is_waited_for:
            watch.take_status(process.pid, process.wait())
        assert told.get(timeout=SOON) == RankExited("train-0", 1, "a", f"killed by {signal.Signals(number).name}")


def test_an_exit_code_is_told_and_none_of_a_good_end(watch: ExitWatch, told: Queue[RankExited]) -> None:
    for code in (0, 3):
        with rank("a") as process:
            watch.follow(FollowProcess("train-0", 1, "", process.pid, "a"))
            until_followed(watch, process.pid)
            process.communicate(str(code))
            watch.take_status(process.pid, process.returncode)
            watch.settle()
    assert told.get(timeout=SOON).how == "its process ended with exit code 3"
    assert told.empty()


def test_a_process_of_another_name_or_none_at_all_is_not_followed(watch: ExitWatch, told: Queue[RankExited]) -> None:
    with rank("a") as process, rank("b") as last:
        for pid, name in ((process.pid, "other"), (1 << 22, "a"), (process.pid, "a"), (last.pid, "b")):
            watch.follow(FollowProcess("train-0", 1, "", pid, name))
        until_followed(watch, last.pid)
        assert len(watch._followed) == 1
        process.kill()
        last.kill()
        assert told.get(timeout=SOON).incarnation == "b"


def test_a_process_that_is_a_rank_of_two_runs_is_told_of_to_both(watch: ExitWatch, told: Queue[RankExited]) -> None:
    with rank("a", "b") as process, rank("c") as last:
        for run, pid, name in (("gan-0", process.pid, "a"), ("gan.2-0", process.pid, "b"), ("other-0", process.pid, "x")):
            for _ in range(2):  # it connected again
                watch.follow(FollowProcess(run, 0, "", pid, name))
        watch.follow(FollowProcess("last-0", 0, "", last.pid, "c"))
        until_followed(watch, last.pid)
        process.kill()
        assert [told.get(timeout=SOON).run for _ in range(2)] == ["gan-0", "gan.2-0"]
        last.kill()
        assert told.get(timeout=SOON).run == "last-0"


def test_an_unknown_signal_has_its_number() -> None:
    assert describe_exit(-signal.SIGRTMIN - 1) == f"killed by signal {signal.SIGRTMIN + 1}"
    assert describe_exit(-9, "Out of memory") == "killed by SIGKILL; the kernel: Out of memory"


OUT, CGROUP = "Out of memory", "Memory cgroup out of memory"
DETAILS = "total-vm:9000kB, anon-rss:8000kB, file-rss:0kB, shmem-rss:0kB"


@pytest.mark.parametrize(
    ("log", "found"),
    [
        (f"<3>[  500.250000] {OUT}: Killed process 42 (python) {DETAILS}, UID:0 oom_score_adj:0", OUT),
        (f"[  500.250000] {CGROUP}: Killed process 42 (python) {DETAILS}, UID:0", CGROUP),
        (f"3,77,500250000,-;{CGROUP}: Killed process 42 (python) {DETAILS}, UID:0", CGROUP),
        (f"Out of memory: Killed process 42 (python) {DETAILS}", OUT),
        (f"[  500.250000] Out of memory: Killed process 421 (python) {DETAILS}", ""),
        (f"[  400.250000] Out of memory: Killed process 42 (python) {DETAILS}", ""),
        ("[  500.250000] Killed process accounting", ""),
        ("", ""),
    ],
)
def test_the_kernels_line(log: str, found: str) -> None:
    noise = "<6>[  501.000000] lo: link up\n"
    said = find_killed(f"{noise}{log}\n{noise}", 42, 510.0)
    assert said == (f"{found}: Killed process 42 (python) {DETAILS}" if found else "")
