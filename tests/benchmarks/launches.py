"""The host's time to launch the kernel that measures a tensor: directly, as rankwatch does, and by triton, side by side.

    python tests/benchmarks/launches.py

Without a GPU, the driver is one that does nothing: what is left is the Python before it. Prints JSON: the CPU time of the thread
in microseconds, the median of the rounds. "record" is all that a hook adds for a tensor on a GPU.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("tests", "agent")]

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]

from no_gpu import NoGpu
from rankwatch.measure import kernel

ROUNDS, LAUNCHES = 50, 200
"""So few at a time that no launch waits for the one before."""


def without_gpu() -> NoGpu:
    gpu, kernel._DEVICE = NoGpu(), "cpu"
    triton.runtime.driver.set_active(gpu)
    return gpu


def us_of(action: Callable[[], None], wait: Callable[[], None]) -> float:
    wait()
    begun = time.thread_time_ns()
    for _ in range(LAUNCHES):
        action()
    return (time.thread_time_ns() - begun) / LAUNCHES / 1000


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    wait = torch.cuda.synchronize if device == "cuda" else without_gpu().launches.clear
    values, cells = torch.ones(1000, device=device), torch.tensor(kernel.EMPTY, device=device)
    if not kernel.is_supported(values):
        raise SystemExit("triton cannot build the kernel here")
    directly = kernel._launches[values.device, values.dtype, False]
    by_triton = kernel._Launch(values.device, values.dtype, False)
    if directly is None or directly.direct is None:
        raise SystemExit("this version of triton has no direct launch: see the log of rankwatch.measure.kernel")

    def record() -> None:
        if kernel.is_supported(values):
            kernel.record(values, cells)

    ways = {
        "directly": lambda: directly(values, cells, cells),
        "by triton": lambda: by_triton(values, cells, cells),
        "record": record,
    }
    rounds = [{way: us_of(action, wait) for way, action in ways.items()} for _ in range(ROUNDS)]
    print(json.dumps([{"way": way, "us": statistics.median(times[way] for times in rounds)} for way in ways]))


if __name__ == "__main__":
    main()
