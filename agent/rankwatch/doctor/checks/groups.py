"""The checks that ranks do together: collectives over all ranks, and echoes between two.

The process groups are created directly on a store, as ``init_process_group`` does inside: one for all ranks and one for each
pair. A pair's group needs only its two ranks, so a cable that is cut delays no other pair. ``new_group`` would be a collective
of all ranks; plain sockets would use another port, interface and firewall rule than the training.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..result import CheckResult, ok
from ..wording import describe_bandwidth

SIZES = (1, 1024, 2**20)
"""Elements of a collective, 8 bytes each."""
ROUND_TRIPS = 20
SMALL, LARGE = 2**17, 2**21
"""Elements sent to measure the bandwidth: 1 MiB, and 16 MiB where that fits the time limit."""
REPEATS = 3


class WrongAnswer(Exception):
    """A collective ended with a wrong result."""


class Group:
    """A process group. ``rank`` is the rank within the group."""

    def __init__(self, backend: str, store: Any, rank: int, size: int, device: torch.device, timeout: float) -> None:
        self.rank, self.size, self._device = rank, size, device
        limit = timedelta(seconds=timeout)
        self._group: Any
        if backend == "nccl":
            torch.cuda.set_device(device)
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            self._group = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            self._group = dist.ProcessGroupGloo(store, rank, size, limit)

    def full(self, elements: int, value: int) -> Tensor:
        """A tensor of ``value`` plus each element's index, so that a shift is noticed."""
        return torch.arange(elements, dtype=torch.int64, device=self._device) % 1000 + value

    def all_reduce(self) -> None:
        for elements in SIZES:
            tensor = self.full(elements, self.rank)
            self._wait(self._group.allreduce([tensor]))
            expected = self.full(elements, 0) * self.size + self.size * (self.size - 1) // 2
            self._expect(tensor, expected, elements)

    def broadcast(self, root: int) -> None:
        for elements in SIZES if root == 0 else SIZES[:2]:
            tensor = self.full(elements, 7 * root if self.rank == root else -1)
            options = dist.BroadcastOptions()
            options.rootRank = root
            self._wait(self._group.broadcast([tensor], options))
            self._expect(tensor, self.full(elements, 7 * root), elements)

    def all_gather(self) -> None:
        for elements in SIZES[:2]:
            parts = [self.full(elements, -1) for _ in range(self.size)]
            self._wait(self._group.allgather([parts], [self.full(elements, 3 * self.rank)]))
            for rank, part in enumerate(parts):
                self._expect(part, self.full(elements, 3 * rank), elements)

    def echo(self, elements: int, value: int) -> float:
        """In a group of two: rank 0 sends a tensor, rank 1 sends it back. Checks what arrives; returns the seconds."""
        sent, received = self.full(elements, value), self.full(elements, -1)
        began = time.perf_counter()
        if self.rank == 0:
            self._wait(self._group.send([sent], 1, 0))
            self._wait(self._group.recv([received], 1, 0))
        else:
            self._wait(self._group.recv([received], 0, 0))
            self._wait(self._group.send([received], 0, 0))
        seconds = time.perf_counter() - began
        self._expect(received, sent, elements)
        return seconds

    def send_number(self, value: int) -> int:
        """In a group of two: both return rank 0's number."""
        tensor = torch.tensor([value], dtype=torch.int64, device=self._device)
        self._wait(self._group.send([tensor], 1, 0) if self.rank == 0 else self._group.recv([tensor], 0, 0))
        return int(tensor)

    def abort(self) -> None:
        """Aborts a group that failed, so that none of its kernels waits on the GPU for ever."""
        if hasattr(self._group, "abort"):
            self._group.abort()

    def _wait(self, work: Any) -> None:
        work.wait()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _expect(self, tensor: Tensor, expected: Tensor, elements: int) -> None:
        if not torch.equal(tensor, expected):
            at = int((tensor != expected).nonzero()[0])
            raise WrongAnswer(
                f"wrong answer for {elements} elements: {int(tensor[at])} instead of {int(expected[at])} at element {at}"
            )


def timed(check: str, work: Callable[[], None], what: str) -> CheckResult:
    began = time.perf_counter()
    work()
    seconds = time.perf_counter() - began
    return ok(check, f"{what} in {seconds:.3f} s", seconds=seconds)


def measure_pair(group: Group, budget: float) -> CheckResult:
    """Measures round trip and bandwidth between the two ranks of a group, both ways; every byte is checked.

    Where the large messages would take longer than ``budget`` (seconds), only small ones are sent: a slow link is not a dead one.
    """
    trip = median(group.echo(1, number) for number in range(ROUND_TRIPS))
    expected = group.echo(SMALL, 0) * REPEATS * LARGE / SMALL
    # The two may measure different times: rank 0 decides for both.
    elements = group.send_number(LARGE if expected < budget else SMALL)
    bandwidth = 2 * 8 * elements / min(group.echo(elements, number) for number in range(REPEATS))
    return ok("pair", f"{1e3 * trip:.2f} ms, {describe_bandwidth(bandwidth)}", round_trip=trip, bandwidth=bandwidth)
