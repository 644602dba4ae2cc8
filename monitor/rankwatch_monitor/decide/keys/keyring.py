"""The client keys that a collector admits, and the job that each key speaks for."""

from __future__ import annotations

import json
from collections.abc import Iterable

from rankwatch.shared.link.connection import KeyPair

ANY_JOB = ""

MAX_JOBS = 4096
"""Invited jobs. A collector that runs for years needs a restart with a new connection file now and then."""


class Keyring:
    """The key of the connection file speaks for any job and may change options; the key of an invited job speaks for that
    job.

    Methods that only read may be called from any thread.
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
        """The job that a client with this key speaks for, or ANY_JOB; None: the key is not admitted."""
        return self._jobs.get(public)

    def invited(self, job: str) -> KeyPair | None:
        """The keys of a job; None: it was not invited."""
        return self._invited.get(job)

    def invite(self, job: str, keys: KeyPair) -> str:
        """Admits a key for one job; returns the line that ``recall`` takes."""
        self._invited[job] = keys
        self._jobs[keys.public] = job
        return json.dumps([job, keys.public, keys.secret])

    def recall(self, lines: Iterable[str]) -> None:
        """Admits the keys that an earlier collector issued. Raises ValueError: a line is malformed."""
        for line in lines:
            job, public, secret = json.loads(line)
            self.invite(job, KeyPair(public, secret))
