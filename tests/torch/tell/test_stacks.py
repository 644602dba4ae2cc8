"""Where the threads of a process are, as a rank says it of itself."""

from __future__ import annotations

import gc
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from collectors import PATIENCE, until
from jobs import environment
from rankwatch.measure import collectives
from rankwatch.shared.link import wire
from rankwatch.shared.printable import printable
from rankwatch.shared.types import messages
from rankwatch.tell import stacks
from rankwatch.tell.stacks import Inspector, inspect
from rankwatch.touch.whose_code import OURS


def test_the_file_of_the_wrappers_is_where_it_is_looked_for() -> None:
    assert collectives.__file__ == stacks._WRAPPERS


def wait_in_here(gate: threading.Event, is_there: threading.Event) -> None:
    is_there.set()
    gate.wait()


@contextmanager
def stuck(call: Callable[[threading.Event, threading.Event], object], name: str = "loader") -> Iterator[threading.Thread]:
    """A thread that hangs in ``call`` until this is left."""
    gate, is_there = threading.Event(), threading.Event()
    thread = threading.Thread(target=call, args=(gate, is_there), name=name, daemon=True)
    thread.start()
    is_there.wait()
    try:
        yield thread
    finally:
        gate.set()
        thread.join()


def made(source: str, file: str, name: str) -> Callable[..., None]:
    """A function of this source, as if it were in this file."""
    names: dict[str, Callable[..., None]] = {}
    exec(compile(source, file, "exec"), names)
    return names[name]


def answer_of(inspector: Inspector, number: int, woken: threading.Event) -> messages.Inspected:
    inspector.ask(number)
    assert woken.wait(30)
    woken.clear()
    answer = inspector.take()
    assert answer is not None
    return answer


def test_each_thread_is_told_with_its_frames_and_their_lines_the_main_thread_first() -> None:
    woken = threading.Event()
    with stuck(wait_in_here):
        answer = answer_of(Inspector(0, woken.set), 7, woken)
    assert answer.number == 7
    assert answer.lines[0] == "main thread"
    assert answer.waits.startswith("wait (threading.py:")
    assert "test_stacks.py:" in answer.waits
    assert " in answer_of: " in answer.waits
    at = answer.lines.index("thread loader")
    told = answer.lines[at : at + 6]
    assert any(line.strip().startswith("threading.py:") for line in told)
    assert any(line.endswith("in wait_in_here: gate.wait()") for line in told)
    assert not [line for line in answer.lines if "rankwatch-stacks" in line]
    assert wire.decode(wire.encode(answer)) == answer


def test_frames_of_rankwatch_are_told_only_where_they_wait() -> None:
    from rankwatch.tell.holds import hold

    def held(gate: threading.Event, is_there: threading.Event) -> None:
        with stacks_of_ours(lambda: wait_in_here(gate, is_there)):
            pass

    @contextmanager
    def stacks_of_ours(body: Callable[[], None]) -> Iterator[None]:
        with hold():
            body()
            yield

    with stuck(held):
        lines = inspect(1, 0, with_files=False).lines
    assert not [line for line in lines if "rankwatch/tell" in line]

    inner = made("def inner(gate, is_there):\n    is_there.set()\n    gate.wait()\n", OURS + "hook/x.py", "inner")
    with stuck(lambda gate, is_there: inner(gate, is_there)):
        lines = inspect(1, 0, with_files=False).lines
    assert [line for line in lines if line.endswith("hook/x.py:3 in inner")] == []  # threading waits, not we


