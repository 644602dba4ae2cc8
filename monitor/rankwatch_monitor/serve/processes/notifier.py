"""``--on-verdict``: a command of the user's is told of each run that did not finish well: it may write to Slack, or mail.

It is told of a stall, of replicas that differ and of steps that are left out, too, while the run goes on.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter
from typing import Any

from rankwatch.shared.printable import one_line, printable

from ...decide.core.effects import Alert, Trouble
from ...decide.core.report import Outcome, Report
from ...decide.next.next_action import next_action, variables
from ...views import as_json
from .programs import NOTHING, PATIENCE, Programs

log = logging.getLogger(__name__)

LIMIT = 30.0
"""Seconds that the command may take. Then it is ended, with all that it has started."""

TOLD = 200
"""Characters of what a failed command has printed last, for the log."""

LONGEST = 2000
"""Characters of the text in the environment. On stdin it is whole."""

MOST_ALERTS = 10
"""Of one kind and one run: a rank may stall and go on again and again."""

VERDICT = "verdict"


class Notifier:
    """Runs ``command`` by the shell, once for each event, in a thread of its own: no abort waits for it. Empty: no command."""

    def __init__(self, command: str) -> None:
        self._command = command
        self._threads: list[threading.Thread] = []
        self._programs = Programs()
        self._alerts: Counter[tuple[str, str]] = Counter()

    def tell(self, report: Report) -> None:
        """The end of a run is known. Of one that finished well, nothing is told."""
        if report.outcome is not Outcome.FINISHED:
            text = ": ".join(filter(None, (report.outcome.value, report.reason)))
            self._start(VERDICT, report, text, report.outcome)

    def alert(self, alert: Alert) -> None:
        """There is trouble in a run that goes on."""
        run, kind = alert.report.run, alert.trouble.value
        self._alerts[run, kind] += 1
        if (count := self._alerts[run, kind]) <= MOST_ALERTS:
            self._start(kind, alert.report, alert.text, None)
        elif self._command and count == MOST_ALERTS + 1:
            log.warning("the command of --on-verdict is told of no more than %d %s events of run %s", MOST_ALERTS, kind, run)

    def close(self) -> None:
        """Waits for the commands that still run, until ``stop``."""
        began = time.monotonic()
        self._join(began + PATIENCE)
        if any(thread.is_alive() for thread in self._threads):
            log.info("waiting for the command of --on-verdict, for at most %g s; Ctrl-C ends it", LIMIT)
        self._join(began + LIMIT + 1.0)

    def stop(self) -> None:
        """Ends the commands that still run, with all that they have started, and starts no other. For a signal's handler, too."""
        self._programs.stop()

    def _join(self, until: float) -> None:
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _start(self, *event: Any) -> None:
        if self._command and not self._programs.is_stopped:
            thread = threading.Thread(target=self._run, args=event, name="rankwatch-notifier", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _run(self, event: str, report: Report, text: str, outcome: Outcome | None) -> None:
        run = report.run
        verdict = report.skipped[-1].verdict if event == Trouble.SKIP and report.skipped else report.verdict
        told = {
            "RANKWATCH_EVENT": event,
            "RANKWATCH_TEXT": one_line(text)[:LONGEST],
            "RANKWATCH_RUN": run,
            "RANKWATCH_OUTCOME": "" if outcome is None else outcome.value,
            "RANKWATCH_CAUSE": verdict.cause.value if verdict is not None else "",
            "RANKWATCH_RUN_DIR": report.folder,
            **variables(next_action(report)),
        }
        body = {"event": event, "text": text, **as_json.to_dict(report), "outcome": outcome}
        ended = self._programs.run(self._command, told, LIMIT, given=json.dumps(body, allow_nan=False))
        if ended.error:
            log.error("cannot run the command of --on-verdict for run %s: %s", run, ended.error)
        elif ended.code is None:
            log.error("the command of --on-verdict for run %s was ended: it took more than %g s", run, LIMIT)
        elif self._programs.is_stopped:
            log.error("the command of --on-verdict for run %s was ended by a signal", run)
        elif ended.code:
            last = printable(ended.printed[-TOLD:]) or NOTHING
            log.error("the command of --on-verdict for run %s: exit code %d: %s", run, ended.code, last)
