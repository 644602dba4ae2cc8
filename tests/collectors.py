"""A real collector in a thread of the test's process, for tests of its clients."""

from __future__ import annotations

import inspect
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import ports
from rankwatch_monitor.decide.core.effects import Alert
from rankwatch_monitor.decide.core.options import Options
from rankwatch_monitor.decide.core.report import Report
from rankwatch_monitor.serve.collector import Collector
from rankwatch_monitor.serve.files.run_folder import RunsFolder
from rankwatch_monitor.serve.metrics.meters import Meters
from rankwatch_monitor.serve.settings import Settings

PATIENCE = 240
"""Seconds to wait for what must happen, be the machine as busy as it may. Only a test that hangs waits this long."""

LAST_WORDS = 10
"""Seconds before the end of a test's own time, at which ``until`` says what it waited for."""


class Running:
    """A collector in its own thread."""

    def __init__(
        self,
        folder: Path,
        listen: str | None = "",
        *,
        insecure: bool = False,
        meters: Meters | None = None,
        **options: float,
    ) -> None:
        self.folder = folder
        self.reports: list[Report] = []
        self.alerts: list[Alert] = []
        runs = folder / "runs"
        decides = Options(**{"heartbeat": 0.5, **options})  # type: ignore[arg-type]
        listens = ports.address() if listen == "" else listen
        self.collector = Collector(
            Settings(runs, decides, listens, insecure=insecure),
            folder / "connection.json",
            RunsFolder(runs),
            lambda report, news: self.reports.append(report) if news else None,
            alert=self.alerts.append,
            meters=meters,
        )
        self._thread = threading.Thread(target=self.collector.serve, daemon=True)
        self._thread.start()

    def stop(self, *, clean: bool = True) -> None:
        self.collector.stop()
        self._thread.join(PATIENCE)
        if clean:
            self.collector.close()
        else:  # as after a SIGKILL: the files stay
            self.collector._keys.release()
            self.collector._inbox.close()
            self.collector._decoder.close()
            self.collector._writer.close()
            self.collector._socket.close(0)
            self.collector._authenticator.stop()
            self.collector._context.destroy(linger=0)


def until(condition: Callable[[], object]) -> None:
    """Waits for a condition that has no event. Only the test's own time ends the wait: a busy machine is no failure.

    The condition is looked at less and less often, since looking costs what is waited for its share of the machine.
    """
    pause, seconds = threading.Event(), 0.005
    while not (found := condition()):
        if 0 < signal.getitimer(signal.ITIMER_REAL)[0] < LAST_WORDS:  # the timer of pytest-timeout
            seen = inspect.getclosurevars(condition).nonlocals
            raise AssertionError(f"never so:\n{inspect.getsource(condition)}\n{found!r}, where {seen!r}")
        pause.wait(seconds)
        seconds = min(1.5 * seconds, 0.25)
