"""The end of a process by its deadline, which needs no interpreter; and that of the command of ``rankwatch run``."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from collectors import PATIENCE, Running, until
from jobs import INTERPRETER, RANKWATCH, SCRIPTS, Training, environment, finished
from ports import free_port

pytestmark = pytest.mark.e2e

ABORTED = 77

IN_C = "ctypes.PyDLL(None).sleep(59)"
"""Keeps the GIL, as a C extension may that never lets go of it."""


def ended(then: str, start: str = "deadline = Deadline('rank 1 overflowed', 0.2, 60); deadline.start()") -> tuple[int, str]:
    """The exit code and the output of a process that has a deadline."""
    code = f"""
import ctypes, faulthandler, os, signal, threading, time
import rankwatch
from rankwatch.tell.deadline import Deadline
{start}
{then}
"""
    done = finished([sys.executable, "-c", code])
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("then", [IN_C, "time.sleep(59)"], ids=["in C", "in Python"])
def test_a_process_that_does_not_come_back_ends_with_77(then: str) -> None:
    code, output = ended(then)
    assert code == ABORTED
    assert ("did not come back within 0.2 s" in output) == (then != IN_C)


@pytest.mark.slow
def test_one_that_came_back_lives_on_with_the_timer_of_its_own() -> None:
    start = "deadline = Deadline('rank 1 overflowed', 5, 60); deadline.start()"  # a busy machine may pause it
    own = "faulthandler.dump_traceback_later(7, exit=True)"
    code, output = ended(f"{own}; deadline.cancel(); print('came back', flush=True); {IN_C}", start)
    assert (code, "came back" in output, "Timeout" in output) == (1, True, True)


@pytest.mark.slow
@pytest.mark.parametrize("hold", ["with rankwatch.hold():", "with rankwatch.hold(), rankwatch.hold():"])
def test_a_hold_puts_the_end_off(hold: str) -> None:
    """In C, so that no thread of ours could do it."""
    code, output = ended(f"{hold}\n    ctypes.PyDLL(None).sleep(3); print('saved', flush=True)\n{IN_C}")
    assert (code, "saved" in output) == (ABORTED, True)


@pytest.mark.slow
def test_a_hold_of_another_rank_puts_the_end_off_up_to_the_limit() -> None:
    start = "deadline = Deadline('rank 1 overflowed', 0.2, 4); deadline.start(); deadline.wait_for_others(60)"
    code, output = ended(f"ctypes.PyDLL(None).sleep(3); print('saved', flush=True)\n{IN_C}", start)
    assert (code, "saved" in output) == (ABORTED, True)


@pytest.mark.slow
def test_a_hold_is_bounded() -> None:
    start = "deadline = Deadline('rank 1 overflowed', 0.1, 0.5); deadline.start()"
    assert ended(f"with rankwatch.hold():\n    {IN_C}", start)[0] == ABORTED


@contextmanager
def running(folder: Path, *command: str, prefix: tuple[str, ...] = (), size: int = -1) -> Iterator[subprocess.Popen[str]]:
    """``rankwatch run`` around a command that prints a line when it has begun. ``size``: of the pipe that is its stdout."""
    run = [*prefix, *RANKWATCH, "run", "--runs-dir", str(folder / "runs"), "--", *command]
    with subprocess.Popen(
        run,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        pipesize=size,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_command_under_nohup_survives_a_hang_up(tmp_path: Path) -> None:
    command = ["sh", "-c", "echo begun; until [ -e go ]; do sleep 0.1; done; echo done"]
    with running(tmp_path, *command, prefix=("env", "-C", str(tmp_path), "nohup")) as process:
        os.killpg(process.pid, signal.SIGHUP)
        (tmp_path / "go").touch()
        output, _ = process.communicate(timeout=PATIENCE)
        assert (process.returncode, output) == (0, "done\n")


def test_a_second_interrupt_ends_a_command_that_ignores_them(tmp_path: Path) -> None:
    with running(tmp_path, sys.executable, "-S", "-c", STUBBORN) as process:
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            until(lambda: process.poll() is not None or not _pending(process.pid))
        assert process.wait(PATIENCE) == 128 + signal.SIGKILL


STUBBORN = """
import signal, time
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
print("begun", flush=True)
time.sleep(59)
"""


@pytest.mark.parametrize(
    "numbers",
    [
        [signal.SIGUSR1],
        [signal.SIGUSR2],
        [signal.SIGQUIT, signal.SIGWINCH, signal.SIGCONT],
        [signal.SIGRTMIN, signal.SIGRTMIN + 7, signal.SIGUSR1, signal.SIGUSR1],
    ],
    ids=["usr1", "usr2", "of a terminal", "of real time"],
)
def test_a_signal_that_is_not_ours_goes_to_the_command(tmp_path: Path, numbers: list[int]) -> None:
    got = tmp_path / "signals-0"
    command = [sys.executable, "-S", str(SCRIPTS / "signalled.py"), str(tmp_path), "begun"]
    with running(tmp_path, *command) as process:
        for count, number in enumerate([*numbers, signal.SIGTERM], 1):
            process.send_signal(number)
            until(partial(_has_lines, got, count))
        assert process.wait(PATIENCE) == 0
    assert [int(word) for word in got.read_text().split()] == [*numbers, signal.SIGTERM]


def test_a_signal_to_all_processes_of_the_job_comes_once(tmp_path: Path) -> None:
    """As SLURM's ``--signal`` does."""
    got = tmp_path / "signals-0"
    command = [sys.executable, "-S", str(SCRIPTS / "signalled.py"), str(tmp_path), "begun"]
    with running(tmp_path, *command) as process:
        os.killpg(process.pid, signal.SIGUSR1)
        until(got.exists)
        until(lambda: not _pending(process.pid))
        process.terminate()
        assert process.wait(PATIENCE) == 0
    assert [int(word) for word in got.read_text().split()] == [signal.SIGUSR1, signal.SIGTERM]


