"""``rankwatch collector``: a collector that serves until a signal."""

from __future__ import annotations

import gc
import logging
import signal
import sys
from types import FrameType

from rankwatch.shared.system.on_terminal import as_shown

from ..decide.core.report import Report
from ..views import text
from .collector import Collector
from .files.run_folder import RunsFolder
from .metrics.meters import Meters
from .niceness import SWITCH_INTERVAL
from .printer import Printer
from .processes.archiver import Archiver
from .processes.notifier import Notifier
from .settings import Settings

log = logging.getLogger(__name__)

GARBAGE_THRESHOLDS = 1_000_000, 20, 100
"""When Python searches for cyclic garbage. Objects that wait for the disk, at most a million, must not start a search: among the
objects of 16,384 ranks it takes 70 ms, in which no abort is sent, and finds next to nothing."""


def run_daemon(settings: Settings, meters: Meters | None = None) -> int:
    """Serves until SIGTERM or SIGINT, and then ends the runs; a second signal ends the process at once."""
    runs_dir = settings.runs_dir
    connection_file = settings.connection_file or runs_dir / "connection.json"
    runs = RunsFolder(runs_dir)
    gc.set_threshold(*GARBAGE_THRESHOLDS)
    sys.setswitchinterval(SWITCH_INTERVAL)

    notifier, archiver = Notifier(settings.on_verdict), Archiver(settings.archive, runs_dir)

    def show(report: Report, news: bool) -> None:
        if news:
            notifier.tell(report)
            record = text.command_of(runs_dir / report.run)
            printer.print(sys.stdout, as_shown(text.render(report, settings.frames, record), sys.stdout) + "\n")

    with Printer() as printer:
        collector = Collector(settings, connection_file, runs, show, alert=notifier.alert, meters=meters, archiver=archiver)

        def end(number: int, frame: FrameType | None) -> None:
            signal.signal(number, signal.SIG_DFL)
            collector.stop()

        signal.signal(signal.SIGTERM, end)
        signal.signal(signal.SIGINT, end)
        if settings.insecure:
            log.warning("links are in plain text: every process of this machine can read the runs, and stop them")
        log.info("collecting on %s; ranks find it by RANKWATCH_CONNECTION=%s", collector.address, connection_file.absolute())
        try:
            collector.serve()
        finally:
            collector.close()
            notifier.close()
            archiver.close()
    return 0
