"""One part of a batch of many ranks -> a digest for each rank, and the envelope over all ranks. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rankwatch.shared.types.frame import (
    DTYPE_MAX,
    NEXT_TO_NO_LOSS,
    NO_LOSS,
    BatchSummary,
    FrameTable,
    Kind,
    ReadingSpec,
    State,
)

from .layout import DIGEST, ENVELOPE, NO_ROW, Array, dtype_of, envelope_layout, part_layout

MASKS = Kind.KEYWORD, Kind.BUFFER
"""Kinds that may be attention masks, which hold their dtype's largest number on purpose: no sign of an overflow."""

_FINITE, _INF, _NAN, _NOT_FLOAT = map(int, (State.FINITE, State.INF, State.NAN, State.NOT_FLOAT))
"""Plain ints: NumPy compares them with bytes as bytes, and converts every byte to int64 to compare it with an enum."""

STACKED = 64
"""Parts that are stacked at once: they fit the caches, and working memory does not grow with the world size."""

MIB, MOST_MEMORY = 1 << 20, 0xFFFFFFFF
"""What a digest's memory is counted in, rounded up, and its most."""

SCALE = 2.0**64
"""Scales shares of float32's largest number so that float32 can hold them, up to a headroom of 2^190."""

# Where ranks differ, the envelope has the last of their states in this order. Bytes: bytes.translate() is the fastest.
_WORST_LAST = (
    State.NONE, State.NOT_A_TENSOR, State.UNMATERIALISED, State.EMPTY, State.NOT_FLOAT, State.SEEN_FINITE, State.FINITE,
    State.INF, State.NAN,
)  # fmt: skip
_WEIGHT = bytes(_WORST_LAST.index(State(value)) if value < len(State) else 0 for value in range(256))


class RankSummary(NamedTuple):
    """A part of a batch as a rank sent it, and the number of its message."""

    rank: int
    seq: int
    summary: BatchSummary


class Columns:
    """A frame table's rows, prepared for arithmetic; ``number`` is the table's number in the record."""

    def __init__(self, number: int, table: FrameTable) -> None:
        self.number = number
        self.rows, self.frames = table.rows, len(table.specs)
        self.losses = list(table.losses)
        self.dtype = dtype_of(table)
        self.part = part_layout(self.rows, self.dtype)
        self.envelope = envelope_layout(self.rows, self.dtype)
        rows = [row for spec in table.specs for row in spec.readings]
        limits = np.array([limit_of(row) for row in rows], np.float64)
        """The largest number of each row's dtype; inf for unknown dtypes and for masks, so that they never come near it."""
        self.shares = (SCALE / limits).astype(self.dtype)
        """A reading times this is its share of the largest number, times SCALE."""


class Envelope:
    """For each row, over all ranks: the smallest abs min, the largest abs max, the worst state, and the first rank with each.

    Attributes:
        ranks: how many ranks were added.
        low, high: of the table's dtype; inf and -1 where no rank has a number.
        low_rank, high_rank, state_rank: uint32; NO_ROW where there is none.
        state: uint8.
    """

    def __init__(self, columns: Columns) -> None:
        self.ranks = 0
        self.low = np.full(columns.rows, np.inf, columns.dtype)
        self.high = np.full(columns.rows, -1, columns.dtype)
        self.low_rank, self.high_rank, self.state_rank = (np.full(columns.rows, NO_ROW, "<u4") for _ in range(3))
        self.state = np.full(columns.rows, State.NONE, np.uint8)

    def add(self, ranks: Array, lows: Array, highs: Array, states: Array) -> None:
        """Adds the readings of more ranks, each of shape (ranks, rows)."""
        self.ranks += len(ranks)
        valid = (states <= _INF) | (states == _NOT_FLOAT)
        if not valid.all():
            lows = np.where(valid, lows, np.inf)
            highs = np.where(valid, highs, -1)
        # Few rows get a new extreme, and its rank costs more to find than its value: only these rows are searched.
        low, high = lows.min(axis=0), highs.max(axis=0)
        rows = np.flatnonzero(low < self.low)
        self.low[rows], self.low_rank[rows] = low[rows], ranks[lows[:, rows].argmin(axis=0)]
        rows = np.flatnonzero(high > self.high)
        self.high[rows], self.high_rank[rows] = high[rows], ranks[highs[:, rows].argmax(axis=0)]
        weights = _weights(states)
        rows = np.flatnonzero((weights.max(axis=0) > _weights(self.state)) | (self.state_rank == NO_ROW))
        at = weights[:, rows].argmax(axis=0)
        self.state[rows], self.state_rank[rows] = states[at, rows], ranks[at]

    def pack(self) -> bytes:
        return b"".join(getattr(self, name).tobytes() for name in ENVELOPE)

    @classmethod
    def unpack(cls, ranks: int, body: bytes, columns: Columns) -> Envelope:
        """Raises ValueError when ``body`` does not fit the table."""
        columns.envelope.check(body)
        envelope = cls(columns)
        envelope.ranks = ranks
        for name in ENVELOPE:
            getattr(envelope, name)[:] = columns.envelope.column(body, name)
        return envelope