def test_a_signal_after_the_one_that_ends_the_command_is_passed_on_and_kills_nothing(tmp_path: Path) -> None:
    code = """
import signal, sys, time
came = []
for number in signal.SIGUSR1, signal.SIGTERM:
    signal.signal(number, lambda number, frame: came.append(number))
print("begun", flush=True)
while signal.SIGUSR1 not in came[came.index(signal.SIGTERM):] if signal.SIGTERM in came else True:
    time.sleep(0.01)
sys.exit(3)
"""
    with running(tmp_path, sys.executable, "-S", "-c", code) as process:
        process.terminate()
        until(lambda: not _pending(process.pid))
        process.send_signal(signal.SIGUSR1)
        assert process.wait(PATIENCE) == 3


def _has_lines(file: Path, count: int) -> bool:
    return file.exists() and len(file.read_text().split()) == count


def _pending(pid: int) -> bool:
    """Whether a signal has yet to be delivered."""
    fields = dict(line.split(":\t") for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line)
    return bool(int(fields["ShdPnd"], 16))


@pytest.mark.slow
def test_a_signal_while_the_report_is_written_costs_nothing(tmp_path: Path) -> None:
    """Nobody reads stdout, which the command has filled: the report waits there."""
    (tmp_path / "rank.py").write_text(BAD)
    last = 'code=$?; head -c 4095 /dev/zero; echo; echo "$RANKWATCH_CONNECTION" >file; exit $code'
    filled = f"echo begun; {INTERPRETER} rank.py; {last}"
    with running(tmp_path, "sh", "-c", filled, prefix=("env", "-C", str(tmp_path)), size=4096) as process:
        until((tmp_path / "file").exists)
        until(lambda: not os.path.exists((tmp_path / "file").read_text().strip() or "/"))  # the collector has closed
        process.terminate()
        until(lambda: process.poll() is not None or not _pending(process.pid))
        output, _ = process.communicate(timeout=PATIENCE)
        assert "rankwatch: first nan in run rank-0" in output
        assert process.returncode == ABORTED


