"""A run as its record tells it, also while it goes on: the record is replayed, and asked for a report."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

from ..decide.ledger import Ledger
from ..decide.options import Options
from ..decide.report import Report
from . import reader as record
from .store import FILE, StoreError

log = logging.getLogger(__name__)


class Snapshot(NamedTuple):
    """``report.outcome`` says how the run ended once it ``is_over``."""

    report: Report
    is_over: bool


def take(run: Path) -> Snapshot:
    """That of the run in this folder. Raises StoreError when it has no record that can be read."""
    kept = record.read(run / FILE)
    try:
        replayed = Ledger(Options()).restore(run.resolve().name, kept.entries, kept.progress, kept.entries[-1].now)
    except (ValueError, LookupError) as error:
        raise StoreError(f"the record {run / FILE}: {error}") from error
    return Snapshot(replayed.report(), replayed.over)


def take_all(runs: Path) -> list[Snapshot]:
    """Those of all runs in a folder, the oldest first; one that cannot be read is told in the log."""
    found = []
    for folder in record.folders(runs):
        try:
            found.append((record.began_at(folder / FILE), take(folder)))
        except StoreError as error:
            log.warning("%s", error)
    return [snapshot for _, snapshot in sorted(found, key=lambda pair: pair[0])]
