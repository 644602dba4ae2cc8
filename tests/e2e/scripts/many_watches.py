"""A process that watches again and again: prints by how many MiB its memory has grown over the last WATCHES of them.

What is free is given back before, as the allocator keeps it for later. In half as many watches before these, caches fill.
"""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

import torch
from torch import nn

import rankwatch

WATCHES = 200


def resident() -> float:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


def watch(times: int) -> None:
    for _ in range(times):
        model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(10)])
        with rankwatch.watch(model):
            for _ in range(3):
                model(torch.randn(4, 32)).square().mean().backward()


if __name__ == "__main__":
    watch(WATCHES // 2)
    before = resident()
    watch(WATCHES)
    print(resident() - before)
