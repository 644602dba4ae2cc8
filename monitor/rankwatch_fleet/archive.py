"""Writes runs into an archive, on any file system that fsspec knows; and merges the files of days that are over."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from datetime import date
from glob import escape
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rankwatch import __version__
from rankwatch.errors import UsageError
from rankwatch_monitor.record.reader import RunRecord
from rankwatch_monitor.views.export.target import FileSystem, explained, folder_at, replaced
from rankwatch_monitor.views.export.urls import shown

from .layout import MERGED, SCHEMA, file_of, folder_of
from .row import row_of


class Merged(NamedTuple):
    """How many files were merged into how many."""

    files: int
    into: int


_SMALL: dict[str, Any] = {"store_schema": False, "write_statistics": ["began"]}
"""A file of one run is mostly what Parquet says of its columns: 13 kB, and 21 without this."""


def archive(record: RunRecord, url: str) -> str:
    """Writes a run's row, in place of an earlier one; returns the path of its file.

    Raises:
        StoreError: the record cannot be read.
        UsageError: the file cannot be written.
    """
    row = row_of(record)
    return put(url, folder_of(row.day, row.job), file_of(row.id), [row.columns])


def put(url: str, folder: str, name: str, rows: Iterable[Mapping[str, Any]]) -> str:
    """Writes a file of the archive, whole or not at all."""
    file_system, root = folder_at(url)
    with explained(f"write to {url}"):
        return _write(file_system, f"{root}/{folder}", name, pa.Table.from_pylist(list(rows), SCHEMA))


def merge(url: str, before: date) -> Merged:
    """Makes one file of all files of a job and a day, for the days before this one: thousands of small ones are slow to read.

    The merged file is there before the others go, so no run is ever missing.
    """
    file_system, root = folder_at(url)
    merged = Merged(0, 0)
    with explained(f"merge {url}"):
        days = file_system.glob(f"{escape(root)}/date=*")
        if not days:
            raise UsageError(f"no archive at {shown(url)}: it has no folder date=*")
        for day in days:
            if day.rpartition("date=")[2] >= before.isoformat():
                continue
            for folder in file_system.glob(f"{escape(day)}/job=*"):
                names = sorted(file_system.glob(f"{escape(folder)}/*.parquet"))
                if len(names) > 1:
                    _merge(file_system, folder, names)
                    merged = Merged(merged.files + len(names), merged.into + 1)
    return merged


def _merge(file_system: FileSystem, folder: str, names: list[str]) -> None:
    tables = []
    for name in names:
        try:
            with file_system.open(name, "rb") as file:
                tables.append(pq.ParquetFile(file).read())
        except pa.ArrowInvalid as error:
            raise UsageError(f"cannot merge {name}, which is no file of an archive: remove it ({error})") from None
    table = pa.concat_tables(tables, promote_options="default")
    # A name of its own: what another merge is writing, or has just written, must not be replaced by what this one has read.
    _write(file_system, folder, f"{MERGED}-{os.urandom(4).hex()}.parquet", _newest(table))
    for name in names:
        file_system.rm_file(name)


def _newest(table: pa.Table) -> pa.Table:
    """Of each run the newest row, in the order in which the runs began."""
    order = pc.sort_indices(table, [("archived", "descending")])
    seen: set[str] = set()
    rows = []
    for index in order.to_pylist():
        run_id = table["id"][index].as_py()
        if run_id not in seen:
            seen.add(run_id)
            rows.append(index)
    table = table.take(rows)
    return table.take(pc.sort_indices(table, [("began", "ascending")]))


def _write(file_system: FileSystem, folder: str, name: str, table: pa.Table) -> str:
    file_system.makedirs(folder, exist_ok=True)
    path = f"{folder}/{name}"
    about = {"rankwatch.version": __version__, "rankwatch.what": "archive"}
    with replaced(file_system, path) as file:
        pq.write_table(table.replace_schema_metadata(about), file, compression="zstd", **_SMALL)
    return path
