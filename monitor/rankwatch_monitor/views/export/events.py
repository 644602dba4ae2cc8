"""The record as TensorBoard's event files: scalars over the batches for each module and reading.

    abs_max/MODULE/LABEL   the largest over the ranks; inf and nan as they are (nan: some rank's is)
    abs_min/MODULE/LABEL   the smallest over the ranks
    headroom/MODULE        how many times the module's reading nearest to its dtype's largest number can double until it
                           gets there (log2); 0 where a reading is inf

The frames that a rank sent with its trip are included. The step is the batch, the time is when its last rank ended it.
"""

from __future__ import annotations

import heapq
import math
import os
import socket
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from time import time
from typing import NamedTuple

import numpy as np

from rankwatch.errors import UsageError
from rankwatch.shared.bounded import BoundedDict
from rankwatch.shared.types.frame import MEASURED, FrameTable, State
from rankwatch.shared.words.scalars import name_rows

from ...record.numbers.digest import SCALE, Columns
from ...record.numbers.layout import NO_ROW, Array
from ...record.numbers.rows import EnvelopePart, SentPart
from ...record.reader import RunRecord
from .written import Written


@contextmanager
def _without_torch() -> Iterator[None]:
    """tensorboardX imports torch if it is installed, to accept tensors. That costs seconds and memory, for nothing here."""
    if "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["torch"]


with _without_torch():
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import RecordWriter

SUFFIX = ".rankwatch"
"""Ends the names of our event files; other files in the folder are left alone."""

CACHED_TABLES = 64
"""Frame tables whose tags are held in memory."""

LARGEST = float(np.finfo(np.float32).max)
"""TensorBoard stores float32: a larger finite number is written as this."""


_MEASURED = np.array([state in MEASURED for state in State])


class Tags(NamedTuple):
    """For each row of a frame table, its tag without the first word, and the index of its module in ``modules``."""

    rows: list[str]
    of_module: Array
    modules: list[str]


class Values(NamedTuple):
    """Abs min and abs max of each row of a table, and which rows have them."""

    low: Array
    high: Array
    has_low: Array
    has_high: Array


def write(record: RunRecord, folder: Path, rank: int | None, *, overwrite: bool) -> Written:
    """Writes the scalars of all ranks, or of one, into an event file in ``folder``.

    Raises:
        UsageError: the folder cannot be written to, or has something in it already.
        StoreError: the record cannot be read.
    """
    try:
        with _event_file(folder, overwrite=overwrite) as writer:
            parts = record.envelopes() if rank is None else record.sent(rank)
            tripped = record.tripped(rank)  # the last batch of a rank that tripped came with its trip
            return _write(heapq.merge(parts, tripped, key=lambda part: part.batch), writer)
    except OSError as error:
        raise UsageError(f"cannot write into the folder {folder}: {error.strerror or error}") from None


def _write(parts: Iterable[EnvelopePart | SentPart], writer: RecordWriter) -> Written:
    written, tags = Written(), _TagCache()
    ended = 0.0
    writer.write(Event(wall_time=ended, file_version="brain.Event:2").SerializeToString())
    for batch, of_batch in groupby(parts, key=lambda part: part.batch):
        scalars: dict[str, float] = {}
        for part in of_batch:
            ended = max(ended, part.ended or 0.0)
            merge(scalars, *tags.of(part), values_of(part))
        event = Event(wall_time=ended, step=batch)
        for tag, value in scalars.items():
            event.summary.value.add(tag=tag, simple_value=value)
        writer.write(event.SerializeToString())
        written.add(len(scalars), np.array([batch]))
    return written


class _TagCache:
    """Tags and columns of the frame tables used last."""

    def __init__(self) -> None:
        self._of = BoundedDict[int, tuple[Tags, Columns]](CACHED_TABLES)

    def of(self, part: EnvelopePart | SentPart) -> tuple[Tags, Columns]:
        if part.number not in self._of:
            self._of[part.number] = tags_of(part.table), Columns(part.number, part.table)
        return self._of[part.number]


def tags_of(table: FrameTable) -> Tags:
    modules: dict[str, int] = {}
    of_module = []
    for spec in table.specs:
        number = modules.setdefault(spec.module or "(root)", len(modules))
        of_module += [number] * len(spec.readings)
    return Tags(name_rows(table.specs), np.array(of_module, np.int64), list(modules))


def values_of(part: EnvelopePart | SentPart) -> Values:
    """The abs max over ranks is nan if any rank's is nan; the abs min is nan only if no rank has a number."""
    if isinstance(part, SentPart):
        low, high, states = part.columns()
        has = _MEASURED[states]
        return Values(low, high, has, has)
    envelope = part.envelope
    is_nan = envelope.state == int(State.NAN)
    has_low, has_high = envelope.low_rank != NO_ROW, envelope.high_rank != NO_ROW
    low, high = np.where(has_low, envelope.low, np.nan), np.where(is_nan, np.nan, envelope.high)
    return Values(low, high, has_low | is_nan, has_high | is_nan)


def headroom_of(values: Values, tags: Tags, columns: Columns) -> Array:
    """The headroom of each module; inf without a reading of a known dtype, or if all its readings are zero or nan."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        of_rows = np.log2(SCALE) - np.log2(values.high * columns.shares)
    of_rows = np.where(values.has_high & ~np.isnan(of_rows), np.maximum(of_rows, 0.0), np.inf)
    least = np.full(len(tags.modules), np.inf)
    np.minimum.at(least, tags.of_module, of_rows)
    return least


def merge(scalars: dict[str, float], tags: Tags, columns: Columns, values: Values) -> None:
    """Adds a part to its batch's scalars: parts of other ranks may have the same modules in another table."""
    with np.errstate(over="ignore"):
        low, high = (np.where(np.isfinite(of), np.clip(of, -LARGEST, LARGEST), of) for of in (values.low, values.high))
    for tag, value, has in zip(tags.rows, high.tolist(), values.has_high.tolist(), strict=True):
        if has:
            old = scalars.get(f"abs_max/{tag}", 0.0)
            scalars[f"abs_max/{tag}"] = old if old != old or old > value else value
    for tag, value, has in zip(tags.rows, low.tolist(), values.has_low.tolist(), strict=True):
        if has:
            old = scalars.get(f"abs_min/{tag}", math.nan)
            scalars[f"abs_min/{tag}"] = old if old <= value or value != value else value
    for module, value in zip(tags.modules, headroom_of(values, tags, columns).tolist(), strict=True):
        if math.isfinite(value):
            scalars[f"headroom/{module}"] = min(value, scalars.get(f"headroom/{module}", math.inf))


@contextmanager
def _event_file(folder: Path, *, overwrite: bool) -> Iterator[RecordWriter]:
    """An event file to write. It appears in ``folder`` when the block ends, and replaces our earlier one."""
    old = list(folder.glob(f"events.out.tfevents.*{SUFFIX}"))
    if folder.is_dir() and any(folder.iterdir()) and not overwrite:
        raise UsageError(f"the folder {folder} is not empty: name another, or replace what is of rankwatch by --overwrite")
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{os.getpid()}.partial"  # TensorBoard ignores this name
    try:
        writer = RecordWriter(str(partial.absolute()))
        try:
            yield writer
            writer.flush()
        finally:
            writer.close()
        for path in old:
            path.unlink()
        partial.rename(folder / f"events.out.tfevents.{int(time())}.{socket.gethostname()}.{os.getpid()}{SUFFIX}")
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
