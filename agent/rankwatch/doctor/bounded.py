"""Checks under a time limit."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable

from ..errors import EXIT_ERROR
from ..tell.abort import say
from .finding import Finding, State, fail

Work = Callable[[], Finding]

LONGEST_ERROR = 300
NO_ANSWER = "no answer within"
_SOURCE = re.compile(r"\[/[^\]]*:\d+\]|Gloo connectFullMesh failed with")
"""Where in torch's sources an error was made."""


def bounded(check: str, work: Work, seconds: float) -> Finding:
    """Does the work in a thread; what has not come back in time is a failure, and stays behind (the process ends by force)."""
    outcome: list[Finding] = []

    def do() -> None:
        try:
            outcome.append(work())
        except Exception as error:  # noqa: BLE001 (whatever goes wrong is what was found)
            outcome.append(fail(check, describe(error)))

    thread = threading.Thread(target=do, name=f"doctor-{check}", daemon=True)
    thread.start()
    thread.join(seconds)
    return outcome[0] if outcome else fail(check, f"{NO_ANSWER} {seconds:g} s")


def in_turn(steps: list[tuple[str, Work]], seconds: float) -> list[Finding]:
    """Steps that rest on each other: after one that failed the others are not tried."""
    findings: list[Finding] = []
    for check, work in steps:
        failed = next((finding for finding in findings if finding.state is State.FAIL), None)
        if failed is None:
            findings.append(bounded(check, work, seconds))
        else:
            findings.append(Finding(check, State.SKIP, f"not tried: {failed.check} failed"))
    return findings


class LastResort:
    """Ends the process if it is not renewed in time: how long a store takes whose network is gone, nobody promises."""

    def __init__(self, who: str) -> None:
        self._who = who
        self._timer: threading.Timer | None = None

    def renew(self, seconds: float, what: str) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = threading.Timer(seconds, self._end, [seconds, what])
        self._timer.daemon = True
        self._timer.start()

    def _end(self, seconds: float, what: str) -> None:
        say(f"doctor: {self._who} hangs for {seconds:g} s ({what}) and is ended")
        os._exit(EXIT_ERROR)


def describe(error: BaseException) -> str:
    """An error in one line."""
    words = _SOURCE.sub("", str(error).split("Exception raised from")[0]).split()
    text = " ".join(words) or type(error).__name__
    return text if len(text) <= LONGEST_ERROR else f"{text[:LONGEST_ERROR]}..."
