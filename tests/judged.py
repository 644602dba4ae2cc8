"""A training of one process, and the report of it as its collector would write it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import makers
from notebook import unwatch, watched
from rankwatch_monitor.decide.core.journal import NO_RANK, Closed, Decided, Entry, Fact, Opened, Trained
from rankwatch_monitor.decide.core.report import End, Outcome, RankNotice, Report
from rankwatch_monitor.record import replay
from rankwatch_monitor.record.reader import RunRecord
from rankwatch_monitor.record.schema import FILE
from rankwatch_monitor.record.store import Store
from trainings.case import Case

LOOK = 24
"""Batches between two looks at a record while it is written."""


def report_of(case: Case[Any], folder: Path, look: Callable[[RunRecord], None] = lambda record: None) -> Report:
    """Trains, records what was sent, and reads it. ``look`` is called with what is recorded after each LOOK batches."""
    training = case.make()
    detector, notebook = watched(training.root, **case.options)
    for number in range(case.batches):
        training.batch(number)
    unwatch()
    assert (detector.fault, notebook.trips) == ("", [])
    facts: list[tuple[int, Fact]] = [(NO_RANK, Opened("train", 0, 1)), (0, makers.hello())]
    last = 0
    folder.mkdir(parents=True)
    store = Store(folder / FILE)
    for seq, (table, summary) in enumerate(notebook.sent, 1):
        if facts and summary.batch // LOOK > last // LOOK:
            store.write([Entry(1.0, *fact) for fact in facts], 100.0)
            facts = []
            with RunRecord(folder / FILE) as record:
                look(record)
        last = summary.batch
        facts.append((0, Trained(seq, summary, table)))
    facts += [(NO_RANK, Decided(Outcome.FINISHED, "", False, End.FINISHED)), (NO_RANK, Closed())]
    store.write([Entry(1.0, *fact) for fact in facts], 100.0)
    store.close()
    with RunRecord(folder / FILE) as record:
        report = replay.take(record).report
    latest = {notice.key: notice for notice in notebook.notices}
    return replace(report, notices=tuple(RankNotice(0, notice) for notice in latest.values()))
