"""``--on-verdict``: a command of the user's is told of each run that did not finish well: it may write to Slack, or mail."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
import time

from rankwatch.shared.printable import printable

from ..decide.report import Outcome, Report
from ..views import as_json

log = logging.getLogger(__name__)

LIMIT = 30.0
"""Seconds that the command may take. Then it is ended, with all that it has started."""

TOLD = 200
"""Characters of what a failed command has printed last, for the log."""


class Notifier:
    """Runs ``command`` by the shell, once for each run, in a thread of its own: no abort waits for it. Empty: no command."""

    def __init__(self, command: str) -> None:
        self._command = command
        self._threads: list[threading.Thread] = []

    def tell(self, report: Report) -> None:
        """The end of a run is known. Of one that finished well, nothing is told."""
        if self._command and report.outcome is not Outcome.FINISHED:
            thread = threading.Thread(target=self._run, args=(report,), name="rankwatch-notifier", daemon=True)
            self._threads.append(thread)
            thread.start()

    def close(self) -> None:
        """Waits for the commands that still run."""
        until = time.monotonic() + LIMIT + 1.0
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _run(self, report: Report) -> None:
        told = {
            "RANKWATCH_RUN": report.run,
            "RANKWATCH_OUTCOME": report.outcome.value,
            "RANKWATCH_CAUSE": report.verdict.cause.value if report.verdict is not None else "",
            "RANKWATCH_RUN_DIR": report.folder,
        }
        try:
            process = subprocess.Popen(
                self._command,
                shell=True,
                env={**os.environ, **told},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                text=True,
                errors="replace",
            )
        except OSError as error:
            log.error("cannot run the command of --on-verdict for run %s: %s", report.run, error.strerror)
            return
        try:
            printed, _ = process.communicate(as_json.render(report), timeout=LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            log.error("the command of --on-verdict for run %s was ended: it took more than %g s", report.run, LIMIT)
            return
        if process.returncode:
            last = printable(printed.strip()[-TOLD:]) or "it printed nothing"
            log.error("the command of --on-verdict for run %s: exit code %d: %s", report.run, process.returncode, last)