def test_an_answer_is_bounded_and_printable() -> None:
    def deep(gate: threading.Event, is_there: threading.Event, depth: int = 400) -> None:
        if depth:
            deep(gate, is_there, depth - 1)
        else:
            wait_in_here(gate, is_there)

    source = "def f\N{LATIN SMALL LETTER A}(g, i):\n    i.set()\n    g.wait()\n"
    hostile = made(source, "/a\n\x1b[31mb" + "x" * 999, "fa")
    with stuck(deep), stuck(hostile, "bad\n\x1b[2J"):
        answer = inspect(1, 0, with_files=True)
    assert all(len(line) <= messages.MAX_STACK_LINE and line == printable(line) for line in answer.lines)
    assert [line for line in answer.lines if "outer frames" in line]

    with ExitStack() as gates:
        for number in range(60):
            gates.enter_context(stuck(wait_in_here, f"t{number}"))
        answer = inspect(1, 0, with_files=True)
    assert len(answer.lines) <= messages.MAX_STACK_LINES
    assert "and more threads" in answer.lines
    assert wire.decode(wire.encode(answer)) == answer


class Tensor:
    """Something that a training holds."""


def holding(found: list[weakref.ref[Tensor]], wait: Callable[..., None]) -> Callable[..., None]:
    """A training that holds a tensor while it waits."""

    def training(gate: threading.Event, is_there: threading.Event) -> None:
        tensor = Tensor()
        found.append(weakref.ref(tensor))
        wait(gate, is_there)

    return training


def _raised_in(code: str) -> BaseException:
    try:
        exec(compile(code, "/home/ann/train.py", "exec"), {"threading": threading, "messages": messages, "wire": wire})
    except BaseException as error:  # noqa: BLE001  any may end a rank
        return error
    raise AssertionError(code)


@pytest.mark.parametrize(
    ("code", "at"),
    [
        ("def load(row):\n  return row['x']\ndef step():\n  load({})\nstep()", ":2 in load"),
        ("import json\njson.loads('{')", ":2 in <module>"),  # within a library
        ("import torch\ntorch.ones(2) @ torch.ones(3)", ":2 in <module>"),
        ("try:\n  int('x')\nexcept ValueError as error:\n  raise RuntimeError('step') from error", ":4 in <module>"),
        ("\nwire.decode(b'')", ":2 in <module>"),
        ("compile('x = = 2', 'net.py', 'exec')", ""),
        ("raise KeyboardInterrupt", ""),
        ("raise SystemExit(3)", ""),
    ],
)
def test_the_users_line_of_an_exception(code: str, at: str) -> None:
    assert stacks.place_of(_raised_in(code)) == (f"/home/ann/train.py{at}" if at else "")


def test_no_object_of_the_training_lives_longer_for_it() -> None:
    found = list[weakref.ref[Tensor]]()
    gc.disable()
    try:
        with stuck(holding(found, wait_in_here)):
            inspect(1, 0, with_files=True)
        assert found[0]() is None
    finally:
        gc.enable()


def test_code_without_lines_is_told_all_the_same() -> None:
    """As torch.compile makes it."""

    def compiled(gate: threading.Event, is_there: threading.Event) -> None:
        wait_in_here(gate, is_there)

    compiled.__code__ = compiled.__code__.replace(co_linetable=b"")
    with stuck(compiled):
        lines = inspect(1, 0, with_files=True).lines
    assert [line for line in lines if " in compiled" in line]


def test_a_source_file_on_a_file_system_that_hangs_costs_only_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "PATIENCE", 0.05)
    path = tmp_path / "hangs.py"
    os.mkfifo(path)  # to open it waits for a writer
    os.utime(path, (0, 0))
    load = made("def load(gate, is_there):\n    is_there.set()\n    gate.wait()\n", str(path), "load")
    inspector, answers = Inspector(0, lambda: None), list[messages.Inspected]()

    def has_answered() -> bool:
        inspector.ask(3)
        answers.extend(filter(None, [inspector.take()]))
        return bool(answers)

    found = list[weakref.ref[Tensor]]()
    with stuck(holding(found, load)):
        until(has_answered)
        assert [line for line in answers[0].lines if line.endswith("hangs.py:3 in load")]
    assert found[0]() is None  # the training goes on, and the thread that looks still waits for the file
    assert os.open(path, os.O_WRONLY) > 0


