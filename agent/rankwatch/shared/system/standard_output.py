"""Standard output that cannot be written: its disk is full, say, or its reader has ended."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any, TextIO, cast

from ...errors import RankwatchError


class OutputError(RankwatchError, OSError):
    """Standard output cannot be written. Errors of other files are no OutputError."""

    def __str__(self) -> str:
        return f"cannot write to standard output: {self.strerror}"


@contextmanager
def checked_output() -> Iterator[None]:
    """Flushes standard output at the end of the block. Where its reader, ``head`` say, has ended, the block ends early.

    Raises:
        OutputError: standard output cannot be written.
    """
    stream = sys.stdout
    try:
        with redirect_stdout(cast(TextIO, _Checked(stream))):
            try:
                yield
            finally:
                sys.stdout.flush()
    except (BrokenPipeError, OutputError) as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # Python flushes it once more
        if isinstance(error, OutputError):
            raise


def forgive(stream: object) -> None:
    """The last error of this stream was dealt with: ``checked_output`` does not raise it again."""
    if isinstance(stream, _Checked):
        stream.error = None


class _Checked:
    """A stream whose errors are told from those of other files; the last one comes again when the stream is flushed, since
    argparse ignores it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.error: OutputError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._explained():
            return self._stream.write(text)

    def flush(self) -> None:
        with self._explained():
            self._stream.flush()
        if self.error is not None:
            raise self.error

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            self.error = OutputError(error.errno, error.strerror)
            raise self.error from None
