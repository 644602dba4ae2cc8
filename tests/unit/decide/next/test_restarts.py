"""Whether the command of ``rankwatch run --max-restarts`` starts again, and what is said of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outcomes import judged, report, row
from rankwatch.shared.types.action import RESTARTS
from rankwatch.shared.types.closeup import CloseUp
from rankwatch.shared.types.trip import Cause
from rankwatch_monitor.decide.core.report import End, Outcome, RankState, Report
from rankwatch_monitor.decide.ending.exit_text import describe_exit
from rankwatch_monitor.decide.next.next_action import next_action
from rankwatch_monitor.decide.next.restarts import ALIKE, Restarts


def killed(rank: int = 1, batch: int = 9) -> Report:
    rows = [row(n, RankState.ABORTED, last_batch=batch) for n in range(4)]
    rows[rank] = replace(rows[rank], state=RankState.LOST, farewell=describe_exit(-9))
    return replace(report(Outcome.LOST, end=End.LOST), ranks=rows)


OVERFLOW = judged(Cause.OVERFLOW, CloseUp(recurred=3, of=3))
ELSEWHERE = judged(Cause.OVERFLOW, CloseUp(recurred=0, of=3))
SIBLING = report(Outcome.ABORTED, reason="run train-0 of the same processes was stopped", end=End.SIBLING)
KILLED = "restart: rank 1 was killed by SIGKILL: nothing is known to be wrong with the code or the data"
CODE = "the code or its settings make it, so a restart comes to it again"


@pytest.mark.parametrize(
    ("code", "signal", "ended", "again", "said"),
    [
        (1, "", [killed()], True, f"started again (1 of 2), {KILLED}"),
        (77, "", [OVERFLOW], False, f"not started again, fix-code: overflow in batch 0 of rank 1: {CODE}"),
        (77, "", [SIBLING, OVERFLOW], False, "not started again, fix-code"),
        (1, "", [SIBLING, killed()], True, "started again (1 of 2)"),
        (77, "", [SIBLING], False, "not started again, stop"),
        (77, "", [killed(), OVERFLOW], False, "not started again, fix-code"),
        (
            77,
            "",
            [ELSEWHERE],
            True,
            "started again (1 of 2), restart-elsewhere: overflow in batch 0 of rank 1 was finite each",
        ),
        (0, "", [killed()], False, ""),  # the others have finished
        (0, "", [report()], False, ""),
        (130, "SIGINT", [killed()], False, "not started again: SIGINT has stopped it"),
        (143, "SIGTERM", [], False, "not started again: SIGTERM has stopped it"),
        (1, "", [], False, "not started again: no rank connected, so nothing says that a restart would help"),
        (3, "", [report()], False, "not started again: the run finished, and then the command ended with exit code 3"),
    ],
)
def test_a_command_has_ended(code: int, signal: str, ended: list[Report], again: bool, said: str) -> None:
    then = Restarts(2).after(code, signal, ended)
    assert (then.again, then.text[: len(said)] if said else then.text) == (again, said)


def test_without_the_option_nothing_is_said() -> None:
    assert Restarts(0).after(1, "", [killed()]).text == ""


def test_the_same_hosts_are_said_to_be_the_same() -> None:
    then = Restarts(1).after(77, "", [ELSEWHERE])
    assert then.text.endswith("; the same command starts here, which leaves out node0 only if it heeds RANKWATCH_HOSTS")
    assert then.advice is not None
    assert then.advice.hosts == ("node0",)


def test_it_starts_again_so_many_times() -> None:
    restarts = Restarts(2)
    told = [restarts.after(1, "", [killed(batch=batch)]).text for batch in (9, 90, 900)]
    assert [text[:17] for text in told] == ["started again (1 ", "started again (2 ", "not started again"]
    assert told[2] == f"not started again, as it was 2 times already; {KILLED}"


def test_what_ends_in_the_same_place_again_and_again_is_no_chance() -> None:
    restarts = Restarts(44)
    told = [restarts.after(1, "", [killed(batch=batch)]) for batch in (9, 10, 9)]
    assert [one.again for one in told] == [True, True, False]
    assert told[2].text == (
        "not started again, stop: rank 1 was killed by SIGKILL: nothing is known to be wrong with the code or the data; "
        "but it ended there 3 times in a row, after 10 batches: a restart repeats it"
    )


def test_another_place_in_between_is_chance() -> None:
    restarts = Restarts(44)
    for batch in (9, 90, 9, 9):
        assert restarts.after(1, "", [killed(batch=batch)]).again


@given(
    st.lists(st.sampled_from([killed(), killed(2), OVERFLOW, ELSEWHERE, SIBLING, report()]), max_size=8), st.integers(0, 4)
)
def test_it_never_starts_more_often_nor_against_the_advice(runs: list[Report], most: int) -> None:
    restarts, again = Restarts(most), 0
    for run in runs:
        then = restarts.after(1, "", [run])
        if not then.again:
            break
        again += 1
        advice = next_action(run)
        assert advice is not None
        assert advice.action in RESTARTS
    assert again == restarts.count <= most
    assert ALIKE > 1
