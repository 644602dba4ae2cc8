"""What memory a rank took, by its heartbeats and its batches. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from rankwatch.shared.figures import figure

MOST = 9
"""Readings that are kept of a rank: beyond so many, every other one goes. There may be thousands of ranks."""

SETTLED = 1
"""The first batch that counts: what a model and its optimizer take is there after one."""

GROWN, TIMES = 256 << 20, 1.25
"""A process that took so many bytes more, and so many times as much as after its first batch, has grown."""

SHARE = 0.25
"""Of its growth that comes before the middle, at least, and after it: what grows once, as a cache does, is no leak."""

GIB, MIB = 1 << 30, 1 << 20


class Used(NamedTuple):
    batch: int
    size: int


@dataclass(slots=True)
class MemoryTaken:
    _used: list[Used] = field(default_factory=list)
    _apart: int = 1
    """Batches between two readings that are kept, at least."""

    def take(self, batch: int, size: int) -> None:
        if size <= 0 or batch < SETTLED:
            return
        kept = self._used
        if len(kept) > 1 and batch - kept[-2].batch < self._apart:
            kept.pop()
        kept.append(Used(batch, size))
        if len(kept) > MOST:
            del kept[1:-1:2]
            self._apart = max(1, (kept[-1].batch - kept[0].batch) // MOST)

    @property
    def now(self) -> int:
        """0: not known."""
        return self._used[-1].size if self._used else 0

    @property
    def leaks(self) -> bool:
        """Whether it has grown all the time. Asked of thousands of ranks in each heartbeat, of which few have grown at all."""
        if len(self._used) < 3:
            return False
        first, last = self._used[0], self._used[-1]
        growth = last.size - first.size
        if growth < GROWN or last.size < TIMES * first.size:
            return False
        middle = min(self._used, key=lambda one: abs(2 * one.batch - first.batch - last.batch))
        return min(middle.size - first.size, last.size - middle.size) >= SHARE * growth

    def describe(self) -> str:
        """``0.39 -> 31 GiB, +8 MiB a batch``; empty: it is not known."""
        if not self._used:
            return ""
        first, last = self._used[0], self._used[-1]
        if not self.leaks:
            return _size(max(one.size for one in self._used))
        a_batch = (last.size - first.size) / (last.batch - first.batch)
        return f"{_size(first.size)} -> {_size(last.size)}, +{_size(a_batch)} a batch"


def _size(size: float) -> str:
    return f"{figure(size / GIB)} GiB" if size >= GIB / 10 else f"{figure(size / MIB)} MiB"


def describe_memory(host: MemoryTaken, device: MemoryTaken) -> str:
    """``memory 0.39 -> 31 GiB, +8 MiB a batch; memory of its device 40 GiB``; empty: neither is known."""
    return _both(host.describe(), device.describe())


def describe_sizes(host: int, device: int) -> str:
    """The same of bytes that are taken now; 0: not known."""
    return _both(_size(host) if host else "", _size(device) if device else "")


def _both(host: str, device: str) -> str:
    told = f"memory {host}" if host else ""
    return "; ".join(filter(None, (told, f"memory of its device {device}" if device else "")))