@pytest.mark.slow
def test_a_full_disk_leaves_a_run_its_exit_code(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(BAD)
    command = [*RANKWATCH, "run", "--runs-dir", str(tmp_path / "runs"), "--", sys.executable, str(tmp_path / "rank.py")]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, env=environment(), stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == ABORTED
    assert done.stderr.splitlines()[-1].endswith("ERROR rankwatch: cannot print the report: No space left on device")


@pytest.mark.slow
def test_an_interrupt_ends_the_command_of_on_verdict_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(BAD)
    trained = f"echo begun; exec {INTERPRETER} {tmp_path}/rank.py"
    hook = f"RANKWATCH_ON_VERDICT=touch {tmp_path}/called; sleep 300"
    with running(tmp_path, "sh", "-c", trained, prefix=("env", hook)) as process:
        assert process.stdout is not None
        assert any(line.startswith("rankwatch: first nan in run rank-0: ") for line in process.stdout)
        assert any(line.startswith("  record ") for line in process.stdout)  # the report's last line
        until((tmp_path / "called").exists)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == ABORTED


BAD = """
import torch, rankwatch
model = torch.nn.Linear(2, 2)
with rankwatch.watch(model, capsule="off", closeup=0):
    model(torch.full((1, 2), float("nan"))).sum().backward()
"""


ORPHAN = """
import os, time, torch, rankwatch
model = torch.nn.Linear(2, 2)
watch = rankwatch.watch(model)
print(os.getpid(), watch.is_connected, flush=True)
while True:
    model(torch.ones(1, 2)).sum().backward()
    time.sleep(0.01)
"""


@pytest.mark.slow
def test_a_rank_whose_torchrun_and_collector_are_killed_ends_by_itself(tmp_path: Path) -> None:
    collector = Running(tmp_path)
    env = environment(RANKWATCH_CONNECTION=str(tmp_path / "connection.json"), TORCHELASTIC_RUN_ID="none")
    command = ["sh", "-c", '"$@" & wait', "torchrun", sys.executable, "-c", ORPHAN]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as torchrun:
        assert torchrun.stdout is not None
        rank, is_connected = torchrun.stdout.readline().split()
        collector.stop()
        torchrun.kill()
        try:
            _, errors = torchrun.communicate(timeout=PATIENCE)  # the rank has them open until it ends
        except subprocess.TimeoutExpired:
            os.kill(int(rank), signal.SIGKILL)
            raise
    assert is_connected == "True"
    assert "TrainingAborted: the torchrun that started rank 0 has ended, no collector answers" in errors


@pytest.mark.slow
def test_ranks_whose_launcher_is_killed_are_aborted(tmp_path: Path) -> None:
    training = Training(tmp_path)
    with training.begun() as process:
        until(lambda: any(training.runs.glob("train-0/run.db")))
        *_, launcher = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()  # the bystander is first
        os.kill(int(launcher), signal.SIGKILL)
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + signal.SIGKILL
    report = (training.runs / "latest" / "report.txt").read_text()
    assert re.search(r"the command has ended, and ranks? [01](-1)? of 2", report), errors  # those whose beats came by then
    assert "lost" in report


OWNED = """
import os, signal, sys, time
import torch, torch.multiprocessing as mp

def work(rank, done, port):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.distributed.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.ones(4, 8)).square().mean().backward()
        optimizer.step()
    torch.distributed.destroy_process_group()
    done.put(rank)
    time.sleep(600)

if __name__ == "__main__":
    context = mp.get_context("spawn")
    done, workers = context.Queue(), []
    for rank in range(2):
        workers.append(context.Process(target=work, args=(rank, done, sys.argv[1]), daemon=True))
        workers[-1].start()
    for _ in workers:
        done.get(timeout=120)
    for worker in workers:
        os.kill(worker.pid, signal.SIGKILL)
"""


@pytest.mark.slow
def test_workers_that_their_owner_kills_after_their_work_have_finished(tmp_path: Path) -> None:
    (tmp_path / "owner.py").write_text(OWNED)
    command = [sys.executable, str(tmp_path / "owner.py"), str(free_port())]
    done = finished([*RANKWATCH, "run", "--runs-dir", str(tmp_path / "runs"), "--", *command])
    assert done.returncode == 0
    assert re.search(r"run owner-0 finished: 2 ranks, 5 batches", done.stdout + done.stderr)
