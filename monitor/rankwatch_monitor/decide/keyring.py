"""The client keys that a collector admits, and whose runs each may speak for."""

from __future__ import annotations

import json
from collections.abc import Iterable

from rankwatch.shared.connection import KeyPair

ANY_JOB = ""

MAX_JOBS = 4096
"""Invited jobs. A collector that lives for years is started anew, with a new connection file, now and then."""


class Keyring:
    """The key of the connection file, which opens runs of any job and may change them, and those of invited jobs.

    May be asked from any thread.
    """

    def __init__(self, master: KeyPair) -> None:
        self.master = master
        self._invited: dict[str, KeyPair] = {}
        self._jobs = {master.public: ANY_JOB}

    @property
    def is_full(self) -> bool:
        return len(self._invited) >= MAX_JOBS

    def admits(self, public: str) -> bool:
        return public in self._jobs

    def job_of(self, public: str) -> str | None:
        """The only job that a client with this key may speak for; ANY_JOB; None for a key that is not admitted."""
        return self._jobs.get(public)

    def invited(self, job: str) -> KeyPair | None:
        """The key of a job that was invited before."""
        return self._invited.get(job)

    def invite(self, job: str, keys: KeyPair) -> str:
        """Admits a key for one job; returns the line that ``recall`` takes."""
        self._invited[job] = keys
        self._jobs[keys.public] = job
        return json.dumps([job, keys.public, keys.secret])

    def recall(self, lines: Iterable[str]) -> None:
        """Admits what an earlier collector has invited. Raises ValueError: a line is malformed."""
        for line in lines:
            job, public, secret = json.loads(line)
            self.invite(job, KeyPair(public, secret))


def belongs_to(job: str, invited: str) -> bool:
    """Whether a run's job is the invited one; a further model of its processes has a number behind the name."""
    name, _, number = job.rpartition(".")
    return job == invited or (name == invited and number.isdecimal())
