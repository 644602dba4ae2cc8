"""The preallocated buffers that readings are written to on their device, and their read-back to the host."""

from __future__ import annotations

import torch
from torch import Tensor

from .measure import Measure, Unmeasurable

FIRST_ROWS = 256


class Tape:
    """Rows of (abs min, abs max), one buffer per device; a row is named by (device, index) until ``rewind``."""

    def __init__(self) -> None:
        self._measure = Measure()
        self._buffers: dict[torch.device, _Buffer] = {}

    def write(self, values: Tensor) -> tuple[torch.device, int]:
        """Measures ``values`` (not empty, no autograd history) into the next row of its device. Raises Unmeasurable."""
        buffer = self._buffers.get(values.device)
        if buffer is None:
            if values.device.type == "meta":
                raise Unmeasurable("meta")
            buffer = self._buffers[values.device] = _Buffer(values.device)
        low, high = buffer.cells()
        self._measure(values, low, high)
        buffer.used += 1
        return values.device, buffer.used - 1

    def read(self) -> dict[torch.device, list[list[float]]]:
        """All rows written since ``rewind``: one transfer, and on an accelerator one synchronisation, per device."""
        return {device: buffer.rows[: buffer.used].tolist() for device, buffer in self._buffers.items() if buffer.used}

    def rewind(self) -> None:
        for buffer in self._buffers.values():
            buffer.used = 0


class _Buffer:
    def __init__(self, device: torch.device) -> None:
        self._dtype = torch.float32 if device.type == "mps" else torch.float64
        self._device = device
        self.used = 0
        self._allocate(FIRST_ROWS)

    def cells(self) -> tuple[Tensor, Tensor]:
        if self.used == len(self._cells):
            written = self.rows
            self._allocate(2 * self.used)
            self.rows[: self.used] = written
        return self._cells[self.used]

    def _allocate(self, rows: int) -> None:
        with torch.inference_mode(False):
            self.rows = torch.zeros((rows, 2), dtype=self._dtype, device=self._device)
        self._cells = [(row[0], row[1]) for row in self.rows]
