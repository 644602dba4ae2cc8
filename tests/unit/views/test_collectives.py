"""Groups whose members do not call the same, in text, JSON, ``top``, the status line and the page's JSON."""

from __future__ import annotations

from dataclasses import replace

from desk import connected
from rankwatch.shared.types.action import Action
from rankwatch_monitor.decide.calls.differs import Callers, How, UnequalCalls
from rankwatch_monitor.decide.core.report import End, Outcome, RankState, Report, Stall
from rankwatch_monitor.decide.next.next_action import next_action
from rankwatch_monitor.serve.status import describe
from rankwatch_monitor.views import as_json, collectives
from rankwatch_monitor.views import text as as_text
from standings import shown, standing

ONE, THEIRS = Callers((0,), 1, "barrier", "train.py:88 in save"), Callers((1, 2), 2, "all_reduce", "train.py:91 in step")
DIFFERS = UnequalCalls("77", "the default group", 5128, How.MORE, (ONE, THEIRS))
AWAITED = replace(DIFFERS, how=How.AWAITED, sides=(Callers((0,), 1, "", "it is at dataset.py:40 in load"), THEIRS))


def report(**changes: object) -> Report:
    return replace(connected(3).run.report(), **changes)  # type: ignore[arg-type]


def test_each_group_is_told_once_and_few_of_many() -> None:
    told = report(collectives=tuple(replace(DIFFERS, group=str(group)) for group in range(6)), collectives_unkept=3)
    (line,) = collectives.fields(told)
    assert line[0] == "calls"
    assert line[1].split("\n")[0] == DIFFERS.text
    assert line[1].split("\n")[4:] == ["and 5 more groups: report.json has up to 6"]
    assert collectives.summary(told) == f"{DIFFERS.text} (and 8 more groups)"
    assert collectives.summary(report()) == ""


def test_what_the_reason_or_the_stall_says_is_not_said_twice() -> None:
    failed = report(collectives=(DIFFERS,), outcome=Outcome.FAILED, reason=f"rank 1 failed: gloo; {DIFFERS.text}")
    assert as_text.render(failed).count("barrier at") == 1
    stalled = report(collectives=(AWAITED,), stall=Stall((0,), (1, 2), f"rank 0 stalled; {AWAITED.elsewhere}", 1, 2))
    assert "it is at dataset.py:40" not in AWAITED.elsewhere
    assert as_text.render_so_far(stalled).count("has not called the 5,128th") == 1


def test_a_side_that_has_not_called_has_no_call_in_json() -> None:
    (told,) = as_json.to_dict(report(collectives=(AWAITED,)))["collectives"]
    assert (told["how"], told["number"], told["name"]) == ("awaited", 5128, "the default group")
    assert told["sides"][0] == {"ranks": [0], "count": 1, "site": "it is at dataset.py:40 in load", "what": None}


def test_the_status_line_counts_the_groups() -> None:
    line = describe(shown(standing(0), collectives=2), None, None, 200)
    assert line == "rankwatch: train-0  1/1 ranks running  collectives differ in 2 groups  batch 0"


def test_more_than_three_sides_and_no_odd_one() -> None:
    sides = tuple(Callers((rank,), 1, f"kind{rank}", f"a.py:{rank}") for rank in range(5))
    assert replace(DIFFERS, how=How.OTHER, sides=sides, number=1).text == (
        "ranks called different collectives: the 1st of the default group is kind0 at a.py:0 on rank 0; kind1 at a.py:1 on rank "
        "1; kind2 at a.py:2 on rank 2; it was the first one"
    )


def test_code_that_calls_different_collectives_is_not_started_again() -> None:
    words = "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer"
    failed = report(outcome=Outcome.FAILED, end=End.FAILED)
    rows = [replace(row, state=RankState.FAILED, farewell=words, left=row.rank + 1) for row in failed.ranks]
    failed = replace(failed, ranks=rows)
    advice = [next_action(replace(failed, collectives=found)) for found in ((), (AWAITED,), (DIFFERS,))]
    assert [one.action for one in advice if one is not None] == [Action.RESTART, Action.RESTART, Action.FIX_CODE]
    stalled = next_action(replace(failed, end=End.STALL, collectives=(DIFFERS,)))
    assert stalled is not None
    assert stalled.reason == (
        "ranks call different collectives from the 5,128th of the default group on, barrier at train.py:88 in save say: the "
        "code makes it, so a restart comes to it again"
    )
