"""A stage of a pipeline that was handed other numbers than the stage before it had sent."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import records
from makers import INF, NAN, frame, reading, trip
from rankwatch.shared.types import messages
from rankwatch.shared.types.frame import NO_STAGE, Reading, State
from rankwatch_monitor.decide.core.journal import NO_RANK, Entry, JobEnded
from rankwatch_monitor.record import replay
from rankwatch_monitor.record.handed import find_handed
from rankwatch_monitor.views import as_json, text

SENT = reading("output", 4e4, dtype="float16")
SEEN = SENT._replace(abs_min=0.0, abs_max=0.0, state=State.SEEN_FINITE)


def handed(folder: Path, sent: Reading | None, given: Reading, stages: tuple[int, int] = (0, 1)) -> tuple[str, Path]:
    """What is said of a trip of rank 1 in batch 2; ``sent``: what rank 0 returned there; None: that is not on record."""
    outputs = [SENT, SENT, *([sent] if sent is not None else [])]
    parts = [
        records.part(0, frame(one, at=(batch, 0, 1), module=""), step=0, seq=batch + 1) for batch, one in enumerate(outputs)
    ]
    found = replace(trip(reading("output", NAN), at=(2, 0, 0)), root_inputs=(given,))
    tripped = Entry(2.0, 1, messages.Tripped(9, found))
    run = records.write(folder, *parts, tripped, Entry(9.0, NO_RANK, JobEnded(1)))
    report = records.read(run / "run.db", lambda record: replay.take(record).report)
    rows = [replace(row, stage=stage) for row, stage in zip(report.ranks, stages, strict=True)]
    report = replace(report, ranks=rows)
    return records.read(run / "run.db", lambda record: find_handed(report, record)), run


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (reading("input[0]", 1e34, dtype="bfloat16"), "abs max 1e34"),
        (reading("input[0]", NAN, dtype="float16"), "nan"),
        (reading("input[0]", INF, dtype="float16"), "inf"),
    ],
)
def test_what_the_stage_before_did_not_send_is_told(given: Reading, said: str, tmp_path: Path) -> None:
    told, run = handed(tmp_path / "run", SENT, given)
    assert told == (
        "stage 1 was handed what stage 0 did not send: the output of rank 0 was float16, abs max 40,000 in batch 2, and "
        f"input[0] of rank 1 {given.dtype}, {said}"
    )
    report = replace(records.read(run / "run.db", lambda record: replay.take(record).report), handed=told)
    assert f"  handed     {told}\n" in text.render(report)
    verdict = as_json.to_dict(report)["verdict"]
    assert (verdict["handed"], verdict["try"].startswith("give the buffers of both stages one dtype")) == (told, True)


def test_an_output_whose_numbers_were_not_measured_differs_from_one_that_is_bad(tmp_path: Path) -> None:
    told, _ = handed(tmp_path / "run", SEEN, reading("input[0]", NAN))
    assert told.endswith("was float16, seen finite in batch 2, and input[0] of rank 1 float32, nan")


@pytest.mark.parametrize(
    ("sent", "given", "stages"),
    [
        (SENT, reading("input[0]", 4.1e4, dtype="bfloat16"), (0, 1)),  # it was rounded
        (reading("output", NAN), reading("input[0]", NAN), (0, 1)),
        (SEEN, reading("input[0]", 4e4), (0, 1)),
        (None, reading("input[0]", NAN), (0, 1)),
        (SENT, reading("input[0]", NAN), (NO_STAGE, NO_STAGE)),
        (SENT, reading("input[0]", NAN), (1, 0)),
    ],
)
def test_of_what_was_sent_nothing_is_told(
    sent: Reading | None, given: Reading, stages: tuple[int, int], tmp_path: Path
) -> None:
    assert handed(tmp_path / "run", sent, given, stages)[0] == ""
