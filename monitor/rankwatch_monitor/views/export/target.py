"""The target of an export: a file on any file system that fsspec knows, written atomically."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

import fsspec
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from rankwatch.errors import UsageError


@contextmanager
def whole(url: str, *, overwrite: bool) -> Iterator[IO[bytes]]:
    """A file to write. It appears at ``url`` when the block ends; after an exception nothing of it is left.

    Raises:
        UsageError: the file exists, or it cannot be written.
    """
    with _explained(url):
        file_system, path = _locate(url, overwrite=overwrite)
        partial = f"{path}.{os.getpid()}.partial"
        try:
            with file_system.open(partial, "wb") as file:
                yield file
            _rename(file_system, partial, path)
        except BaseException:
            if file_system.exists(partial):
                file_system.rm(partial)
            raise


def _locate(url: str, *, overwrite: bool) -> tuple[AbstractFileSystem, str]:
    """The file system of this URL, and the path in it."""
    try:
        file_system, path = fsspec.url_to_fs(url)
    except ValueError as error:
        raise UsageError(f"cannot write {url}: {error}") from None
    if file_system.isdir(path):
        raise UsageError(f"cannot write {url}: it is a folder; name a file")
    if not overwrite and file_system.exists(path):
        raise UsageError(f"{url} exists: name another file, or replace it by --overwrite")
    return file_system, path


def _rename(file_system: AbstractFileSystem, partial: str, path: str) -> None:
    if isinstance(file_system, LocalFileSystem):
        os.replace(partial, path)
        return
    if file_system.exists(path):  # not every file system replaces a file by a move
        file_system.rm(path)
    file_system.mv(partial, path)


@contextmanager
def _explained(url: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ImportError) as error:
        raise UsageError(f"cannot write {url}: {error}") from None
