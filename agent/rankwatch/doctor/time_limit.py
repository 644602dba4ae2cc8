"""Checks under a time limit."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from ..errors import EXIT_ERROR
from ..shared.words.brief import brief
from ..tell.abort import say
from .result import CheckResult, CheckState, fail, skip

Work = Callable[[], CheckResult]

LONGEST_ERROR = 300
NO_ANSWER = "no answer within"


def bounded(check: str, work: Work, seconds: float) -> CheckResult:
    """Does the work in a thread. Work that is late is a failure; its thread stays behind until the process ends by force."""
    outcome: list[CheckResult] = []

    def do() -> None:
        try:
            outcome.append(work())
        except Exception as error:  # noqa: BLE001 (any error is the check's result)
            outcome.append(fail(check, describe(error)))

    thread = threading.Thread(target=do, name=f"doctor-{check}", daemon=True)
    thread.start()
    thread.join(seconds)
    return outcome[0] if outcome else fail(check, f"{NO_ANSWER} {seconds:g} s")


def in_turn(steps: list[tuple[str, Work]], seconds: float) -> list[CheckResult]:
    """Does steps that depend on each other. After a step that failed, the others are skipped."""
    results: list[CheckResult] = []
    for check, work in steps:
        failed = next((result for result in results if result.state is CheckState.FAIL), None)
        results.append(bounded(check, work, seconds) if failed is None else skip(check, f"not tried: {failed.check} failed"))
    return results


class Watchdog:
    """Ends the process unless it is renewed in time: the calls of a store may block for ever once its network is gone."""

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
    text = " ".join(brief(str(error)).split()) or type(error).__name__
    return text if len(text) <= LONGEST_ERROR else f"{text[:LONGEST_ERROR]}..."
