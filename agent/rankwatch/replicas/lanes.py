"""Checksums of several tensors, from their devices to the host, without waiting."""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..measure.tape import Event, to_host, wait_for
from .checksum import readable, write_all

Pair = tuple[int, int]
"""Both lanes, as signed numbers."""

UNKNOWN = -1, -1
"""See ``fingerprint.UNKNOWN``."""

MOST_READ = 1 << 20
"""Elements of an input or a gradient that are read: its beginning is enough."""

_FACTOR = 0x9E37_79B9_7F4A_7C15


class _Copied(NamedTuple):
    lanes: Tensor
    event: Event | None
    rows: list[int]


class Lanes:
    """``size`` checksums. What was not written, because it cannot be read, is UNKNOWN."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._written: defaultdict[torch.device, list[tuple[list[int], Tensor]]] = defaultdict(list)
        self._copied: list[_Copied] | None = None

    @staticmethod
    def of(tensors: Sequence[Tensor | None]) -> Lanes:
        """Those of whole tensors."""
        lanes = Lanes(len(tensors))
        lanes.write((row, values, 0) for row, values in enumerate(tensors))
        return lanes

    def write(self, found: Iterable[tuple[int, Tensor | None, int]]) -> None:
        """Takes checksums of tensors. With each, its row and the number of elements before it: see ``write_all``."""
        by_device: defaultdict[torch.device, list[tuple[int, Tensor, int]]] = defaultdict(list)
        for row, values, offset in found:
            if values is not None and readable(values):
                by_device[values.device].append((row, values, offset))
        for device, group in by_device.items():
            lanes = torch.empty((len(group), 2), dtype=torch.int64, device=device)
            write_all([values for _, values, _ in group], lanes, [offset for _, _, offset in group])
            self._written[device].append(([row for row, _, _ in group], lanes))

    def send(self) -> None:
        """Begins to copy them to the host. Nothing is written afterwards."""
        if self._copied is None:
            self._copied = []
            for parts in self._written.values():
                lanes = parts[0][1] if len(parts) == 1 else torch.cat([part for _, part in parts])
                self._copied.append(_Copied(*to_host(lanes), [row for rows, _ in parts for row in rows]))
            self._written.clear()

    @property
    def is_ready(self) -> bool:
        """Whether they have come."""
        return self._copied is not None and all(one.event is None or one.event.query() for one in self._copied)

    def pairs(self) -> list[Pair]:
        """The checksums by row; waits for them if they have not come."""
        self.send()
        found = [UNKNOWN] * self._size
        for lanes, event, rows in self._copied or ():
            wait_for(event)
            for row, (first, second) in zip(rows, lanes.tolist(), strict=True):
                found[row] = first, second
        return found


def packed(pairs: list[Pair]) -> bytes:
    """Checksums as they are sent."""
    return struct.pack(f"<{2 * len(pairs)}q", *[lane for pair in pairs for lane in pair])


def combined(pairs: list[Pair]) -> Pair:
    """One checksum of several, in their order."""
    lanes = [0, 0]
    for pair in pairs:
        lanes = [(lane * _FACTOR + one) % 2**64 for lane, one in zip(lanes, pair, strict=True)]
    first, second = ((lane ^ 2**63) - 2**63 for lane in lanes)
    return first, second


def beginning(values: Tensor) -> Tensor:
    """As many of the first values as are read."""
    while values.numel() > MOST_READ and values.dim():
        values = values[: max(1, MOST_READ * len(values) // values.numel())] if len(values) > 1 else values[0]
    return values
