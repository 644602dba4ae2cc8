"""The report as text and as JSON, from the same data."""

from __future__ import annotations

import json
from dataclasses import replace

import makers
from makers import INF, NAN, frame, gpu, notice, reading, trip
from rankwatch.shared.types.closeup import CloseUp, Precision
from rankwatch.shared.types.frame import Moment, Phase, State
from rankwatch.shared.types.notice import NoticeKind
from rankwatch.shared.types.trip import Cause
from rankwatch.shared.words.text import name_spans
from rankwatch_monitor.decide.core.report import End, Outcome, RankNotice, RankRow, RankState, Report
from rankwatch_monitor.decide.replicas.desync import WORDS, Compared, Desync, DesyncPattern
from rankwatch_monitor.decide.trip.verdict import Liveness, Verdict, Witness, elect
from rankwatch_monitor.views import as_json
from rankwatch_monitor.views import text as as_text

CULPRIT = trip(
    reading("input[0]", 6.27e4, dtype="float16"),
    reading("input[mask]", INF),
    reading("output", INF, low=0.0, dtype="float16"),
    at=(149, 0, 412),
    before=(frame(reading("output", 285.0), at=(149, 0, 411), module="decoder.wo"),),
    module="decoder.block.2.dropout",
    step=37,
)

AT = Moment(CULPRIT.optimizer_step, *CULPRIT.position)
PAST = Moment(CULPRIT.optimizer_step + 1, *CULPRIT.position)


def verdict(*also: int, missing: int = 0) -> Verdict:
    witnesses = {rank: Witness(Liveness.DONE, PAST, None) for rank in range(8 - missing)}
    witnesses[5] = Witness(Liveness.LIVE, AT, CULPRIT)
    for rank in also:
        witnesses[rank] = Witness(Liveness.LIVE, AT, CULPRIT)
    found, _ = elect(witnesses, 8, since_first_trip=9.0, window=2.0)
    assert found is not None
    return found


def report(of: Verdict | None, outcome: Outcome = Outcome.ABORTED, **changes: object) -> Report:
    rows = tuple(
        RankRow(rank, rank % 4, f"node{rank // 4}", 100 + rank, 149, RankState.ABORTED, rank != 2, 0, "")
        for rank in range(8)
    )
    plain = Report("train-0", "train", 0, 8, outcome, "", of, frames_in_batch=618, acknowledged_in=0.041, ranks=rows)
    return replace(plain, **changes)  # type: ignore[arg-type]


