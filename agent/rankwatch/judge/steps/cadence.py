"""Whether an optimizer step was skipped: backwards came as before each step, and the next forward comes without one. Pure."""

from __future__ import annotations

from dataclasses import dataclass

USUAL = 4
"""Steps in a row with as many backwards each, before a missing one is odd: gradients may be accumulated as the training likes."""

FRUITLESS = 3
"""Looks at gradients that were finite, after which none is looked at: this training accumulates irregularly."""


REPEATED = 100
"""Batches. A training that skips steps again and again is told of it once in so many."""


@dataclass(slots=True)
class Cadence:
    """The backwards of batches between two optimizer steps."""

    usual: int = 0
    streak: int = 0
    """Steps in a row with as many backwards as ``usual``."""
    count: int = 0
    batch: int = -1
    looks: int = 0
    """Looks at gradients, since one of them was bad."""
    first: int = -1
    """The batch of the first of the steps that were skipped for a bad gradient,"""
    skipped: int = 0
    """and how many there were."""
    told: int = -REPEATED

    def backward(self, batch: int) -> None:
        self.count += batch != self.batch
        self.batch = batch

    def step(self) -> None:
        if self.count:
            self.streak = self.streak + 1 if self.count == self.usual else 1
            self.usual, self.count = self.count, 0

    def forward(self) -> bool:
        """A forward begins; whether the step before it was skipped, so that the gradients are to be looked at."""
        is_late = self.streak >= USUAL and self.count >= self.usual and self.looks < FRUITLESS
        if is_late:
            self.count, self.looks = 0, self.looks + 1
        return is_late

    def is_told(self, batch: int) -> bool:
        """A gradient of this batch was bad: counts it, and returns whether to tell of it."""
        self.looks, self.skipped = 0, self.skipped + 1
        self.first = batch if self.first < 0 else self.first
        is_due = batch >= self.told + REPEATED
        self.told = batch if is_due else self.told
        return is_due
