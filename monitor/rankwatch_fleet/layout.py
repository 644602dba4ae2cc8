"""The files of an archive, and their columns.

    URL/date=2026-01-31/job=train/train-0-5d41402abc4b.parquet

A file has one row for each of its runs; a run's own file has one, and is written whole or not at all. ``date`` is the day, in
UTC, on which the run began, and ``job`` is percent-encoded: these two columns are in the path alone, as Spark, Trino and DuckDB
expect it. ``id`` is the run's in all archives. Where a run was archived again, or its day is being merged, the row with the
newest ``archived`` counts.
"""

from __future__ import annotations

import hashlib
from datetime import date, datetime, timezone
from urllib.parse import quote

import pyarrow as pa

MAX_DIGESTS = 1024
"""Rows of digests of a run: where it has more batches, a row sums up 2, 4, 8, ... of them."""

MERGED = "merged"
"""The beginning of the name of a file that a day's runs of a job are merged into."""

_LONGEST = 150
"""Characters of a folder's name; file systems take 255 bytes."""

_TIME = pa.timestamp("us", tz="UTC")
_TEXT, _INT, _LONG, _NUMBER = pa.string(), pa.int32(), pa.int64(), pa.float64()


def _rows(**fields: pa.DataType) -> pa.DataType:
    return pa.list_(pa.struct(list(fields.items())))


SCHEMA = pa.schema(
    {
        "id": _TEXT, "run": _TEXT, "archived": _TIME, "began": _TIME, "ended": _TIME, "restart": _INT, "model": _INT,
        "world_size": _INT, "batches": _LONG, "outcome": _TEXT, "reason": _TEXT, "rankwatch": _TEXT, "torch": _TEXT,
        "driver": _TEXT,
        "verdict": pa.struct(
            {
                "rank": _INT, "host": _TEXT, "gpu": _TEXT, "batch": _LONG, "optimizer_step": _LONG, "module": _TEXT,
                "module_class": _TEXT, "phase": _TEXT, "reading": _TEXT, "state": _TEXT, "dtype": _TEXT, "cause": _TEXT,
                "evidence": _TEXT, "operator": _TEXT, "recurred": _INT, "of": _INT, "certainty": _TEXT,
            }.items()
        ),
        "suspects": _rows(kind=_TEXT, rank=_INT, host=_TEXT, gpu=_TEXT),
        "ranks": _rows(
            rank=_INT, local_rank=_INT, stage=_INT, host=_TEXT, gpu=_TEXT, gpu_name=_TEXT, gpu_uuid=_TEXT, pci_bus=_TEXT,
            driver=_TEXT, torch=_TEXT, state=_TEXT, last_batch=_LONG, hours=_NUMBER, farewell=_TEXT,
        ),
        "notices": _rows(
            rank=_INT, kind=_TEXT, module=_TEXT, reading=_TEXT, dtype=_TEXT, since=_LONG, batch=_LONG, value=_NUMBER,
            growth=_NUMBER, text=_TEXT,
        ),
        "desync": _rows(
            step=_LONG, parameter=_TEXT, ranks=pa.list_(_INT), replicas=_INT, pattern=_TEXT, host=_TEXT, gpu=_TEXT,
            equal_at=_LONG,
        ),
        "digests": _rows(
            batch=_LONG, batches=_LONG, parts=_LONG, started=_TIME, ended=_TIME, headroom=_NUMBER, bad=_LONG, loss=_NUMBER
        ),
    }.items()
)  # fmt: skip
"""docs/pages/internals/archive.md explains the columns."""


def day_of(seconds: float) -> date:
    return datetime.fromtimestamp(seconds, timezone.utc).date()


def folder_of(day: date, job: str) -> str:
    """The folder of a day's runs of a job, below the archive's."""
    return f"date={day.isoformat()}/job={_encoded(job) or 'unnamed'}"


def file_of(run_id: str) -> str:
    return f"{_encoded(run_id)}.parquet"


def _encoded(name: str) -> str:
    text = _quoted(name)
    if len(text) <= _LONGEST:
        return text
    begin = name[:_LONGEST]
    while len(text := _quoted(begin)) > _LONGEST - 13:  # of whole characters: DuckDB reads no archive that has half of one
        begin = begin[:-1]
    return f"{text}-{_hash(name)}"


def _quoted(name: str) -> str:
    return quote(name, safe="", errors="backslashreplace")


def id_of(run: str, *origin: object) -> str:
    """A run's id: its name, which other folders of runs may have too, and a hash of what only this run began with."""
    return f"{run}-{_hash(repr(origin))}"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:12]
