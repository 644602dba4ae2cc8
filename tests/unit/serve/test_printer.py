"""The thread that writes to stdout and stderr, on a real pipe."""

from __future__ import annotations

import fcntl
import logging
import os
import sys
from collections.abc import Iterator
from typing import TextIO

import pytest

from rankwatch_monitor.serve import printer as printers
from rankwatch_monitor.serve.printer import Printer

PAGE = 4096


class Pipe:
    """A small pipe; a writer blocks until the test reads."""

    def __init__(self) -> None:
        self._read, write = os.pipe()
        fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, PAGE)
        self.writer: TextIO = os.fdopen(write, "w")

    def read(self, size: int) -> str:
        body = b""
        while len(body) < size:
            body += os.read(self._read, size - len(body))
        return body.decode()

    def close(self) -> None:
        os.close(self._read)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    pipe.close()


def test_texts_wait_for_a_reader_and_their_writers_do_not(pipe: Pipe) -> None:
    texts = [f"{number}".rjust(1000) for number in range(50)]
    with Printer() as printer:
        for text in texts:
            printer.print(pipe.writer, text)
        assert pipe.read(50_000) == "".join(texts)


def test_the_lines_of_the_log_are_written_too(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", pipe.writer)
    before = logging.getLogger().handlers
    with Printer() as printer:
        logging.getLogger("rankwatch_monitor").error("one")
        printer.print(pipe.writer, "two\n")
        assert pipe.read(8) == "one\ntwo\n"
    assert logging.getLogger().handlers == before


def test_texts_over_the_limit_are_dropped_and_counted(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(printers, "MAX_WAITING", 3)
    monkeypatch.setattr(sys, "stderr", pipe.writer)
    with Printer() as printer:
        printer.print(pipe.writer, "x" * (2 * PAGE))  # under way, or waits
        for _ in range(7):
            printer.print(pipe.writer, "y" * PAGE)
        assert pipe.read(2 * PAGE) == "x" * (2 * PAGE)
        assert set(pipe.read(2 * PAGE)) == {"y"}
        told = 0
        body = ""
        while "found no room here\n" not in body:
            printer.print(pipe.writer, "z")
            body += pipe.read(1)
            told += 1
    assert "texts found no room here\n" in body


def test_the_end_does_not_wait_long_for_a_reader(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(printers, "LAST_TEXTS", 0.01)
    with Printer() as printer:
        printer.print(pipe.writer, "x" * (2 * PAGE))
    assert pipe.read(PAGE) == "x" * PAGE


def test_a_reader_that_is_gone_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    pipe = Pipe()
    pipe.close()
    printers.write(pipe.writer, "report")
    assert "cannot print the report: Broken pipe" in caplog.text
    with pytest.raises(BrokenPipeError):
        pipe.writer.close()
