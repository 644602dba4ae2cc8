"""What ranks do together: collectives, and meetings of two.

The process groups are made directly on a store, as ``init_process_group`` does it inside, one for all and one for each
meeting: a group of two needs nobody else, so a cable that is cut keeps up no other pair. (``new_group`` is a collective of
all; plain sockets of our own would be another port, another interface and another firewall rule than those of the training.)
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

from .finding import Finding, ok
from .words import describe_bandwidth

SIZES = (1, 1024, 2**20)
"""Elements of 8 bytes."""
ROUND_TRIPS = 20
SMALL, LARGE = 2**17, 2**21
"""Elements that are sent to measure the bandwidth: 1 MiB, and 16 MiB where there is time for it."""
REPEATS = 3


class WrongAnswer(Exception):
    """A collective came to its end, and not to the right result."""


class Group:
    """A process group of its own. ``rank`` counts within it."""

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
        """A value, and its place added to it, so that a shift shows."""
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
        """Of two, the first sends a tensor and the second sends it back; returns the seconds, and checks what has come."""
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

    def tell(self, value: int) -> int:
        """Of two, the first tells the second a number."""
        tensor = torch.tensor([value], dtype=torch.int64, device=self._device)
        self._wait(self._group.send([tensor], 1, 0) if self.rank == 0 else self._group.recv([tensor], 0, 0))
        return int(tensor)

    def abort(self) -> None:
        """Lets go of a group that failed, so that no kernel of it waits on the GPU for ever."""
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


def timed(check: str, work: Callable[[], None], what: str) -> Finding:
    began = time.perf_counter()
    work()
    seconds = time.perf_counter() - began
    return ok(check, f"{what} in {seconds:.3f} s", seconds=seconds)


def meet(group: Group, budget: float) -> Finding:
    """Two speak with each other, first a little, then much, both ways; every byte is checked.

    Where much would take longer than ``budget`` (seconds) it stays at little: a slow link is not a dead one.
    """
    trip = median(group.echo(1, number) for number in range(ROUND_TRIPS))
    expected = group.echo(SMALL, 0) * REPEATS * LARGE / SMALL
    # What is quick on one side may not be on the other: one of them decides for both.
    elements = group.tell(LARGE if expected < budget else SMALL)
    bandwidth = 2 * 8 * elements / min(group.echo(elements, number) for number in range(REPEATS))
    return ok("pair", f"{1e3 * trip:.2f} ms, {describe_bandwidth(bandwidth)}", round_trip=trip, bandwidth=bandwidth)
