"""The line of ``rankwatch run``: its words, and how it is drawn on a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import queue
import struct
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest

import crowds
import standings
from rankwatch_monitor.decide.core.report import RankState
from rankwatch_monitor.decide.core.standing import RankStanding
from rankwatch_monitor.record.follow import Follower
from rankwatch_monitor.record.numbers.headroom import Headroom
from rankwatch_monitor.serve.printer import FREE, MAKE_ROOM, Printer
from rankwatch_monitor.serve.status import Status, describe
from standings import shown

WIDE = 200


def standing(rank: int, batch: int = 7, **changes: object) -> RankStanding:
    return standings.standing(rank, batch=batch, **changes)


@pytest.fixture(scope="module")
def nearest(tmp_path_factory: pytest.TempPathFactory) -> Headroom:
    return Follower(crowds.write(tmp_path_factory.mktemp("runs"), 2, 3)).look().headroom[0]


def test_the_words_of_the_line(nearest: Headroom) -> None:
    run = shown(standing(0), standing(1, 8))
    full = "rankwatch: train-0  2/2 ranks running  batch 8  8.2 batches/s"
    assert describe(run, 8.2, nearest, WIDE) == f"{full}  nearest to overflow decoder.layers.11.feed_forward output x248"
    assert describe(run, 8.2, None, WIDE) == full
    assert describe(run, None, None, WIDE) == "rankwatch: train-0  2/2 ranks running  batch 8"
    stuck = describe(shown(standing(0)._replace(still=42.0), standing(1)._replace(still=12.0)), 8.2, None, WIDE)
    assert stuck == "rankwatch: train-0  2/2 ranks running  batch 7  no progress for 12 s"
    stalled = describe(shown(standing(0), standing(1), stalled=1), 8.2, None, WIDE)
    assert stalled == "rankwatch: train-0  2/2 ranks running  1 stalled  batch 7"
    few = describe(run, 8.2, nearest, 80)
    assert few == "rankwatch: train-0  2/2 ranks  batch 8  8.2/s  headroom x248 ...d_forward output"
    assert len(few) <= 80
    assert describe(run, 8.2, nearest, 64).endswith("headroom x248 ")
    wide = nearest._replace(dtype="bfloat16", change=3.21)
    assert describe(run, 8.2, wide, WIDE) == f"{full}  changed most decoder.layers.11.feed_forward output +3.2"
    assert describe(run, 8.2, wide, 45) == "rankwatch: train-0  2/2 ranks  batch 8  8.2/s"
    assert describe(run, 8.2, wide, 80) == "rankwatch: train-0  2/2 ranks  batch 8  8.2/s  change +3.2 ...eed_forward output"
    assert describe(run, 8.2, wide._replace(change=None), WIDE).endswith(
        "changed most decoder.layers.11.feed_forward output"
    )
    lossy = shown(standing(0), standing(1, 8), loss=2.3123)
    assert describe(lossy, 8.2, wide, WIDE) == f"{full}  loss 2.31"
    module = "decoder.layers.11.feed_forward output"
    assert describe(lossy, 8.2, wide._replace(change=6.2), WIDE) == f"{full}  loss 2.31  changed most {module} +6.2"
    assert describe(lossy, 8.2, nearest, WIDE) == f"{full}  loss 2.31  nearest to overflow {module} x248"
    waiting = shown(standing(0), standing(1, 8), waiting="waiting for rank 1 to pass frame 7 of batch 8")
    assert "  waiting for rank 1 to pass frame 7 of batch 8  " in describe(waiting, None, None, WIDE)
    desynced = shown(standing(0), standing(1, 8), desynced=3)
    assert describe(desynced, None, None, WIDE) == "rankwatch: train-0  2/2 ranks running  3 parameters desynced  batch 8"
    skipped = shown(standing(0), standing(1, 8), skipped=1)
    assert describe(skipped, None, None, WIDE) == "rankwatch: train-0  2/2 ranks running  1 step left out  batch 8"
    ranks = (standing(0, -1), standing(1, -1, quiet="silent, but still connected"), standing(2, -1, state=RankState.LOST))
    assert describe(shown(*ranks), None, None, WIDE) == "rankwatch: train-0  2/3 ranks running  1 silent"


def test_the_newest_run_is_shown_and_its_record_is_read(tmp_path: Path) -> None:
    crowds.write(tmp_path, 2, 3)
    drawn: queue.SimpleQueue[str] = queue.SimpleQueue()
    status = Status(tmp_path, drawn.put)
    status.show(shown(standing(0), run="unknown-0"))
    status.show(shown(standing(0), standing(1), run="crowd-0"))
    status.show(shown(standing(0, 99), run="unknown-0"))  # this run began before the other
    with status:
        line = drawn.get()
    assert line.startswith("rankwatch: crowd-0  2/2 ranks")
    assert "  2/s  " in line
    assert "x248" in line


class Terminal:
    """A terminal of 40 columns, as stderr."""

    def __init__(self) -> None:
        self._read, write = pty.openpty()
        fcntl.ioctl(write, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
        self.stderr: TextIO = os.fdopen(write, "w")

    def read(self, end: str) -> str:
        body = ""
        while not body.endswith(end):
            body += os.read(self._read, 1).decode()
        return body

    def close(self) -> None:
        self.stderr.close()
        os.close(self._read)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    terminal = Terminal()
    yield terminal
    terminal.close()


def test_the_line_has_a_row_of_its_own_and_gives_it_back(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal.stderr)
    monkeypatch.setenv("TERM", "xterm")
    row = "\x1b7\x1b[1;23r\x1b[24H\x1b[0m\x1b[2K{}\x1b8"
    with Printer(is_shared=True) as printer:
        printer.show("one")
        assert terminal.read("\x1b8") == MAKE_ROOM + row.format("one")
        printer.show("two?[2J" + "x" * 80)
        assert terminal.read("\x1b8") == row.format("two?[2J" + "x" * 33)
        printer.print(sys.stderr, "a text\n")
        assert terminal.read("\n") == " " * 40 + "\ra text\r\n"
        fcntl.ioctl(terminal.stderr, termios.TIOCSWINSZ, struct.pack("HHHH", 10, 20, 0, 0))
        printer.show("three")
        assert terminal.read("\x1b8") == MAKE_ROOM + row.format("three").replace("23", "9").replace("24", "10")
        fcntl.ioctl(terminal.stderr, termios.TIOCSWINSZ, struct.pack("HHHH", 3, 20, 0, 0))
        printer.show("four")
        assert terminal.read(FREE) == f"\x1b7\x1b[3H\x1b[2K\x1b8{FREE}"  # no row to spare
    assert terminal.read("\r") == " " * 20 + "\r"


def test_on_a_terminal_of_our_own_a_text_is_all_that_is_written(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal.stderr)
    with Printer() as printer:
        printer.print(sys.stderr, "a text\n")
        assert terminal.read("\n") == "a text\r\n"
