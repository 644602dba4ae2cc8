"""How far the files of each key's runs may grow: the records, and the traces beside them."""

from __future__ import annotations

import logging
from collections import defaultdict

from rankwatch.shared.bounded import BoundedDict
from rankwatch.shared.link.allowance import Allowance

from ...decide.keys import budget
from ...decide.keys.keyring import ANY_JOB

KNOWN_RUNS = 1 << 16
"""Runs whose key is remembered; that of an earlier one counts for the collector's own key."""

log = logging.getLogger(__name__)


class DiskBudgets:
    """Used by the writer's thread, but for ``begin``."""

    def __init__(self) -> None:
        self._keys = BoundedDict[str, str](KNOWN_RUNS)
        self._left = defaultdict[str, Allowance](lambda: Allowance(budget.DISK_PER_SECOND, budget.DISK_AT_ONCE))
        self._sizes: dict[str, int] = {}
        self._told: set[str] = set()

    def begin(self, run: str, bound: str) -> None:
        """``bound``: the job that the key speaks for by which the run was begun."""
        self._keys[run] = bound

    def may_grow(self, run: str, now: float) -> bool:
        bound = self.key_of(run)
        if self._left[bound].left(now) > 0:
            return True
        if bound not in self._told:
            self._told.add(bound)
            whose = f"the key of job {bound}" if bound else "one key"
            log.error("the runs of %s have filled its share of the disk: their records drop old batches for new ones", whose)
        return False

    def spend(self, run: str, size: int) -> None:
        """Bytes of a further file."""
        self._left[self.key_of(run)].spend(size)

    def measure(self, run: str, size: int) -> None:
        """Bytes that a run's record has by now."""
        self.spend(run, max(0, size - self._sizes.get(run, 0)))
        self._sizes[run] = max(size, self._sizes.get(run, 0))

    def adopt(self, run: str, size: int) -> None:
        """The record of a run that another collector began has this many bytes, which do not count here."""
        self._sizes.setdefault(run, size)

    def close(self, run: str) -> None:
        """Its record is complete."""
        self._sizes.pop(run, None)

    def key_of(self, run: str) -> str:
        return self._keys.get(run, ANY_JOB)
