"""The target of an export: a file on any file system that fsspec knows, written atomically."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, TypeAlias

import fsspec
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from rankwatch.errors import UsageError

from .urls import shown

FileSystem: TypeAlias = AbstractFileSystem


@contextmanager
def whole(url: str, *, overwrite: bool) -> Iterator[IO[bytes]]:
    """A file to write. It appears at ``url`` when the block ends; after an exception nothing of it is left.

    Raises:
        UsageError: the file exists, or it cannot be written.
    """
    with explained(f"write {url}"):
        file_system, path = _locate(url, overwrite=overwrite)
        with replaced(file_system, path) as file:
            yield file


@contextmanager
def replaced(file_system: FileSystem, path: str) -> Iterator[IO[bytes]]:
    """As ``whole``, for a path of this file system. Programs that read all files of a folder pass over the unfinished one."""
    folder, slash, name = path.rpartition("/")
    partial = f"{folder}{slash}.{name}.{os.urandom(4).hex()}.partial"  # hosts and containers share process numbers
    try:
        with file_system.open(partial, "wb") as file:
            yield file
        _rename(file_system, partial, path)
    except BaseException:
        if file_system.exists(partial):
            file_system.rm(partial)
        raise


def is_local(file_system: FileSystem) -> bool:
    return isinstance(file_system, LocalFileSystem)


def folder_at(url: str) -> tuple[FileSystem, str]:
    """The file system of this URL, and the folder there. Raises UsageError where nothing is known of such URLs."""
    with explained(f"use {url}"):
        try:
            file_system, root = fsspec.url_to_fs(url)
        except ValueError as error:
            raise UsageError(shown(f"cannot use {url}: {error}")) from None
    return file_system, root.rstrip("/") or root


def _locate(url: str, *, overwrite: bool) -> tuple[FileSystem, str]:
    """The file system of this URL, and the path in it."""
    try:
        file_system, path = fsspec.url_to_fs(url)
    except ValueError as error:
        raise UsageError(shown(f"cannot write {url}: {error}")) from None
    if file_system.isdir(path):
        raise UsageError(f"cannot write {shown(url)}: it is a folder; name a file")
    if not overwrite and file_system.exists(path):
        raise UsageError(f"{shown(url)} exists: name another file, or replace it by --overwrite")
    return file_system, path


def _rename(file_system: FileSystem, partial: str, path: str) -> None:
    if is_local(file_system):
        os.replace(partial, path)
        return
    if file_system.exists(path):  # not every file system replaces a file by a move
        file_system.rm(path)
    file_system.mv(partial, path)


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Raises UsageError, ``cannot write URL: why`` say, where a file system refuses that or needs a package."""
    try:
        yield
    except (OSError, ImportError) as error:
        raise UsageError(shown(f"cannot {what}: {error}")) from None
