"""The record of a run that goes on is removed: the report says so, and the ranks keep what was not stored."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import zmq

import makers
from collectors import Running, until
from fuzz.make_corpus import saying
from rankwatch.shared.link import wire
from rankwatch.shared.link.sockets import dealer
from rankwatch.shared.types import messages
from rankwatch_monitor.record.runs import folders
from rankwatch_monitor.views import text

TABLE = makers.table()


@pytest.mark.slow
def test_a_record_that_is_removed_is_a_gap_of_the_report(tmp_path: Path) -> None:
    running = Running(tmp_path)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    acknowledged = 0

    def is_stored(seq: int) -> bool:
        nonlocal acknowledged
        rank.send(saying("", makers.beat(3, 0, 0)))  # it is answered by what is stored
        while rank.poll(0):
            message = wire.decode(rank.recv())
            if isinstance(message, messages.Ack):
                acknowledged = max(acknowledged, message.seq)
        return acknowledged >= seq

    try:
        rank = dealer(context, running.collector.connection)
        rank.send(saying("", makers.hello()))
        rank.send(saying("", messages.Table(TABLE)))
        for batch in range(4):
            rank.send(saying("", messages.Batch(batch + 1, makers.summary(batch))))
        until(lambda: is_stored(4))
        (folder,) = folders(tmp_path / "runs")
        shutil.rmtree(folder)
        for batch in range(4, 8):
            rank.send(saying("", messages.Batch(batch + 1, makers.summary(batch))))
        until(lambda: any(running.collector._writer.unstored(folder.name)))
        rank.send(saying("", messages.Bye(9, "finished", "")))
        until(lambda: all(run.over for run in running.collector.ledger.runs.values()))
    finally:
        context.destroy(linger=0)
        running.stop()
    assert acknowledged == 4
    told = text.render(running.reports[-1])
    assert "no inf or nan was reported, but not all of it is on record" in told
    assert "batches 0 to 7 are not on record: the file was removed or replaced" in told
    assert told == (folder / "report.txt").read_text()
