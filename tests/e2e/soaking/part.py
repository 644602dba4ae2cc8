"""What the parts of the soak have in common: a folder, a source of chance, rounds, and what is counted."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from pathlib import Path

from e2e.site import Forge

SEED = int(os.environ.get("RANKWATCH_SOAK_SEED", str(time.time_ns() % 1_000_000)))


class Part:
    """One part of the soak. ``counts``: what was done so far."""

    def __init__(self, forge: Forge, folder: Path) -> None:
        self.forge = forge
        self.folder = folder
        self.random = random.Random(f"{SEED} {type(self).__name__}")
        self.counts: Counter[str] = Counter()
        self.rounds = 0
        self.begin()

    def begin(self) -> None:
        """Before the first round."""

    def round(self) -> None:
        """Random faults, the end of the jobs, and the checks."""
        raise NotImplementedError

    def end(self) -> None:
        """After the last round, which may have failed: leaves no process behind."""

    def run(self, seconds: float) -> None:
        """Rounds for as long as that, at least one. Says the seed before each: a round that hangs must be repeatable."""
        begun = time.monotonic()
        while not self.rounds or time.monotonic() - begun < seconds:
            print(f"RANKWATCH_SOAK_SEED={SEED}: {type(self).__name__}, round {self.rounds}: {dict(self.counts)}", flush=True)
            self.round()
            self.rounds += 1
        print(f"RANKWATCH_SOAK_SEED={SEED}: {type(self).__name__}, {self.rounds} rounds: {dict(self.counts)}", flush=True)

    def pause(self, least: float, most: float) -> None:
        """A fault may come at any moment, so there is no event to wait for."""
        time.sleep(self.random.uniform(least, most))
