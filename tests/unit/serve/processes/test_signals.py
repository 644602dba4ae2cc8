"""The table of signals, and who is sent one: the command, once, however it has come."""

from __future__ import annotations

import array
import fcntl
import os
import re
import select
import signal
import subprocess
import termios
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from collectors import until
from rankwatch_monitor.serve.processes.signals import Bystander, Part, heeded, part_of


def test_what_is_neither_an_end_nor_ours_is_passed_on() -> None:
    passed = [signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT, signal.SIGWINCH, signal.SIGCONT, signal.SIGXCPU, signal.SIGPWR]
    real_time = list(range(signal.SIGRTMIN, signal.SIGRTMAX + 1))
    assert {part_of(number) for number in [*passed, *real_time]} == {Part.PASSED_ON}
    assert {part_of(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)} == {Part.ENDS}
    assert {part_of(number) for number in (signal.SIGKILL, signal.SIGTSTP, signal.SIGCHLD, signal.SIGSEGV)} == {Part.OURS}


def test_what_is_ignored_stays_so_but_what_job_scripts_send() -> None:
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)}
    try:
        assert not {signal.SIGUSR1, signal.SIGHUP} & set(heeded())
        assert {signal.SIGINT, signal.SIGTERM, signal.SIGUSR2, signal.SIGRTMIN} <= set(heeded())
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.fixture
def bystander() -> Iterator[Bystander]:
    bystander = Bystander([signal.SIGUSR1, signal.SIGRTMIN])
    yield bystander
    bystander.close()


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGRTMIN])
def test_a_signal_that_came_to_all_is_known_also_before_the_bystander_is_ready(bystander: Bystander, number: int) -> None:
    assert bystander._process is not None
    bystander._process.send_signal(number)
    assert bystander.has_seen(number)


def test_two_that_came_at_once_are_both_known(bystander: Bystander, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second comes while the first is looked up, as a handler runs between any two lines: it reads what was said of both."""
    process = bystander._process
    assert process is not None
    known: list[bool] = []
    signal.signal(signal.SIGUSR1, lambda *_: known.append(bystander.has_seen(signal.SIGUSR1)))
    looks = select.select

    def look(*given: Any) -> Any:
        monkeypatch.setattr(select, "select", looks)
        found = looks(*given)
        process.send_signal(signal.SIGUSR1)
        until(partial(_holds, process.stdout, 2))
        os.kill(os.getpid(), signal.SIGUSR1)
        return found

    monkeypatch.setattr(select, "select", look)
    try:
        until(partial(_is_ready, process))
        process.send_signal(signal.SIGRTMIN)
        assert bystander.has_seen(signal.SIGRTMIN)
        assert known == [True]
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def _holds(pipe: Any, number: int) -> bool:
    held = array.array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, held)
    return held[0] >= number


def _is_ready(process: subprocess.Popen[bytes]) -> bool:
    """It ignores SIGINT last of all that it does before it waits."""
    ignored = re.findall(r"SigIgn:\s+(\w+)", Path(f"/proc/{process.pid}/status").read_text())[0]
    return bool(int(ignored, 16) >> (signal.SIGINT - 1) & 1)


def test_a_bystander_that_was_held_up_is_heard_before_it_is_decided(
    bystander: Bystander, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, ask = bystander._process, bystander._ask
    assert process is not None
    until(partial(_is_ready, process))
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    process.send_signal(signal.SIGUSR1)

    def go_on(asked: subprocess.Popen[bytes]) -> int:
        number = ask(asked)
        asked.send_signal(signal.SIGCONT)
        return number

    monkeypatch.setattr(bystander, "_ask", go_on)
    assert bystander.has_seen(signal.SIGUSR1)
    assert not bystander.has_seen(signal.SIGUSR1)


def test_one_that_came_to_us_alone_is_not_seen(bystander: Bystander) -> None:
    assert not bystander.has_seen(signal.SIGUSR1)
    assert bystander._process is not None
    assert not bystander.has_seen(signal.SIGRTMIN)


def test_without_a_bystander_all_signals_are_passed_on(bystander: Bystander) -> None:
    bystander.close()
    assert not bystander.has_seen(signal.SIGUSR1)


def test_a_bystander_ends_with_its_process() -> None:
    bystander = Bystander([signal.SIGUSR1])
    process = bystander._process
    assert process is not None
    assert process.stdin is not None
    process.stdin.close()  # as the kernel does when its owner is killed
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    bystander.close()
