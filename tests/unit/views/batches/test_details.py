"""One rank or one batch of a run: what the record has about it, as text and JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import makers
import records
import standings
from makers import INF, NAN, frame, reading
from rankwatch.errors import UsageError
from rankwatch.shared.types import messages
from rankwatch.shared.types.frame import Frame
from rankwatch_monitor.decide.core.journal import NO_RANK, Closed, Decided, Desynced, Entry
from rankwatch_monitor.decide.core.report import Outcome, RankStack, RankState, Stall
from rankwatch_monitor.decide.core.standing import RankStanding
from rankwatch_monitor.decide.replicas.desync import Desync, DesyncPattern
from rankwatch_monitor.record.schema import FILE
from rankwatch_monitor.record.store import Limits
from rankwatch_monitor.views.batches import batch, details, rank

OVER = [Entry(3.0, NO_RANK, Decided(Outcome.FINISHED, "", False)), Entry(3.0, NO_RANK, Closed())]

FLIPPED = Desync(9, "layers.3.weight", (1,), 3, DesyncPattern.ONE_RANK, "node0", equal_at=8, source="DDP")


def two(batch_number: int, high: float = 1.0) -> list[Frame]:
    return [
        frame(reading("weight", 3.0), reading("output", high, dtype="float16"), at=(batch_number, 0, 0)),
        frame(reading("output", high * 2), at=(batch_number, 0, 1), module="", module_class="Model"),
    ]


def of_batch(run: Path, number: int, of_rank: int | None = None, frames: int = 21) -> tuple[str, dict[str, Any]]:
    found = records.read(run / FILE, lambda record: details.of_batch(record, number, of_rank))
    return batch.render(found, frames), json.loads(batch.to_json(found, frames), parse_constant=pytest.fail)


def of_rank(run: Path, number: int, frames: int = 21) -> tuple[str, dict[str, Any]]:
    found = records.read(run / FILE, lambda record: details.of_rank(record, number))
    return rank.render(found, frames), json.loads(rank.to_json(found, frames), parse_constant=pytest.fail)


def forget(run: Path, table: str, condition: str) -> None:
    records.execute(run, f"DELETE FROM {table} WHERE {condition}")


def test_a_batch_as_its_rank_sent_it(tmp_path: Path) -> None:
    run = records.write(
        tmp_path / "train-1",
        records.part(0, *two(2)),
        records.part(0, *two(3, 2.0), step=1, ended=1e9),
        records.part(0, frame(reading("grad_output", NAN), at=(3, 0, 2)), step=1, ended=1e9 + 1),
        *OVER,
    )
    text, told = of_batch(run, 3)
    assert text == (
        "rankwatch: batch 3 of rank 0 of 2 (node0, local rank 0), run train-1\n"
        "  step       optimizer step 1, begun 2001-09-09 01:46:39 UTC, 2 s\n"
        "  headroom   x3.28e+04 in layer (Linear), output\n"
        "  bad        1 reading is inf or nan, the first layer (Linear), grad_output\n"
        "  frames     all 3, as the rank sent them\n"
        "\n"
        "                  *** Starting batch number=3 ***\n"
        "abs min  abs max  metadata\n"
        "                  layer Linear\n"
        "5.00e-01 3.00e+00 weight\n"
        "5.00e-01 2.00e+00 output\n"
        "                   Model\n"
        "5.00e-01 4.00e+00 output\n"
        "                  layer Linear\n"
        "     nan      nan grad_output\n"
    )
    assert (told["rank"], told["batch"], told["frames_kept"], told["frames_by_trip"], told["envelope"]) == (0, 3, 3, 0, [])
    assert [of["index"] for of in told["frames"]] == [0, 1, 2]
    assert told["nearest_as_sent"] == {"before": 2, "after": None}
    assert [(part["first_frame"], part["bad"]) for part in told["digests"]] == [(0, 0), (2, 1)]
    assert told["digests"][1]["first_bad"]["reading"] == "grad_output"

    text, told = of_batch(run, 3, frames=2)
    assert text.endswith(
        "  frames     the last 2 of 3, as the rank sent them\n"
        "\n"
        "abs min  abs max  metadata\n"
        "                   Model\n"
        "5.00e-01 4.00e+00 output\n"
        "                  layer Linear\n"
        "     nan      nan grad_output\n"
    )
    assert [of["index"] for of in told["frames"]] == [1, 2]


def test_without_a_rank_the_culprits_batch_is_shown(tmp_path: Path) -> None:
    run = records.write(
        tmp_path / "train-1",
        *(records.part(rank, *two(4)) for rank in (0, 1)),
        records.part(0, *two(5)),
        records.tripped(1, *two(4)[1:], *two(5, INF)[:1], step=5),
        Entry(2.5, 0, messages.Bye(9, "finished", "")),
        *OVER[1:],
    )
    text, told = of_batch(run, 5)
    assert text.startswith("rankwatch: batch 5 of rank 1 of 2 (node0, local rank 1), run train-1\n")
    assert "  frames     all 1 that the rank sent with its trip; it never sent the others\n" in text
    assert text.endswith("layer Linear\n5.00e-01 3.00e+00 weight\n5.00e-01      inf output\n")
    assert (told["rank"], told["frames_by_trip"], told["frames"][0]["readings"][1]["state"]) == (1, 1, "inf")
    assert of_batch(run, 5, 0)[1]["frames_by_trip"] == 0
    late = records.tripped(0, *two(5), frame(reading("grad_output", NAN), at=(5, 0, 2)))
    records.add(run, late)
    assert "all 3, as the rank sent them; the last 1 came with its trip" in of_batch(run, 5, 0)[0]


def test_a_batch_without_a_stored_summary(tmp_path: Path) -> None:
    sent = [records.part(0, *two(number)) for number in range(8)]
    wide = frame(reading("output", INF, low=0.25), reading("none"), at=(5, 0, 2), module="wide")
    other = records.part(1, *two(5, NAN), wide)
    run = records.write(tmp_path / "train-1", *sent, other, *OVER)
    forget(run, "summaries", "batch IN (4, 5, 6)")
    text, told = of_batch(run, 5, 0)
    assert text == (
        "rankwatch: batch 5 of rank 0 of 2 (node0, local rank 0), run train-1\n"
        "  step       optimizer step 0, begun 1970-01-01 00:00:10 UTC, 1 s\n"
        "  headroom   x6.55e+04 in layer (Linear), output\n"
        "  frames     not stored as the rank sent them; the nearest stored: 3 and 7\n"
        "             all 5 over all ranks instead\n"
        "\n"
        "abs min  abs max  metadata (rank of the abs max, or with the nan)\n"
        "                  layer Linear\n"
        "5.00e-01 3.00e+00 weight (0)\n"
        "5.00e-01 1.00e+00 output (0)\n"
        "                   Model\n"
        "5.00e-01 2.00e+00 output (0)\n"
        "                  layer Linear\n"
        "5.00e-01 3.00e+00 weight (1)\n"
        "     nan      nan output (1)\n"
        "                   Model\n"
        "     nan      nan output (1)\n"
        "                  wide Linear\n"
        "2.50e-01      inf output (1)\n"
        "5.00e-01 1.00e+00 none (1)\n"
    )
    assert told["nearest_as_sent"] == {"before": 3, "after": 7}
    assert told["frames"] == []
    assert told["envelope"][3]["readings"][0] == {
        "label": "output", "kind": "output", "dtype": "float32", "abs_min": None, "abs_min_rank": None,
        "abs_max": None, "abs_max_rank": None, "state": "nan", "state_rank": 1,
    }  # fmt: skip
    assert of_batch(run, 5, 0, frames=1)[0].count(" Linear\n") == 1

    forget(run, "envelopes", "batch = 5")
    text, told = of_batch(run, 5, 0)
    assert text.endswith("the nearest stored: 3 and 7; the envelope over all ranks is not stored either\n")
    assert told["envelope"] == []


def test_an_unknown_batch(tmp_path: Path) -> None:
    run = records.write(tmp_path / "train-1", records.part(0, *two(0)), records.part(0, *two(1)), *OVER, world_size=2)
    forget(run, "summaries", "batch = 0")
    for of, number, complaint in (
        (0, 2, "nothing is on record of batch 2 of rank 0: its last is batch 1; kept as sent are 1"),
        (1, 2, "nothing is on record of batch 2 of rank 1: none of this rank is kept as sent"),
        (2, 0, "no rank 2: run train-1 has ranks 0 to 1"),
    ):
        with pytest.raises(UsageError, match=complaint):
            of_batch(run, number, of)
    with pytest.raises(UsageError, match="no rank 7: run train-1 has ranks 0 to 1"):
        of_rank(run, 7)


def test_a_rank_that_tripped(tmp_path: Path) -> None:
    many = [records.part(1, *two(number, 10.0), step=number, ended=10.0 + number) for number in range(12)]
    noticed = Entry(1.0, 1, messages.Noticed(5, makers.notice(batch=11)))
    run = records.write(
        tmp_path / "train-1",
        records.part(0, *two(0)),
        *many,
        Entry(1.0, 0, messages.Noticed(5, makers.notice(module="of another rank"))),
        noticed,
        records.tripped(1, *two(11)[1:], *two(12, INF)[:1], step=12),
        Entry(2.0, NO_RANK, Desynced((FLIPPED, replace(FLIPPED, parameter="of another rank", ranks=(0,))), 0)),
        Entry(2.5, 1, messages.Bye(30, "aborted", "")),
        *OVER[1:],
    )
    text, told = of_rank(run, 1)
    lines = text.splitlines()
    at = lines.index("rankwatch: rank 1 of 2 (node0, local rank 1) of run train-1")
    assert lines[at + 1 : at + 4] == ["  process    101 on node0", "  state      aborted", "  machine    torch 2.13.0"]
    assert "  batches    the last is batch 12" in lines
    assert "  stored     batches 0-11 as the rank sent them" in lines
    assert "of another rank" not in text
    assert "  noticed    rank 1: next to overflow: layer (Linear), output: abs max 4,090" in text
    at = lines.index("batch  step  seconds  frames   headroom  in")
    assert lines[at + 1] == "    2     2        1       2  x6.55e+03  layer (Linear), output"
    assert lines[at + 10].startswith("   11    11")
    assert lines[at + 11 : at + 13] == ["", "rankwatch: rank 1 of 2 (node0, local rank 1) of run train-1"]
    assert lines[at - 4 : at] == [f"{'layer':>23} Linear", "5.00e-01 3.00e+00 weight", "5.00e-01      inf output", ""]
    whats = [line[2:13].strip() for line in lines if line.startswith("  ") and line[2] != " "]
    assert whats.index("noticed") < whats.index("tripped")  # it is the verdict that stays on the screen
    assert of_rank(run, 1, frames=1)[0].count(" Model\n") == 0
    assert (told["rank"], told["state"], told["pid"], told["standing"]) == (1, "aborted", 101, None)
    assert (told["trip"]["batch"], told["trip"]["reading"], len(told["trip"]["frames"])) == (12, "output", 2)
    assert [part["batch"] for part in told["batches"]] == list(range(2, 12))
    assert told["batches_as_sent"] == list(range(12))
    assert [notice["rank"] for notice in told["notices"]] == [1]
    assert "replicas   rank 1 of 2 (node0): layers.3.weight differs from the other 2 since step 9, equal at step 8; " in text
    assert [one["parameter"] for one in told["desync"]] == ["layers.3.weight"]


def test_a_rank_that_looked_closer(tmp_path: Path) -> None:
    looked = Entry(2.0, 1, messages.LookedCloser(20, makers.closeup(is_eager=False)))
    run = records.write(
        tmp_path / "train-1",
        *(records.part(rank, *two(0)) for rank in (0, 1)),
        records.tripped(1, *two(1, INF)[:1]),
        looked,
        *OVER[1:],
    )
    text, told = of_rank(run, 1)
    assert "  operator   aten.exp at model.py:87, in forward: e = torch.exp(scores)\n" in text
    assert "  recurs     recurred 3 of 3\n" in text
    assert f"  replay     rankwatch replay {run}\n" in text
    assert (told["closeup"]["source"]["line"], told["capsule"]) == (87, "capsule")
    assert of_rank(run, 0)[1]["closeup"] is None


def test_a_culprit_and_one_that_was_not_the_first(tmp_path: Path) -> None:
    run = records.write(
        tmp_path / "train-1",
        *(records.part(rank, *two(0)) for rank in (0, 1)),
        records.tripped(0, *two(1), *two(1, INF)[1:]),
        records.tripped(1, *two(1, INF)[:1]),
        *OVER[1:],
    )
    assert "  tripped    the culprit, batch 1 (optimizer step 0), frame 0 of 2\n" in of_rank(run, 1)[0]
    assert "  cause      overflow: " in of_rank(run, 1)[0]
    other = of_rank(run, 0)[0]
    assert "  tripped    beside the culprit, rank 1, batch 1 (optimizer step 0), frame 1\n" in other
    assert "  cause" not in other


def test_a_running_rank_and_one_that_never_connected(tmp_path: Path) -> None:
    run = records.write(tmp_path / "train-1", records.part(0, *two(3)), world_size=1)
    standing = RankStanding(0, RankState.RUNNING, 4, 0, 7, "backward", 0.5, 1.5, "", 3, 0)
    records.add(run, shown=standings.shown(standing))
    text, told = of_rank(run, 0)
    assert "  state      running\n" in text
    assert "  position   batch 4, frame 7, phase backward; moved 1.5 s ago; heard 0.5 s ago\n" in text
    assert told["standing"]["phase"] == "backward"

    lonely = records.write(tmp_path / "train-2", connected=[0])
    assert of_rank(lonely, 1)[0] == "rankwatch: rank 1 of 2 of run train-2\n  state      missing: it never connected\n"
    with pytest.raises(UsageError, match="nothing is on record of batch 0 of rank 1: this rank never connected"):
        of_batch(lonely, 0, 1)


def test_a_rank_of_a_stall_has_its_own_stack(tmp_path: Path) -> None:
    run = records.write(tmp_path / "train-1", records.part(0, *two(3)), records.part(1, *two(2)), world_size=3)
    found = records.read(run / FILE, lambda record: details.of_rank(record, 1))
    stacks = (RankStack(1, "train.py:20 in load", ("main thread",)), RankStack(0, "all_reduce", ("main thread",)))
    stall = Stall((1,), (0,), "rank 1 stalled: no progress for 300 s; rank 0 waits", 1, 1)
    report = replace(found.report, stall=stall, stacks=stacks)
    text = rank.render(replace(found, report=report), 5)
    assert "  stalled    rank 1 stalled: no progress for 300 s; rank 0 waits\n" in text
    assert "  stacks     rank 1 is in train.py:20 in load\n               main thread\n" in text
    assert "all_reduce" not in text
    assert "not asked" not in text
    other = replace(found, report=report, row=report.ranks[2], trip=None)
    assert "stalled" not in rank.render(other, 5)


def test_digests_whose_table_was_dropped(tmp_path: Path) -> None:
    run = records.write(tmp_path / "train-1", records.part(0, *two(3)), *OVER, limits=replace(Limits(), tables=1))
    text, told = of_batch(run, 3)
    assert "  headroom   x6.55e+04 in a reading whose frame table is not stored\n" in text
    assert told["digests"][0]["nearest"] is None
