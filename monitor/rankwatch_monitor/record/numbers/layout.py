"""The bytes of every blob of numbers in a record: digests, parts of batches, envelopes, frame tables.

A part and an envelope are columns laid end to end, each with one value for each row of the frame table:

    part      abs_min abs_max state                               as the rank sent it
    envelope  low high low_rank high_rank state state_rank        over the ranks

abs min and abs max, low and high are little-endian floats of the table's type; a state is a byte, a rank a uint32.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from rankwatch.shared.link import wire
from rankwatch.shared.types import messages
from rankwatch.shared.types.frame import BatchSummary, Frame, FrameTable

Array: TypeAlias = np.ndarray[Any, Any]

PART = {"abs_min": "", "abs_max": "", "state": "u1"}
ENVELOPE = {"low": "", "high": "", "low_rank": "<u4", "high_rank": "<u4", "state": "u1", "state_rank": "<u4"}
"""The dtype of each column; empty: the table's own."""

NO_MEMORY = 0
"""In a digest: no tensor is on a device."""

NO_ROW = 0xFFFFFFFF
"""In a digest: no row. In an envelope: no rank."""

DIGEST = np.dtype(
    [
        ("rank", "<u4"),
        ("batch", "<i8"),
        ("headroom", "<f4"),
        ("bad", "<u4"),
        ("row", "<u4"),
        ("bad_row", "<u4"),
        ("table", "<u4"),
        ("first_frame", "<u4"),
        ("frames", "<u4"),
        ("loss", "<f4"),
        ("norm", "<f4"),
        ("memory", "<u4"),
        ("seq", "<i8"),
        ("step", "<i8"),
        ("started", "<f8"),
        ("ended", "<f8"),
    ]
)
"""The digest of one part of a batch of one rank.

``row`` is the finite reading that is nearest to its dtype's largest number, and ``headroom`` is how many times it can double
until it gets there (inf: all readings are zero); masks do not count. ``bad`` counts the inf and nan readings, and
``bad_row`` is the first of them, or NO_ROW. ``table`` is the number of the frame table in the record. ``loss`` is the part's
largest loss with its sign, which older agents did not tell, or NO_LOSS. ``norm`` is that of the gradients of the last optimizer
step before the batch, or NO_NORM. ``memory`` is in MiB, or NO_MEMORY.
"""

_COLUMNS: tuple[str, ...] = DIGEST.names or ()
RAW = 255
_WIDTHS = 0, 1, 2, 4
_COUNT, _HEAD = struct.Struct("<I"), struct.Struct("<qB")
_TIMES = "started", "ended"
_FLOAT, _BITS = np.dtype("<f4"), np.dtype("<u4")
MOST_DIGESTS = 1 << 16
"""In one blob. Columns of equal values take no bytes, so the size of a damaged blob does not bound its number of digests."""
_LATEST = 4e12
"""Seconds up to which a time is stored to the microsecond."""


class ByteRange(NamedTuple):
    """Where one value is in a blob: its first byte, counted from 1 as SQLite's substr() counts, and its number of bytes."""

    start: int
    size: int


class BlobLayout:
    """Where the columns are in the blob of a part or an envelope; ``size`` is the blob's number of bytes."""

    def __init__(self, name: str, columns: Mapping[str, str], rows: int, dtype: np.dtype[Any]) -> None:
        self._name, self._rows = name, rows
        self._columns: dict[str, tuple[int, np.dtype[Any]]] = {}
        self.size = 0
        for column, of in columns.items():
            kind = np.dtype(of) if of else dtype
            self._columns[column] = self.size, kind
            self.size += rows * kind.itemsize

    def check(self, body: bytes) -> None:
        """Raises ValueError when a blob has another size."""
        if len(body) != self.size:
            raise ValueError(f"{self._name} of {len(body)} bytes instead of {self.size}")

    def column(self, body: bytes, name: str) -> Array:
        """Raises ValueError when the blob is too short."""
        start, dtype = self._columns[name]
        return np.frombuffer(body, dtype, self._rows, start)

    def columns_of(self, bodies: Sequence[bytes], name: str) -> Array:
        """A column of many blobs, of shape (blobs, rows). Raises ValueError when a blob has another size."""
        for body in bodies:
            self.check(body)
        if not self.size:
            return np.zeros((len(bodies), 0), self._columns[name][1])
        fields = [(column, dtype, (self._rows,)) for column, (_, dtype) in self._columns.items()]
        found: Array = np.frombuffer(b"".join(bodies), fields)[name]
        return found

    def cell(self, name: str, row: int) -> ByteRange:
        start, dtype = self._columns[name]
        return ByteRange(1 + start + row * dtype.itemsize, dtype.itemsize)


