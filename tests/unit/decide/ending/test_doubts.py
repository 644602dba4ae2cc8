"""What speaks against a run while it runs."""

from __future__ import annotations

import logging

from desk import Desk, connected
from rankwatch.shared.types import messages
from rankwatch.shared.types.frame import Moment
from rankwatch_monitor.decide.core.effects import Note
from rankwatch_monitor.decide.core.ledger import Judged
from rankwatch_monitor.decide.ending.judgement import LASTS, Doubt
from rankwatch_monitor.decide.next.how_it_went import judgement_of

GROWN = Doubt("loss-grown", 80, "the loss has grown x56 since batch 80")


def judged(desk: Desk, batches: int, *found: Doubt) -> list[tuple[int, str]]:
    """What is noted upon a look at so many batches."""
    return [(one.level, one.text) for one in desk.handle(Judged("train-0", found, batches)) if isinstance(one, Note)]


def kinds(desk: Desk) -> list[str]:
    told = judgement_of(desk.run.report())
    return [] if told is None else [one.kind for one in told.reasons]


def test_a_reason_is_told_once_it_was_found_for_so_many_batches_and_until_it_has_gone() -> None:
    desk = connected(2)
    assert judged(desk, 120, GROWN) == []
    assert judged(desk, 120 + LASTS - 1, GROWN) == []
    assert kinds(desk) == []
    told = logging.WARNING, f"run train-0: so far: {GROWN.text}"
    assert judged(desk, 120 + LASTS, GROWN) == [told]
    assert kinds(desk) == ["loss-grown"]
    assert judged(desk, 400, GROWN) == []
    assert judged(desk, 420) == [(logging.INFO, f"run train-0: no longer so: {GROWN.text}")]
    assert kinds(desk) == []


def test_what_comes_and_goes_is_not_told() -> None:
    desk = connected(2)
    for batches in range(100, 1000, 40):
        assert judged(desk, batches, *[GROWN] * (batches % 80 == 20)) == []


def test_its_numbers_are_renewed_as_the_run_goes_on() -> None:
    desk = connected(2)
    for batches in (100, 140):
        judged(desk, batches, GROWN)
    larger = GROWN._replace(text="the loss has grown x90 since batch 80")
    judged(desk, 150, larger)
    assert desk.run.report().doubts == (GROWN,)
    judged(desk, 160, larger)
    assert desk.run.report().doubts == (larger,)


def test_of_a_run_that_is_over_the_record_says_it() -> None:
    desk = connected(2)
    for batches in (100, 140):
        judged(desk, batches, GROWN)
    desk.receive((0, 1), messages.Bye(2, "finished", "", Moment(200, 200, 0, 1)))
    desk.wait(1.0)
    assert desk.reports[-1].doubts == ()
    assert judged(desk, 200, GROWN) == []
    assert desk.handle(Judged("gone-0", (GROWN,), 200)) == []
