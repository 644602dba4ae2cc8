"""The last loss of each rank: in the report, in its JSON, and after the collector was started anew."""

from __future__ import annotations

import math

import pytest

import makers
from desk import connected
from rankwatch.shared.types import messages
from rankwatch.shared.types.frame import FrameSpec, FrameTable, Kind, ReadingSpec, pack
from rankwatch_monitor.decide.core.journal import Progress
from rankwatch_monitor.decide.core.ledger import Ledger
from rankwatch_monitor.decide.core.options import Options
from rankwatch_monitor.views import as_json

ROOT = FrameSpec("", "Net", (ReadingSpec(Kind.OUTPUT, "output", "float32"),))
LOSS = FrameSpec("", "Net", (ReadingSpec(Kind.LOSS, "loss", "float32"),))
TABLE = FrameTable((ROOT, LOSS))


def batch(seq: int, number: int, loss: float) -> messages.Batch:
    state = 2 if math.isnan(loss) else 1 if math.isinf(loss) else 0
    lows, highs = pack("f", [1.0, loss]), pack("f", [1.0, abs(loss)])
    of_batch = makers.summary(number, of=TABLE)
    return messages.Batch(seq, of_batch._replace(abs_min=lows, abs_max=highs, states=bytes([0, state])))


def test_the_report_has_the_last_loss_of_each_rank() -> None:
    desk = connected(6)
    for rank, losses in enumerate(([3.0, 2.0], [4.0, math.nan], [3.0, -2.0], [3.0, -1.0], [0.0, -math.inf])):
        desk.receive(rank, messages.Table(TABLE))
        for number, loss in enumerate(losses):
            desk.receive(rank, batch(number + 1, number, loss))
    desk.receive(range(6), messages.Bye(3, "finished", ""))
    report = desk.reports[-1]
    assert as_json.to_dict(report)["loss"] == [
        {"rank": 0, "batch": 1, "abs_max": 2.0, "state": "finite", "loss": 2.0},
        {"rank": 1, "batch": 1, "abs_max": None, "state": "nan", "loss": None},
        {"rank": 2, "batch": 1, "abs_max": 2.0, "state": "finite", "loss": -2.0},
        {"rank": 3, "batch": 1, "abs_max": pytest.approx(1.0), "state": "finite", "loss": pytest.approx(-1.0)},
        {"rank": 4, "batch": 1, "abs_max": None, "state": "inf", "loss": None},
    ]
    assert "NaN" not in as_json.render(report)


def test_a_batch_of_the_root_and_its_loss_is_no_full_batch() -> None:
    desk = connected(1)
    desk.receive(0, messages.Table(TABLE), batch(1, 0, 2.0))
    assert desk.run.ranks[0].full_batch == -1


def test_a_collector_that_is_started_anew_knows_the_losses() -> None:
    desk = connected(1)
    ((name, _),) = desk.ledger.runs.items()
    again = Ledger(Options()).restore(name, desk.records[name], [Progress(0, 1, 7, 7, 0, 2, 0.5)], 0.0)
    (row,) = again.report().ranks
    assert row.loss_batch == 7
    assert row.loss == 0.5
