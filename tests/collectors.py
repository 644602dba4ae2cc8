"""A real collector in a thread of the test's process, for tests of its clients."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from rankwatch_monitor.decide.options import Options
from rankwatch_monitor.decide.report import Report
from rankwatch_monitor.serve.collector import Collector
from rankwatch_monitor.serve.metrics.meters import Meters
from rankwatch_monitor.serve.run_folder import RunsFolder

SOON = 30
"""Seconds to wait for what must happen. Only a failing test waits this long."""


class Running:
    """A collector in its own thread."""

    def __init__(
        self,
        folder: Path,
        listen: str | None = "tcp://127.0.0.1:0",
        *,
        insecure: bool = False,
        meters: Meters | None = None,
        **options: float,
    ) -> None:
        self.folder = folder
        self.reports: list[Report] = []
        self.collector = Collector(
            listen=listen,
            connection_file=folder / "connection.json",
            runs=RunsFolder(folder / "runs"),
            options=Options(**{"heartbeat": 0.5, **options}),  # type: ignore[arg-type]
            insecure=insecure,
            meters=meters,
            show=lambda report, news: self.reports.append(report) if news else None,
        )
        self._thread = threading.Thread(target=self.collector.serve, daemon=True)
        self._thread.start()

    def stop(self, *, clean: bool = True) -> None:
        self.collector.stop()
        self._thread.join(SOON)
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
    """Waits for a condition that has no event. Only the test's own timeout ends the wait: a busy machine is no failure."""
    pause = threading.Event()
    while not condition():
        pause.wait(0.005)
