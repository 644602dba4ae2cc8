"""Standard output that cannot be written is told from other files, and ends nothing but the block that writes to it."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from contextlib import redirect_stdout, suppress

import pytest

from rankwatch.shared.system.standard_output import OutputError, checked_output


def write_little() -> None:
    sys.stdout.write("a")


def write_much() -> None:
    sys.stdout.write("a" * 1_000_000)


def write_as_argparse_does() -> None:
    with suppress(OSError):
        write_much()


def exit_after_writing() -> None:
    write_little()
    sys.exit(0)


@pytest.mark.parametrize("block", [write_little, write_much, write_as_argparse_does, exit_after_writing])
def test_standard_output_that_is_full(block: Callable[[], None]) -> None:
    with open("/dev/full", "w") as full, redirect_stdout(full):
        with (
            pytest.raises(OutputError, match=r"^cannot write to standard output: No space left on device$") as raised,
            checked_output(),
        ):
            block()
        assert sys.stdout is full
        full.flush()  # as Python does at its exit
    assert (raised.value.errno, raised.value.exit_code) == (errno.ENOSPC, 1)


def test_another_file_that_is_full() -> None:
    with pytest.raises(OSError, match="No space left") as raised, checked_output(), open("/dev/full", "w") as file:
        file.write("a")
    assert not isinstance(raised.value, OutputError)


def test_a_reader_that_has_ended_ends_the_block() -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as pipe, redirect_stdout(pipe):
        with checked_output():
            write_much()
            pytest.fail("the block goes on")
        pipe.flush()
