"""``--on-verdict``: a command of the user's is told of each run that did not finish well: it may write to Slack, or mail.

It is told of a stall, of replicas that differ and of steps that are left out, too, while the run goes on.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import Counter, OrderedDict, deque
from typing import Any, TypeAlias

from rankwatch.shared.bounded import BoundedDict
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

MOST_WAITING = 16
"""Events of one job that wait for the command. Of more, the last one that waits says how many there were."""

LAST_EVENTS = 4
"""Commands that are waited for at the end."""

KNOWN_ALERTS = 4096
"""Runs and kinds of alerts that are counted; those that are older begin anew."""

VERDICT = "verdict"

BY_HAND = "stopped by SIGINT"
"""The reason of a run that Ctrl-C ended: whoever pressed it knows."""

Event: TypeAlias = tuple[str, Report, str, Outcome | None]


class Notifier:
    """Runs ``command`` by the shell, once for each event, one after the other, in a thread of its own: no abort waits for it.

    Jobs take turns, so that one whose runs all fail holds up no other one. Empty: no command.
    """

    def __init__(self, command: str) -> None:
        self._command = command
        self._programs = Programs()
        self._alerts = BoundedDict[tuple[str, str], int](KNOWN_ALERTS)
        self._changed = threading.Condition()
        self._waiting: OrderedDict[str, deque[Event]] = OrderedDict()
        """By job."""
        self._untold: Counter[str] = Counter()
        self._is_closing = self._runs = False
        self._thread: threading.Thread | None = None

    def tell(self, report: Report) -> None:
        """The end of a run is known. Nothing is told of one that finished well, that Ctrl-C ended, or whose failure was told."""
        is_told = report.outcome is not Outcome.FINISHED and report.reason != BY_HAND and not report.follows
        if is_told:
            text = ": ".join(filter(None, (report.outcome.value, report.reason)))
            self._start(VERDICT, report, text, report.outcome)

    def alert(self, alert: Alert) -> None:
        """There is trouble in a run that goes on."""
        run, kind = alert.report.run, alert.trouble.value
        self._alerts[run, kind] = count = self._alerts.get((run, kind), 0) + 1
        if count <= MOST_ALERTS:
            self._start(kind, alert.report, alert.text, None)
        elif self._command and count == MOST_ALERTS + 1:
            log.warning("the command of --on-verdict is told of no more than %d %s events of run %s", MOST_ALERTS, kind, run)

    def close(self) -> None:
        """Waits for the command, until ``stop``: for the one that runs, and for a few that wait."""
        with self._changed:
            self._is_closing = True
            limit = LIMIT * min(LAST_EVENTS, self._runs + self._count())
            self._changed.notify()
        if self._thread is None:
            return
        self._thread.join(PATIENCE)
        if self._thread.is_alive():
            log.info("waiting for the command of --on-verdict, for at most %g s; Ctrl-C ends it", limit)
            self._thread.join(limit + 1.0)
        with self._changed:
            if left := self._count():
                log.error("the command of --on-verdict was not told of %d events: there was no more time", left)

    def stop(self) -> None:
        """Ends the commands that still run, with all that they have started, and starts no other. For a signal's handler, too."""
        self._programs.stop()

    def _start(self, *event: Any) -> None:
        if not self._command or self._programs.is_stopped:
            return
        job = event[1].job
        with self._changed:
            waiting = self._waiting.setdefault(job, deque())
            if len(waiting) >= MOST_WAITING:
                self._untold[job] += 1
                return
            waiting.append(event)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="rankwatch-notifier", daemon=True)
                self._thread.start()
            self._changed.notify()

    def _count(self) -> int:
        return sum(map(len, self._waiting.values()))

    def _work(self) -> None:
        while (due := self._next()) is not None:
            self._run(*due)

    def _next(self) -> tuple[str, Report, str, Outcome | None, int] | None:
        """Waits for the first event of the next job, and counts those that are told with it alone; None: no more come."""
        with self._changed:
            self._runs = False
            while not self._waiting and not self._is_closing:
                self._changed.wait()
            if not self._waiting or self._programs.is_stopped:
                self._waiting.clear()
                return None
            job, waiting = next(iter(self._waiting.items()))
            event = waiting.popleft()
            self._runs = True
            if waiting:
                self._waiting.move_to_end(job)
                return *event, 0
            del self._waiting[job]
            return *event, self._untold.pop(job, 0)

    def _run(self, event: str, report: Report, text: str, outcome: Outcome | None, untold: int) -> None:
        more = f"; and {untold} more of job {report.job}" if untold else ""
        if untold:
            log.warning(
                "the command of --on-verdict is told of %d more events of job %s by their number", untold, report.job
            )
        run = report.run
        verdict = report.skipped[-1].verdict if event == Trouble.SKIP and report.skipped else report.verdict
        told = {
            "RANKWATCH_EVENT": event,
            "RANKWATCH_TEXT": one_line(text)[:LONGEST] + more,
            "RANKWATCH_RUN": run,
            "RANKWATCH_OUTCOME": "" if outcome is None else outcome.value,
            "RANKWATCH_CAUSE": verdict.cause.value if verdict is not None else "",
            "RANKWATCH_RUN_DIR": report.folder,
            **variables(next_action(report)),
        }
        body = {"event": event, "text": text + more, **as_json.to_dict(report), "outcome": outcome}
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
