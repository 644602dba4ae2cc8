"""The report as text and as JSON, from the same data."""

from __future__ import annotations

import json

import makers
from makers import INF, NAN, frame, reading, trip
from rankwatch_monitor.report import json as as_json
from rankwatch_monitor.report import text as as_text
from rankwatch_monitor.report.data import Outcome, RankRow, RankState, Report
from rankwatch_monitor.verdict import Standing, Verdict, Witness, elect

CULPRIT = trip(
    reading("input[0]", 6.27e4, dtype="float16"),
    reading("input[mask]", INF),
    reading("output", INF, low=0.0, dtype="float16"),
    at=(149, 0, 412),
    before=(frame(reading("output", 285.0), at=(149, 0, 411), module="decoder.wo"),),
    module="decoder.block.2.dropout",
    step=37,
)


def verdict(*also: int, missing: int = 0) -> Verdict:
    witnesses = {rank: Witness(Standing.DONE, CULPRIT.position, None) for rank in range(8 - missing)}
    witnesses[5] = Witness(Standing.LIVE, CULPRIT.position, CULPRIT)
    for rank in also:
        witnesses[rank] = Witness(Standing.LIVE, CULPRIT.position, CULPRIT)
    found, _ = elect(witnesses, 8, since_first_trip=9.0, window=2.0)
    assert found is not None
    return found


def report(of: Verdict | None, outcome: Outcome = Outcome.ABORTED, **changes: object) -> Report:
    rows = tuple(
        RankRow(rank, rank % 4, f"node{rank // 4}", 100 + rank, 149, RankState.ABORTED, rank != 2, 0, "")
        for rank in range(8)
    )
    fields: dict[str, object] = {
        "run": "train-0",
        "job": "train",
        "restart": 0,
        "world_size": 8,
        "outcome": outcome,
        "reason": "",
        "verdict": of,
        "frames_in_batch": 618,
        "acknowledged_in": 0.041,
        "ranks": rows,
    }
    return Report(**{**fields, **changes})  # type: ignore[arg-type]


def test_the_first_overflow_report() -> None:
    assert as_text.render(report(verdict())) == (
        "rankwatch: first overflow in run train-0\n"
        "  culprit    rank 5 of 8 (node1, local rank 1), batch 149 (optimizer step 37), frame 412 of 618\n"
        "             decoder.block.2.dropout (Linear), output: inf\n"
        "  cause      upstream: input[mask] was inf and no watched module made it: it was born between modules; "
        "the last finite frame before it is decoder.wo (Linear)\n"
        "  certainty  complete: 8 of 8 ranks answered; the other 7 were finite here\n"
        "  abort      7 of 8 ranks acknowledged in 0.04 s\n"
        "\n"
        "Detected inf/nan during batch_number=149\n"
        "Last 2 forward frames:\n"
        "abs min  abs max  metadata\n"
        "                  decoder.wo Linear\n"
        "5.00e-01 2.85e+02 output\n"
        "                  decoder.block.2.dropout Linear\n"
        "5.00e-01 6.27e+04 input[0]\n"
        "5.00e-01      inf input[mask]\n"
        "0.00e+00      inf output\n"
    )


def test_other_trips_and_missing_ranks_are_named() -> None:
    text = as_text.render(report(verdict(6, missing=1)))
    assert "  also       rank 6 at the same frame: decoder.block.2.dropout (Linear), output: inf\n" in text
    assert "partial: 7 of 8 ranks answered; 5 of them were finite here; not heard: rank 7" in text


def test_strict_json_without_nan_or_infinity() -> None:
    parsed = json.loads(as_json.render(report(verdict(6))), parse_constant=lambda name: 1 / 0)
    assert parsed["schema"] == 1
    assert parsed["run"] == {"id": "train-0", "job": "train", "restart": 0, "world_size": 8}
    assert parsed["outcome"] == "aborted"
    expected = {
        "rank": 5,
        "local_rank": 1,
        "host": "node1",
        "batch": 149,
        "optimizer_step": 37,
        "frame": 412,
        "module": "decoder.block.2.dropout",
        "module_class": "Linear",
        "reading": "output",
        "state": "inf",
        "dtype": "float16",
        "certainty": "complete",
        "missing_ranks": [],
    }
    assert {key: parsed["verdict"][key] for key in expected} == expected
    assert parsed["verdict"]["also"][0]["rank"] == 6
    assert parsed["frames"][1]["readings"][2] == {
        "label": "output", "kind": "output", "dtype": "float16", "abs_min": 0.0, "abs_max": None, "state": "inf",
    }  # fmt: skip
    assert parsed["ranks"][5] == {
        "rank": 5, "local_rank": 1, "host": "node1", "pid": 105, "last_batch": 149,
        "state": "aborted", "acknowledged": True, "dropped": 0, "farewell": "",
    }  # fmt: skip


def test_a_nan_is_null_and_its_state_says_so() -> None:
    bad = trip(reading("output", NAN))
    found, _ = elect({0: Witness(Standing.LIVE, bad.position, bad)}, 1, 0.0, 2.0)
    parsed = as_json.to_dict(report(found))
    assert parsed["frames"][0]["readings"][0]["abs_min"] is None
    assert parsed["frames"][0]["readings"][0]["state"] == "nan"


def test_runs_without_a_verdict() -> None:
    finished = report(None, Outcome.FINISHED)
    assert as_text.render(finished) == "rankwatch: run train-0 finished: 8 ranks, 150 batches, no inf or nan\n"
    failed = as_text.render(report(None, Outcome.FAILED, reason="rank 1 of 8 failed: KeyError"))
    assert failed.startswith("rankwatch: run train-0 failed\n  reason     rank 1 of 8 failed: KeyError\n")
    assert makers.INF not in as_json.to_dict(finished).values()