def summarise(parts: Sequence[RankSummary], columns: Columns, envelope: Envelope) -> Array:
    """The digests (a DIGEST array) of ``parts`` in their order; adds the parts to their envelope.

    Args:
        parts: of the same batch, with the same first frame, against the frame table of ``columns``.
    """
    digests = np.zeros(len(parts), DIGEST)
    for start in range(0, len(parts), STACKED):
        stacked = _stack(parts[start : start + STACKED], columns)
        _digest(digests[start : start + STACKED], stacked, columns)
        envelope.add(stacked.ranks, stacked.lows, stacked.highs, stacked.states)
    return digests


def limit_of(row: ReadingSpec) -> float:
    """The largest number of a row's dtype; inf for unknown dtypes, and for masks."""
    if row.kind in MASKS:
        return np.inf
    dtype = row.dtype
    return DTYPE_MAX.get({"complex64": "float32", "complex128": "float64"}.get(dtype, dtype), np.inf)


class _Stack(NamedTuple):
    """Parts side by side: ranks (uint32); abs min, abs max and states of shape (parts, rows).

    ``copied`` are the columns of a digest that come unchanged from the parts.
    """

    ranks: Array
    lows: Array
    highs: Array
    states: Array
    copied: dict[str, Sequence[float] | Array]


def _stack(parts: Sequence[RankSummary], columns: Columns) -> _Stack:
    ranks, seqs, summaries = zip(*parts, strict=True)
    batches, first_frames, steps, started, ended, _, _, lows, highs, states, norms, memories = zip(*summaries, strict=True)
    shape = len(parts), columns.rows
    return _Stack(
        np.array(ranks, np.uint32),
        np.frombuffer(b"".join(lows), columns.dtype).reshape(shape),
        np.frombuffer(b"".join(highs), columns.dtype).reshape(shape),
        np.frombuffer(b"".join(states), np.uint8).reshape(shape),
        {
            "batch": batches,
            "first_frame": first_frames,
            "seq": seqs,
            "step": steps,
            "started": started,
            "ended": ended,
            "norm": _as_float32(np.array(norms)),
            "memory": np.minimum(-(-np.array(memories) // MIB), MOST_MEMORY),
        },
    )


def _losses(parts: _Stack, columns: Columns) -> Array | float:
    """The largest loss of each part, with its sign."""
    if not columns.losses:
        return NO_LOSS
    signed, is_known = parts.lows[:, columns.losses], parts.states[:, columns.losses] <= _NAN
    largest: Array = np.where(is_known, _as_float32(signed), -np.inf).max(axis=1).astype(np.float32)  # nan if one is
    largest[largest == NO_LOSS] = NEXT_TO_NO_LOSS
    largest[~is_known.any(axis=1)] = NO_LOSS
    return largest


def _as_float32(numbers: Array) -> Array:
    """Of a wider dtype, what is finite stays so."""
    largest = np.finfo(np.float32).max
    return np.where(np.isfinite(numbers), np.clip(numbers, -largest, largest), numbers)


def _digest(into: Array, parts: _Stack, columns: Columns) -> None:
    into["rank"] = parts.ranks
    for name, values in parts.copied.items():
        into[name] = values
    into["table"], into["frames"] = columns.number, columns.frames
    into["bad_row"] = NO_ROW
    into["loss"] = _losses(parts, columns)
    into["headroom"] = np.inf
    if not columns.rows:
        return
    with np.errstate(divide="ignore", invalid="ignore"):  # inf * 0 comes from no finite reading; a headroom may be infinite
        share = parts.highs * columns.shares
        if parts.states.any():
            share[parts.states != _FINITE] = 0.0
        into["row"] = worst = share.argmax(axis=1)
        into["headroom"] = np.log2(SCALE) - np.log2(share[np.arange(len(share)), worst])
    bad = (parts.states == _INF) | (parts.states == _NAN)
    if bad.any():
        into["bad"] = bad.sum(axis=1)
        into["bad_row"] = np.where(bad.any(axis=1), bad.argmax(axis=1), NO_ROW)


def _weights(states: Array) -> Array:
    weights: Array = np.frombuffer(states.tobytes().translate(_WEIGHT), np.uint8).reshape(states.shape)
    return weights
