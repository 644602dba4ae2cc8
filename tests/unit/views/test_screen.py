"""The report on a screen: short, whatever is known, and without what is as it should be."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import makers
from makers import notice
from rankwatch.shared.system.on_terminal import wrapped
from rankwatch.shared.types.trip import Cause
from rankwatch.shared.words.text import format_head
from rankwatch_monitor.decide.core.report import Outcome, RankNotice, RankStack, RankState, Report
from rankwatch_monitor.decide.ending.course import Course, LossAt
from rankwatch_monitor.decide.ending.judgement import Doubt, Signs
from rankwatch_monitor.decide.replicas.desync import Compared
from rankwatch_monitor.decide.trip.began import TripOrigin
from rankwatch_monitor.views import screen
from rankwatch_monitor.views import text as as_text
from unit.views.test_report import CULPRIT, report, verdict

BRIEFLY = replace(verdict(), cause=Cause.OVERFLOW, evidence="input[mask] was inf")
RECORD = "rankwatch report /home/ann/rankwatch-runs/train-0 --all"
COURSE = Course(12.3, 4.0, LossAt(0, 2.4, 8), LossAt(149, 0.0712, 8), None, None, 149, began=1.7e9)
WORDS = st.text("ab ;:.", min_size=1, max_size=400)


def rows(text: str) -> int:
    return len(wrapped(text, screen.COLUMNS).rstrip("\n").split("\n"))


def on_screen(of: Report) -> str:
    return as_text.render_head(of, RECORD)


def crowded(of: Report, evidence: str, reason: str) -> Report:
    """All that can be told at once."""
    found = None if of.verdict is None else replace(of.verdict, evidence=evidence, also=verdict(6, 7).also)
    notices = tuple(RankNotice(rank, notice(module=CULPRIT.frame.spec.module)) for rank in range(8))
    ranks = tuple(replace(row, state=RankState.LOST, farewell="x" * 200, dropped=3) for row in of.ranks)
    stacks = tuple(RankStack(rank, "all_reduce of 1 float32", ("main thread", "  a.py:1 in f")) for rank in range(8))
    return replace(
        of, verdict=found, reason=reason, notices=notices, ranks=ranks, stacks=stacks, course=COURSE,
        closeup=makers.closeup(note=evidence), handed=evidence, why_not_skipped=reason, folder="/home/ann/rankwatch-runs/train-0",
    )  # fmt: skip


@settings(max_examples=100, derandomize=True, deadline=None)
@given(evidence=WORDS, reason=WORDS, outcome=st.sampled_from([Outcome.LOST, Outcome.FAILED, Outcome.STALLED]))
def test_it_is_short_whatever_is_known(evidence: str, reason: str, outcome: Outcome) -> None:
    for of, most in (
        (report(verdict()), screen.OF_A_VERDICT),
        (report(None, outcome), screen.OF_AN_END),
    ):
        shown = on_screen(crowded(of, evidence, reason))
        title = rows(shown.partition("\n  ")[0])
        assert rows(shown) <= max(most, title + 6)  # the first line stands, however long
        assert shown.endswith(f"  record     {RECORD}\n")


def test_a_usual_verdict_fits_and_says_what_who_where_why_what_to_do_and_how_far() -> None:
    of = replace(report(BRIEFLY), course=COURSE, closeup=makers.closeup(note="", is_eager=False), folder="/runs/train-0")
    shown = on_screen(of)
    assert rows(shown) <= screen.OF_A_VERDICT
    titles = [line[2:12].strip() for line in shown.splitlines()[1:] if line[2] != " "]
    assert titles == ["culprit", "operator", "cause", "try", "precision", "abort", "state", "replay", "record"]
    assert "  state      150 batches, loss 2.4 -> 0.0712; 12.3 s, 2023-11-14 22:13 UTC\n" in shown


def test_what_is_as_it_should_be_is_not_shown_but_in_the_whole_report() -> None:
    rest = tuple(replace(row, acknowledged=True) for row in report(None).ranks)
    of = replace(
        report(verdict(), ranks=rest, closeup=makers.closeup(note="", is_eager=False)),
        compared=Compared(37, 146, 8, 38, True), origin=TripOrigin(None, 25, 8),
    )  # fmt: skip
    usual = ("recurs", "began", "replicas", "certainty", "abort")
    shown, whole = on_screen(of), as_text.render_head(of)
    assert [label for label in usual if f"\n  {label} " in shown] == []
    assert [label for label in usual if f"\n  {label} " in whole] == list(usual)


@pytest.mark.parametrize(
    ("of", "told"),
    [
        (report(BRIEFLY, closeup=makers.closeup(recurred=1, note="", is_eager=False)), "recurs     recurred 1 of 3"),
        (report(replace(verdict(missing=1), evidence="it was inf")), "certainty  partial"),
        (report(BRIEFLY), "abort      7 of 8"),
        (report(BRIEFLY, compared=Compared(37, 146, 8, 38, False)), "replicas   not equal"),
    ],
)
def test_what_is_not_as_it_should_be_is_shown(of: Report, told: str) -> None:
    assert f"\n  {told}" in on_screen(of)


LONG = "weight was already nan before this forward; look at the gradients and at the optimizer step of batch 148; " * 2


AWS = "ip-10-0-12-123.us-west-2.compute.internal"
POD = "train-llama-70b-pretrain-worker-0012"
HOSTS = [
    ("node0", "node0"),
    (AWS, "ip-10-0-12-123"),
    ("10.0.12.123", "10.0.12.123"),
    (POD, "...ma-70b-pretrain-worker-0012"),
]


@pytest.mark.parametrize(("host", "name"), HOSTS)
def test_a_screen_has_the_same_fields_whatever_its_host_is_called(host: str, name: str) -> None:
    of = replace(verdict(missing=1), evidence=LONG, reason="rank 7 closed its watch after batch 3, as its process said")
    looked = makers.closeup(note="", is_eager=False)
    found = report(of, course=COURSE, closeup=looked, folder="/runs/train-0")
    shown = on_screen(replace(found, ranks=tuple(replace(row, host=host) for row in found.ranks)))
    assert f"\n  culprit    rank 5 of 8 ({name}, local rank 1), step 37\n" in shown
    assert rows(shown) <= screen.OF_A_VERDICT
    assert shown.partition("\n  operator")[2] == on_screen(found).partition("\n  operator")[2]
    assert "\n  certainty  partial: 7 of 8 ranks answered; " in shown


@settings(derandomize=True, deadline=None)
@given(
    host=st.text("abc0123.-", min_size=1, max_size=64), step=st.integers(0, 10**9), stage=st.integers(0, 99),
    world_size=st.integers(8, 10**5),
)  # fmt: skip
def test_the_culprit_takes_one_row(host: str, step: int, stage: int, world_size: int) -> None:
    of = verdict()
    trip = replace(of.trip, optimizer_step=step)
    ranks = tuple(replace(row, host=host, stage=stage) for row in report(of).ranks)
    shown = on_screen(replace(report(replace(of, trip=trip)), ranks=ranks, world_size=world_size))
    (culprit,) = [line for line in shown.splitlines() if line.startswith("  culprit ")]
    assert len(culprit) <= screen.COLUMNS
    assert culprit.endswith(f", local rank 1, stage {stage}), step {step}")


def test_a_field_that_was_cut_is_whole_again_once_others_have_made_room() -> None:
    fields = [("culprit", "rank 5"), ("cause", LONG), ("close-up", LONG), ("record", RECORD)]
    assert screen.fitted("first nan", fields, 7) == format_head("first nan", [fields[0], fields[1], fields[3]])
    assert "optimizer step of batch 148" not in screen.fitted("first nan", fields, 4)


def test_a_crowded_screen_has_the_end_of_a_long_path() -> None:
    path = f"/home/{'folder/' * 12}job/train.py:31"
    fields = [("culprit", "rank 5"), ("operator", f"aten.log at {path}, in forward: h = torch.log(x)"), ("cause", LONG)]
    assert "\n  operator   aten.log at .../job/train.py:31, in" in screen.fitted("first nan", fields, 6)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_path_that_is_longer_than_a_row_has_no_space_in_it(rows: int) -> None:
    path = f"/home/{'folder/' * 12}train.py:31"
    shown = screen.clip(f"aten.log at {path}, in forward:\n h = torch.log(x)  of the loss {'and more ' * 40}", rows)
    assert shown.endswith(screen.MORE)
    assert path.startswith(shown.partition("aten.log at ")[2].removesuffix(screen.MORE)) or f"aten.log at {path}," in shown


def test_the_first_line_of_a_failure_stands_alone_and_says_it_once() -> None:
    said = "rank 1 of 8 (node0, local rank 1) failed: KeyError: 'x', at train.py:4 in load"
    shown = on_screen(report(None, Outcome.FAILED, reason=f"{said}; rank 0 waits for it"))
    once = said.replace(" failed: ", ": ")
    assert shown.startswith(f"rankwatch: run train-0 failed: {once}\n  reason     rank 0 waits for it\n")


def test_a_training_that_went_badly_has_its_learning_rates_and_what_was_written() -> None:
    rates = "rates: SGD (group 0) 0.1 in batch 0, 30 in batch 200; SGD (group 1) 0.1 in batch 0"
    made_with = rates, "written: after the step of batch 199", "wandb: https://w"
    well = report(None, Outcome.FINISHED, made_with=made_with, course=COURSE)
    assert "rates" not in on_screen(well)
    grown = Signs(reasons=(Doubt("loss-grown", 200, "the loss has grown"),))
    badly = on_screen(replace(well, course=COURSE._replace(signs=grown)))
    assert "  rates      SGD (group 0) 0.1 in batch 0, 30 in batch 200\n             SGD (group 1) 0.1 in batch 0\n" in badly
    assert "  written    after the step of batch 199\n" in badly
    assert "wandb" not in badly
    assert "  wandb      https://w\n" in as_text.render(well)


def test_the_state_of_an_end_has_the_file_that_was_saved_last() -> None:
    lost = report(None, Outcome.LOST, made_with=("saved: /data/run/step-50.pt, after batch 49",), course=COURSE)
    shown = on_screen(replace(lost, reason="rank 1 was lost"))
    assert re.search(r"  state      \d+ batches; last saved step-50.pt, after batch 49; .*UTC\n", shown)
    assert "  saved      /data/run/step-50.pt, after batch 49\n" in as_text.render(lost)


def test_lines_that_do_not_all_fit_are_told_in_a_row() -> None:
    long, short = "rank 0 is in all_reduce " + "of a tensor " * 20, "rank 1 is in barrier"
    assert screen.clip(f"{short}\n{short}", 2) == f"{short}\n{short}"
    assert screen.clip(f"{short}\n{short}", 1) == f"{short}; {short}"
    assert screen.clip(f"{short}\n{long}", 2).startswith(f"{short}; rank 0 is in all_reduce")
    assert screen.clip(f"{short}\n{long}", 2).endswith(screen.MORE)