def part_layout(rows: int, dtype: np.dtype[Any]) -> BlobLayout:
    return BlobLayout("a part", PART, rows, dtype)


def envelope_layout(rows: int, dtype: np.dtype[Any]) -> BlobLayout:
    return BlobLayout("an envelope", ENVELOPE, rows, dtype)


def dtype_of(table: FrameTable) -> np.dtype[Any]:
    """The type of a table's numbers."""
    return np.dtype(f"<{table.typecode}")


def pack_part(summary: BatchSummary) -> bytes:
    return summary.abs_min + summary.abs_max + summary.states


def unpack_part(batch: int, first_frame: int, table: FrameTable, body: bytes) -> BatchSummary:
    """The part's summary, as far as its blob has it: not its step, and not its times."""
    size = table.column_bytes
    lows, highs, states = body[:size], body[size : 2 * size], body[2 * size :]
    return BatchSummary(batch, first_frame, 0, 0.0, 0.0, False, table.id, lows, highs, states)


def pack_frames(frames: Sequence[Frame], table: FrameTable) -> bytes:
    """Frames as the part of their own ``table``."""
    values = [value for column in ("abs_min", "abs_max") for frame in frames for value in getattr(frame, column)]
    with np.errstate(over="ignore"):
        return np.array(values).astype(dtype_of(table)).tobytes() + b"".join(frame.states for frame in frames)


def pack_table(table: FrameTable) -> bytes:
    return wire.encode(messages.Table(table))


def unpack_table(body: bytes) -> FrameTable:
    """Raises ValueError or ProtocolError when the blob is no frame table."""
    message = wire.decode(body)
    if not isinstance(message, messages.Table):
        raise ValueError(f"a frame table is a {type(message).__name__}")
    return message.table


def pack_digests(digests: Array) -> bytes:
    """Digests column by column, so that a reader of few columns need not unpack the others.

    First the number of digests. Then for each column its smallest value, and the width in bytes of each value's distance
    from it (RAW: the values themselves). Then the columns. Times are microseconds, and float32 are taken as the integers of their
    bits: so equal ones take no bytes.
    """
    heads, bodies = [_COUNT.pack(len(digests))], []
    for name in _COLUMNS:
        column = digests[name]
        if column.dtype == _FLOAT:
            column = np.ascontiguousarray(column).view(_BITS)
        elif name in _TIMES and bool(np.all(np.abs(column) < _LATEST)):
            column = np.rint(column * 1e6).astype(np.int64)
        width, least = RAW, 0
        if column.dtype.kind in "iu" and len(column):
            least, most = int(column.min()), int(column.max())
            width = next((width for width in _WIDTHS if most - least < 1 << (8 * width)), RAW)
            column = digests[name] if width == RAW else column - column.dtype.type(least)
            column = column.astype(f"<u{width}") if 0 < width < RAW else column
        heads.append(_HEAD.pack(least, width))
        bodies.append(column.tobytes() if width else b"")
    return b"".join(heads + bodies)


def unpack_digests(body: bytes, names: Sequence[str] = _COLUMNS) -> Array:
    """The digests, or only these columns of them. Raises ValueError when ``body`` is damaged."""
    try:
        (count,) = _COUNT.unpack_from(body)
        heads = [_HEAD.unpack_from(body, _COUNT.size + index * _HEAD.size) for index in range(len(_COLUMNS))]
    except struct.error as error:
        raise ValueError(f"digests of {len(body)} bytes: {error}") from None
    start = _COUNT.size + len(_COLUMNS) * _HEAD.size
    if unknown := {width for _, width in heads} - {RAW, *_WIDTHS}:
        raise ValueError(f"digests with a column of {min(unknown)} bytes")
    # Before memory is allocated for them.
    if count > MOST_DIGESTS or count * sum(width for _, width in heads if width < RAW) > len(body):
        raise ValueError(f"digests of {len(body)} bytes are no {count}")
    digests = np.zeros(count, [(name, DIGEST[name]) for name in names])
    for name, (least, width) in zip(_COLUMNS, heads, strict=True):
        dtype = DIGEST[name] if width == RAW else np.dtype(f"<u{width}" if width else "V0")
        if name in names:
            column = np.frombuffer(body, dtype, count, start) if width else np.zeros(count, np.uint8)
            if width != RAW:
                column = column.astype(np.int64) + least
                if DIGEST[name] == _FLOAT:
                    column = column.astype(_BITS).view(_FLOAT)
                elif name in _TIMES:
                    column = column / 1e6
            digests[name] = column
        start += count * dtype.itemsize
    if start != len(body):
        raise ValueError(f"digests of {len(body)} bytes instead of {start}")
    return digests