@pytest.mark.parametrize(
    ("env", "told"),
    [
        ({}, []),
        ({"TORCH_FR_DUMP_TEMP_FILE": "FOLDER/fr_"}, []),
        (
            {"TORCH_FR_DUMP_TEMP_FILE": "FOLDER/fr_", "TORCH_FR_BUFFER_SIZE": "2000"},
            ["torch's flight recorder writes FOLDER/fr_3 when the collective times out"],
        ),
        (
            {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "FOLDER/written_", "TORCH_NCCL_TRACE_BUFFER_SIZE": "10"},
            ["torch's flight recorder has written FOLDER/written_3"],
        ),
        ({"TORCH_FR_DUMP_TEMP_FILE": "FOLDER/old_", "TORCH_FR_BUFFER_SIZE": "0"}, []),
    ],
)
def test_what_torch_can_show_is_pointed_at(
    env: dict[str, str], told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for names in stacks._TRACES:
        for name in names:
            monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value.replace("FOLDER", str(tmp_path)))
    (tmp_path / "written_3").touch()
    (tmp_path / "old_3").touch()
    os.utime(tmp_path / "old_3", (0, 0))
    lines = inspect(1, 3, with_files=True).lines
    assert [line for line in lines if line.startswith("torch's")] == [one.replace("FOLDER", str(tmp_path)) for one in told]


DEBUGGED = """
import os, torch.distributed.debug as debug
from rankwatch.tell.stacks import inspect
debug._WORKER_SERVER = debug._WorkerServer("::", 0)  # as start_debug_server does on each rank
print(debug._WORKER_SERVER.port, *inspect(1, 3, with_files=True).lines, sep="\\n", flush=True)
os._exit(0)  # to shut the server down takes long
"""


@pytest.mark.slow
def test_torchs_debug_server_is_pointed_at() -> None:
    pytest.importorskip("torch.distributed.debug", reason="this torch has no debug server")
    told = subprocess.run([sys.executable, "-c", DEBUGGED], env=environment(), capture_output=True, text=True, check=True)
    port, *lines = told.stdout.splitlines()
    assert lines[-1].startswith("torch's debug server of this rank: http://")
    assert lines[-1].endswith(f":{port}; rank 0 has the page of all ranks")


# --- a DataLoader ---------------------------------------------------------------------------------------------------------


LOADING = """
import os, sys, threading, time
import torch
from rankwatch.tell.stacks import inspect

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, row):
        if row:
            with open(sys.argv[1], "rb") as file:
                return len(file.read())
        return row

def train():
    for _ in torch.utils.data.DataLoader(Slow(), batch_size=1, num_workers=2):
        pass

def told():
    return inspect(1, 0, with_files=True).lines

thread = threading.Thread(target=train, name="training")
thread.start()
end = os.open(sys.argv[1], os.O_WRONLY)  # returns once the worker has opened it
while not any("comes next" in line and f"reading {sys.argv[1]}" in line for line in told()):
    time.sleep(0.01)
print(*told(), "without files", *inspect(1, 0, with_files=False).lines, sep="\\n")
os.close(end)
thread.join()
"""
"""The second row of the data comes out of a FIFO."""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="calls of the system have other numbers")
def test_a_wait_for_a_dataloader_names_its_workers_and_what_they_wait_for(tmp_path: Path) -> None:
    """In a process of its own: a fork from a thread may crash where other tests have started threads."""
    fifo = tmp_path / "part-7"
    os.mkfifo(fifo)
    command = [sys.executable, "-c", LOADING, str(fifo)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    with_files, _, without = done.stdout.partition("without files\n")
    first, second = (line for line in with_files.splitlines() if "DataLoader worker" in line)
    assert re.fullmatch(rf"  DataLoader worker 1 \(pid \d+\), whose batch comes next, sleeps.*, reading {fifo}", first)
    assert re.fullmatch(r"  DataLoader worker 0 \(pid \d+\) sleeps.*", second)
    if shutil.which("py-spy") is not None:
        assert "in Slow.__getitem__" in with_files
    assert "DataLoader worker" not in without
