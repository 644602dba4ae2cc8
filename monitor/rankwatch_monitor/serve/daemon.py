"""``rankwatch collector``: a collector that serves until a signal."""

from __future__ import annotations

import gc
import logging
import shlex
import signal
import sys
from pathlib import Path
from types import FrameType

from rankwatch.shared.system.on_terminal import as_shown

from ..decide.core.options import Options
from ..decide.core.report import Report
from ..views import text
from .archiver import Archiver
from .collector import Collector
from .metrics.meters import Meters
from .niceness import SWITCH_INTERVAL
from .notifier import Notifier
from .printer import Printer
from .run_folder import RunsFolder

log = logging.getLogger(__name__)

GARBAGE_THRESHOLDS = 1_000_000, 20, 100
"""When Python searches for cyclic garbage. Objects that wait for the disk, at most a million, must not start a search: among the
objects of 16,384 ranks it takes 70 ms, in which no abort is sent, and finds next to nothing."""


def run_daemon(
    listen: str | None,
    connection_file: Path,
    runs_dir: Path,
    options: Options,
    *,
    address: str | None = None,
    keep_keys: bool = False,
    insecure: bool = False,
    meters: Meters | None = None,
    frames: int = text.FRAMES_ON_SCREEN,
    on_verdict: str = "",
    archive: str = "",
) -> int:
    """Serves until SIGTERM or SIGINT, and then ends the runs; a second signal ends the process at once."""
    runs = RunsFolder(runs_dir)
    gc.set_threshold(*GARBAGE_THRESHOLDS)
    sys.setswitchinterval(SWITCH_INTERVAL)

    notifier, archiver = Notifier(on_verdict), Archiver(archive, runs_dir) if archive else None

    def show(report: Report, news: bool) -> None:
        if news:
            notifier.tell(report)
            record = shlex.join(["rankwatch", "report", str(runs_dir / report.run)])
            printer.print(sys.stdout, as_shown(text.render(report, frames, record), sys.stdout) + "\n")

    with Printer() as printer:
        collector = Collector(
            listen=listen,
            connection_file=connection_file,
            runs=runs,
            options=options,
            show=show,
            alert=notifier.alert,
            address=address,
            keep_keys=keep_keys,
            insecure=insecure,
            meters=meters,
            archiver=archiver,
        )

        def end(number: int, frame: FrameType | None) -> None:
            signal.signal(number, signal.SIG_DFL)
            collector.stop()

        signal.signal(signal.SIGTERM, end)
        signal.signal(signal.SIGINT, end)
        if insecure:
            log.warning("links are in plain text: every process of this machine can read the runs, and stop them")
        log.info("collecting on %s; ranks find it by RANKWATCH_CONNECTION=%s", collector.address, connection_file.absolute())
        try:
            collector.serve()
        finally:
            collector.close()
            notifier.close()
            if archiver is not None:
                archiver.close()
    return 0