FRAMES = (
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
TITLE = "rankwatch: first inf in run train-0: rank 5, batch 149, decoder.block.2.dropout, output (upstream)\n"
WHY_AND_DO = (
    "  cause      upstream: input[mask] was inf and no watched module made it: it was born between modules, "
    "after decoder.wo (Linear), the last finite frame\n"
    '  try        rankwatch.detect_overflow(x, "name") after each step of the code that leads to decoder.block.2.dropout: '
    "which one makes it?\n"
)
HEAD = (
    f"{TITLE}  culprit    rank 5 of 8 (node1, local rank 1), batch 149 (optimizer step 37), frame 412 of 618\n"
    f"             decoder.block.2.dropout (Linear), output: inf\n{WHY_AND_DO}"
    "  certainty  complete: 8 of 8 ranks answered; the other 7 were finite here\n"
    "  abort      7 of 8 ranks acknowledged in 0.04 s\n"
)


def test_the_verdict_stands_below_the_frames() -> None:
    assert as_text.render(report(verdict())) == f"{FRAMES}\n{HEAD}"


def test_a_report_on_the_screen_has_the_last_frames_and_the_way_to_the_record() -> None:
    text = as_text.render(report(verdict()), frames=1, record="rankwatch report runs/train-0")
    frames, head = text.split("\n\n")
    assert "Last 1 forward frames:" in frames
    assert "decoder.wo" not in frames
    culprit = "  culprit    rank 5 of 8 (node1, local rank 1), step 37\n"
    abort = "  abort      7 of 8 ranks acknowledged in 0.04 s\n"  # the others are as they should be
    assert head == f"{TITLE}{culprit}{WHY_AND_DO}{abort}  record     rankwatch report runs/train-0\n"


def test_a_run_without_a_verdict_has_the_way_to_its_record_too() -> None:
    for outcome in (Outcome.FINISHED, Outcome.LOST):
        text = as_text.render(report(None, outcome), frames=1, record="rankwatch report runs/train-0")
        assert text.endswith("  record     rankwatch report runs/train-0\n")


EVIDENCED = replace(CULPRIT, operator=makers.made_by(), closeup_within=2.0)


def looked_at(of: CloseUp | None) -> Report:
    return report(replace(verdict(), trip=EVIDENCED), closeup=of, folder="runs/train-0")


def test_the_closeup_stands_around_the_cause_and_the_command_at_the_end() -> None:
    found = makers.closeup(is_eager=False)
    head = as_text.render_head(looked_at(found))
    titles = [line[2:12].strip() for line in head.splitlines()[1:]]
    in_order = "culprit operator cause try recurs precision close-up certainty abort replay"
    assert [title for title in titles if title] == in_order.split()
    assert (
        "  operator   aten.exp at model.py:87, in forward: e = torch.exp(scores)\n"
        "             self (2, 3) float32, abs max 1,000 -> inf\n"
    ) in head
    assert "  recurs     recurred 3 of 3\n" in head
    assert head.endswith("  replay     rankwatch replay runs/train-0\n")


def test_a_closeup_that_never_came_is_said_to_be_missing() -> None:
    head = as_text.render_head(looked_at(None))
    assert "  operator   aten.exp at model.py:87" in head  # the trip alone names it
    assert "  close-up   rank 5 announced one within 2 s, and none has arrived\n" in head
    parsed = as_json.to_dict(looked_at(None))["verdict"]["closeup"]
    assert [parsed[name] for name in ("operator", "recurred", "of", "precision")] == ["aten.exp.default", None, None, {}]
    assert parsed["note"] == "rank 5 announced one within 2 s, and none has arrived"


def test_the_closeup_for_programs() -> None:
    parsed = json.loads(as_json.render(looked_at(makers.closeup())), parse_constant=lambda name: 1 / 0)["verdict"]
    assert parsed["closeup"] == {
        "operator": "aten.exp.default",
        "node": None,
        "module": None,
        "source": {"file": "model.py", "line": 87, "function": "forward", "text": "e = torch.exp(scores)"},
        "inputs": [{"label": "self", "shape": [2, 3], "dtype": "float32", "abs_max": 1000.0, "state": "finite"}],
        "recurred": 3,
        "of": 3,
        "eager": True,
        "precision": {"float32": {"state": "finite", "abs_max": 1.2e5}, "float64": {"state": "inf", "abs_max": None}},
        "machine": "gpu07, NVIDIA H100, GPU-5f3a, PCI 00000000:3B:00.0, driver 550.54",
        "note": "not run again in bfloat16: out of memory",
        "rank": 5,
    }
    assert parsed["capsule"] == "capsule"
    assert list(parsed["closeup_text"]) == ["operator", "recurs", "precision", "close-up", "replay"]


def test_without_a_closeup_its_names_are_null() -> None:
    parsed = as_json.to_dict(report(verdict()))["verdict"]
    assert (parsed["closeup"], parsed["capsule"], parsed["closeup_text"]) == (None, None, {})


def test_a_capsule_on_another_disk_names_its_host() -> None:
    assert as_text.render_head(looked_at(makers.closeup(capsule="/tmp/capsule"))).endswith(
        "  replay     rankwatch replay /tmp/capsule (on node1)\n"
    )


def test_numbers_of_a_rank_that_json_does_not_have_are_null() -> None:
    operator = replace(makers.made_by(), inputs=(reading("self", NAN), reading("other", INF)), shapes=())
    found = makers.closeup(operator=operator, precision=(Precision("float32", State.FINITE, INF),))
    parsed = json.loads(as_json.render(looked_at(found)), parse_constant=lambda name: 1 / 0)["verdict"]["closeup"]
    inputs = [(one["abs_max"], one["state"], one["shape"]) for one in parsed["inputs"]]
    assert inputs == [(None, "nan", None), (None, "inf", None)]
    assert parsed["precision"] == {"float32": {"state": "finite", "abs_max": None}}


KILLED = report(None, Outcome.LOST, reason="rank 7 was lost", end=End.LOST)
KILLED = replace(KILLED, ranks=tuple(replace(row, state=RankState.LOST) if row.rank > 3 else row for row in KILLED.ranks))


def test_what_a_program_can_do_next() -> None:
    assert as_json.to_dict(report(verdict(), end=End.VERDICT))["advice"] == {
        "action": "fix-code",
        "hosts": [],
        "reason": "upstream in batch 149 of rank 5: the code or its settings make it, so a restart comes to it again",
    }
    assert as_json.to_dict(report(None, Outcome.FINISHED))["advice"] is None
    reason = "ranks 4-7 were lost, and no rank of another host: its machine is suspected"
    assert as_json.to_dict(KILLED)["advice"] == {"action": "restart-elsewhere", "hosts": ["node1"], "reason": reason}
    assert f"  next       restart-elsewhere without node1: {reason}\n" in as_text.render(KILLED)


def test_other_trips_and_missing_ranks_are_named() -> None:
    text = as_text.render(report(verdict(6, missing=1)))
    assert "  also       rank 6 at the same frame: decoder.block.2.dropout (Linear), output: inf\n" in text
    assert "partial: 7 of 8 ranks answered; 5 of them were finite here; not known: rank 7" in text


def test_ranks_that_diverge_alike_have_no_culprit() -> None:
    alike = report(replace(verdict(6), cause=Cause.DIVERGENCE, evidence="the loss left its range on all ranks"))
    text = as_text.render(alike)
    assert "  culprit    no single rank, batch 149 (optimizer step 37), frame 412 of 618\n" in text
    assert "  cause      divergence: the loss left its range on all ranks\n" in text
    assert "  also       rank 5 at the same frame: " in text
    assert "             rank 6 at the same frame: " in text
    parsed = as_json.to_dict(alike)["verdict"]
    assert [parsed[name] for name in ("rank", "local_rank", "host", "stage")] == [None] * 4
    assert [other["rank"] for other in parsed["also"]] == [5, 6]


def test_a_rank_that_trains_unwatched_is_named_while_the_run_goes_on() -> None:
    going = report(None)
    rows = [replace(row, state=RankState.RUNNING) for row in going.ranks]
    rows[3] = replace(rows[3], farewell="switched itself off in batch 3 by an error of its own: KeyError('x')")
    text = as_text.render_so_far(replace(going, ranks=tuple(rows)))
    assert "  unwatched  rank 3 of 8 (node0, local rank 3) switched itself off in batch 3 by an error of its own" in text


def test_the_stages_of_a_pipeline_are_named() -> None:
    witnesses = {rank: Witness(Liveness.LIVE, Moment(0, 149, 0, 999), None, rank, 149) for rank in range(8)}
    witnesses[5] = witnesses[5]._replace(trip=CULPRIT)
    witnesses[6] = witnesses[6]._replace(trip=trip(at=(149, 0, 2)))
    found, reason = elect(witnesses, 8, since_first_trip=9.0, window=2.0)
    of = report(found)
    of = replace(of, ranks=tuple(replace(row, stage=row.rank) for row in of.ranks))
    text = as_text.render(of)
    assert "culprit    rank 5 of 8 (node1, local rank 1, stage 5), batch 149" in text
    assert "also       rank 6 (stage 6) at frame 2: layer (Linear), output: inf" in text
    assert "8 of 8 ranks answered; 7 of them were finite before it" in text
    assert reason == "every rank has passed this frame of stage 5 or tripped itself"
    parsed = as_json.to_dict(of)
    assert (parsed["verdict"]["stage"], parsed["verdict"]["also"][0]["stage"], parsed["ranks"][3]["stage"]) == (5, 6, 3)
    assert as_json.to_dict(report(found))["verdict"]["stage"] is None


def test_strict_json_without_nan_or_infinity() -> None:
    parsed = json.loads(as_json.render(report(verdict(6))), parse_constant=lambda name: 1 / 0)
    assert parsed["schema"] == 1
    assert parsed["run"] == {"id": "train-0", "job": "train", "restart": 0, "world_size": 8}
    assert parsed["outcome"] == "aborted"
    expected = {
        "rank": 5, "local_rank": 1, "host": "node1", "batch": 149, "optimizer_step": 37, "frame": 412,
        "module": "decoder.block.2.dropout", "module_class": "Linear", "reading": "output", "state": "inf",
        "dtype": "float16", "certainty": "complete", "missing_ranks": [],
    }  # fmt: skip
    assert {key: parsed["verdict"][key] for key in expected} == expected
    assert parsed["verdict"]["also"][0]["rank"] == 6
    assert parsed["frames"][1]["readings"][2] == {
        "label": "output", "kind": "output", "dtype": "float16", "abs_min": 0.0, "abs_max": None, "state": "inf",
    }  # fmt: skip
    assert parsed["ranks"][5] == {
        "rank": 5, "local_rank": 1, "host": "node1", "gpu": None, "torch": None, "stage": None, "pid": 105, "last_batch": 149,
        "state": "aborted", "acknowledged": True, "dropped": 0, "farewell": "", "farewell_at": "", "farewell_text": "",
        "rival": "", "memory": "", "leaked": False,
    }  # fmt: skip


def test_the_gpu_of_a_rank() -> None:
    of = report(verdict(6))
    of = replace(of, ranks=tuple(replace(row, gpu=gpu(row.rank), torch="2.13.0") for row in of.ranks))
    parsed = as_json.to_dict(of)
    named = {"name": "NVIDIA H200", "uuid": "GPU-5f3a0005", "bus": "0000:05:00.0", "driver": "550.54.15"}
    assert (parsed["ranks"][5]["gpu"], parsed["ranks"][5]["torch"], parsed["verdict"]["gpu"]) == (named, "2.13.0", named)


def test_a_nan_is_null_and_its_state_says_so() -> None:
    bad = trip(reading("output", NAN))
    found, _ = elect({0: Witness(Liveness.LIVE, AT, bad)}, 1, 0.0, 2.0)
    parsed = as_json.to_dict(report(found))
    assert parsed["frames"][0]["readings"][0]["abs_min"] is None
    assert parsed["frames"][0]["readings"][0]["state"] == "nan"


def test_runs_without_a_verdict() -> None:
    finished = report(None, Outcome.FINISHED)
    assert as_text.render(finished) == "rankwatch: run train-0 finished: 8 ranks, 150 batches, no inf or nan\n"
    failed = as_text.render(report(None, Outcome.FAILED, reason="rank 1 of 8 failed: KeyError"))
    assert failed.startswith("rankwatch: run train-0 failed: rank 1 of 8: KeyError\n  batches")
    assert makers.INF not in as_json.to_dict(finished).values()


def test_each_of_several_failed_ranks_says_why() -> None:
    whole = report(None, Outcome.FAILED, reason="rank 1 of 8 failed: KeyError: 'x', at train.py:4 in load")
    rows = [replace(row, state=RankState.FAILED, farewell="OSError: gone") for row in whole.ranks]
    rows[1] = replace(rows[1], farewell="KeyError: 'x'", farewell_at="train.py:4 in load")
    told = "ranks 0, 2-7: OSError: gone\n             rank 1: KeyError: 'x', at train.py:4 in load\n"
    assert told in as_text.render(replace(whole, ranks=tuple(rows)))
    alone = [row if row.rank == 1 else replace(row, state=RankState.ABORTED) for row in rows]
    assert "  failed     rank 1\n  batches" in as_text.render(replace(whole, ranks=tuple(alone)))


def test_unrecorded_batches_and_refused_peers_are_reported() -> None:
    whole = report(None, Outcome.FINISHED)
    rows = list(whole.ranks)
    rows[3] = replace(rows[3], dropped=5)
    rows[4] = replace(rows[4], dropped=1)
    rows[6] = replace(rows[6], rival="process 9 on node7")
    assert as_text.render(replace(whole, ranks=tuple(rows))) == (
        "rankwatch: run train-0 finished: 8 ranks, 150 batches, no inf or nan\n"
        "  dropped    6 batches of ranks 3, 4: the collector was out of reach, or too slow, for longer than they could wait\n"
        "  refused    process 9 on node7: rank 6 was there already\n"
    )


def test_a_run_whose_watch_was_off_is_not_said_to_be_without_a_nan() -> None:
    whole = report(None, Outcome.FINISHED)
    rows = [replace(row, farewell="switched itself off in batch 3" if row.rank == 2 else "") for row in whole.ranks]
    head, fault = as_text.render(replace(whole, ranks=tuple(rows))).splitlines()
    assert head == "rankwatch: run train-0 finished: 8 ranks, 150 batches, not watched to its end"
    assert "rank 2 of 8" in fault
    assert fault.endswith("switched itself off in batch 3")


def test_a_harmless_loss_is_no_lie_about_a_nan() -> None:
    whole = report(None, Outcome.FINISHED)
    harmless = RankNotice(1, notice(NoticeKind.HARMLESS_LOSS, module="", label="loss", why="nan, as aten.mean is nan"))
    head = as_text.render(replace(whole, notices=(harmless,))).splitlines()[0]
    assert head == "rankwatch: run train-0 finished: 8 ranks, 150 batches, no inf or nan but in a loss, harmless"


def test_a_harmless_measure_is_not_called_a_loss() -> None:
    whole = report(None, Outcome.FINISHED)
    measure = notice(NoticeKind.HARMLESS_LOSS, module="accuracy", module_class="Share", label="output", why="nan")
    harmless = RankNotice(1, measure)
    head = as_text.render(replace(whole, notices=(harmless,))).splitlines()[0]
    assert head == "rankwatch: run train-0 finished: 8 ranks, 150 batches, no inf or nan but in what harmed nothing"


NEAR, FAR = notice(module="wo"), notice(module="wi", growth=0.25)
ZEROS = notice(NoticeKind.ZEROS, module="wi", label="weight.grad", since=4, value=0.5, growth=0.1)
NOTICES = tuple(
    RankNotice(rank, told) for told, ranks in ((NEAR, (0, 1, 2, 3)), (FAR, (7,)), (ZEROS, (0, 2, 3))) for rank in ranks
)


def test_notices_stand_below_what_to_do_with_one_line_for_each_reading() -> None:
    text = as_text.render(report(verdict(), notices=NOTICES))
    assert (
        "which one makes it?\n"
        "  noticed    ranks 0-3: next to overflow: wo (Linear), output: abs max 4,090 in batch 12 is 6% of float16's "
        "largest number and grows by x2 a batch: about 4 batches are left\n"
        "             rank 7: next to overflow: wi (Linear), output: abs max 4,090 in batch 12 is 6% of float16's "
        "largest number and grows by x1.19 a batch: about 16 batches are left\n"
        "             ranks 0, 2-3: underflow: wi (Linear), weight.grad: 50% of the elements are zero in batch 12, "
        "a share that grows since batch 4\n"
        "  certainty  "
    ) in text


def test_where_ranks_differ_the_line_says_whose_numbers_it_has() -> None:
    told = report(None, notices=(RankNotice(1, NEAR), RankNotice(0, replace(NEAR, value=2000.0))))
    (line,) = as_text.noticed(told).values()
    assert line.startswith("ranks 0-1 (worst: rank 1): next to overflow: wo (Linear), output: abs max 4,090")


def test_a_run_without_a_verdict_shows_its_notices_too() -> None:
    finished = as_text.render(report(None, Outcome.FINISHED, notices=NOTICES[4:5]))
    assert finished == (
        "rankwatch: run train-0 finished: 8 ranks, 150 batches, no inf or nan\n"
        "  noticed    rank 7: next to overflow: wi (Linear), output: abs max 4,090 in batch 12 is 6% of float16's "
        "largest number and grows by x1.19 a batch: about 16 batches are left\n"
    )
    assert "  noticed    rank 7: next" in as_text.render(report(None, Outcome.FAILED, notices=NOTICES[4:5]))


def test_of_the_notices_the_screen_has_what_bears_on_the_culprit() -> None:
    told = report(replace(verdict(), evidence="it came in so"), notices=NOTICES)
    assert "noticed" not in as_text.render(told, record="rankwatch report r")
    near = RankNotice(5, notice(module=CULPRIT.frame.spec.module))
    on_screen = as_text.render(replace(told, notices=(*NOTICES, near)), record="rankwatch report r")
    assert "  noticed    rank 5: next to overflow: decoder.block.2.dropout" in on_screen
    assert on_screen.count("next to overflow") == 1


def test_hidden_notices_are_counted_and_are_in_the_json() -> None:
    many = tuple(RankNotice(rank % 8, notice(module=f"m{rank // 8}")) for rank in range(8 * 11))
    told = report(None, Outcome.FINISHED, notices=many, notices_unkept=5)
    lines = as_text.render(told).splitlines()
    assert len([line for line in lines if "ranks 0-7: next to overflow: m" in line]) == 8
    assert lines[-2:] == ["             and 3 more: report.json has them", "             and 5 more that were not stored"]
    parsed = as_json.to_dict(told)
    assert (len(parsed["notices"]), parsed["notices_unkept"]) == (88, 5)


def test_notices_in_json() -> None:
    endless = notice(NoticeKind.UNDERFLOW, value=0.0, growth=0.0)
    parsed = json.loads(as_json.render(report(None, notices=(*NOTICES[:1], RankNotice(2, endless)))))
    assert parsed["notices"][0] == {
        "rank": 0, "kind": "headroom", "module": "wo", "module_class": "Linear", "reading": "output", "dtype": "float16",
        "since": 10, "batch": 12, "value": 4094.0, "growth": 1.0, "batches_left": parsed["notices"][0]["batches_left"],
        "why": "",
        "text": "next to overflow: wo (Linear), output: abs max 4,090 in batch 12 is 6% of float16's largest number "
        "and grows by x2 a batch: about 4 batches are left",
    }  # fmt: skip
    assert parsed["notices"][1]["batches_left"] is None
    assert as_json.to_dict(report(verdict()))["notices"] == []


def test_a_gradient_trip_with_its_loss_scale() -> None:
    bad = trip(
        reading("grad_output", 3.0, dtype="float16"), reading("weight.grad", INF, dtype="float16"),
        at=(149, 0, 500), phase=Phase.BACKWARD, loss_scale=65536.0,
    )  # fmt: skip
    found, _ = elect({0: Witness(Liveness.LIVE, AT, bad)}, 1, 0.0, 2.0)
    text = as_text.render(report(found))
    assert "frame 500 of 618\n             layer (Linear, backward), weight.grad: inf\n" in text
    assert "  cause      gradient: born in the backward of this module: " in text
    assert "; the loss scale was 65536\n" in text
    assert "Last 1 frames:" in text
    parsed = as_json.to_dict(report(found))
    assert (parsed["verdict"]["phase"], parsed["verdict"]["loss_scale"]) == ("backward", 65536.0)
    assert parsed["frames"][0]["phase"] == "backward"
    assert as_json.to_dict(report(verdict()))["verdict"]["loss_scale"] is None


def test_a_tensor_that_was_gone_has_no_counts() -> None:
    gone = replace(CULPRIT, numel=0, inf_count=0)
    found, _ = elect({0: Witness(Liveness.LIVE, AT, gone)}, 1, 0.0, 2.0)
    parsed = as_json.to_dict(report(found))["verdict"]
    assert [parsed[name] for name in ("numel", "nan_count", "inf_count")] == [None] * 3
    counted = as_json.to_dict(report(verdict()))["verdict"]
    assert [counted[name] for name in ("numel", "nan_count", "inf_count")] == [6, 0, 1]


FLIPPED = Desync(120, "layers.3.weight", (1,), 4, DesyncPattern.ONE_RANK, "gpu07", "GPU-5f3a", equal_at=104, origin=1)


def test_replicas_stand_in_the_report_of_an_overflow_and_of_a_healthy_run() -> None:
    line = "  replicas   equal at step 82 (all 146 parameters, 4 ranks), compared 83 times\n"
    compared = Compared(82, 146, 4, 83, True)
    for of, outcome in ((verdict(), Outcome.ABORTED), (None, Outcome.FINISHED), (None, Outcome.LOST)):
        assert line in as_text.render(report(of, outcome, compared=compared))
    assert line in as_text.render_so_far(report(None, compared=compared))
    assert "replicas" not in as_text.render(report(None, Outcome.FINISHED))


def test_replicas_that_differ_and_what_to_do() -> None:
    compared = Compared(140, 146, 4, 141, False)
    text = as_text.render(report(None, Outcome.FINISHED, desync=(FLIPPED,), compared=compared))
    assert "not equal at step 140" in text
    assert "1 of 8 (gpu07, GPU-5f3a): layers.3.weight differs from the other 3 since step 120, equal at step 104" in text
    assert WORDS[DesyncPattern.ONE_RANK].remedy in text
    many = tuple(replace(FLIPPED, origin=number) for number in range(20))
    assert "and 17 more: report.json" in as_text.render(report(None, Outcome.FINISHED, desync=many, desync_unkept=5))


def test_replicas_in_json() -> None:
    told = as_json.to_dict(report(None, Outcome.FINISHED, desync=(FLIPPED,), compared=Compared(140, 146, 4, 141, False)))
    (one,) = told["desync"]
    assert list(one) == ["step", "parameter", "ranks", "replicas", "pattern", "host", "gpu"]
    assert list(one.values()) == [120, "layers.3.weight", [1], 4, "one-rank", "gpu07", "GPU-5f3a"]
    assert told["replicas"] == {"step": 140, "parameters": 146, "ranks": 4, "times": 141, "equal": False}
    assert as_json.to_dict(report(None))["replicas"] is None


def test_ranks_are_named_in_spans() -> None:
    assert name_spans([3]) == "rank 3"
    assert name_spans([2, 0, 1]) == "ranks 0-2"
    assert name_spans([5, 0, 1, 9]) == "ranks 0-1, 5, 9"
    assert name_spans(list(range(0, 40, 2))) == "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 12 more"


def test_every_report_says_with_what_its_run_was_made() -> None:
    lines = ("command: train.py --lr 1e-3", "options: every=10", "commit: 1a0b0b1d, with changes", "versions: torch 2.13.0")
    for of, outcome in (
        (verdict(), Outcome.ABORTED),
        (None, Outcome.FINISHED),
        (None, Outcome.LOST),
        (None, Outcome.FAILED),
    ):
        told = report(of, outcome, made_with=lines)
        text = as_text.render(told)
        assert "\n  command    train.py --lr 1e-3\n  options    every=10\n  commit     1a0b0b1d, with changes\n" in text
        assert "\n  hosts      node0, node1\n" in text
        made_with = as_json.to_dict(told)["made_with"]
        assert (made_with["commit"], made_with["hosts"]) == ("1a0b0b1d, with changes", "node0, node1")
        assert "  command " not in as_text.render(told, record="rankwatch report r --all")
    assert as_json.to_dict(report(verdict()))["made_with"] is None
