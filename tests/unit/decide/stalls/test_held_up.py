"""A rank for which the others wait in each batch."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

import makers
from desk import Desk, connected
from rankwatch.shared.types import messages
from rankwatch.shared.types.frame import Moment
from rankwatch.shared.types.spent import OF, Spent
from rankwatch_monitor.decide.core.ledger import Tick
from rankwatch_monitor.decide.next.how_it_went import judgement_of
from rankwatch_monitor.decide.stalls.held_up import describe_spent

QUICK = Spent(OF, 0.01, 0.02, 0.76, 0.01)
SLOW = Spent(OF, 0.71, 0.02, 0.06, 0.01)


def trained(desk: Desk, spent: Mapping[int, Spent], begin: int = 0, batches: int = 200) -> None:
    for batch in range(begin, begin + batches, 8):
        for rank, of in spent.items():
            desk.receive(rank, messages.Beat(makers.moment(batch, 0, 1), "forward", 0, 0, 1000.0, spent=of))
            desk.run.ranks[rank].last_batch = batch
        desk.now += 2.0
        desk.handle(Tick())


def test_it_is_named_with_its_batch_while_it_lasts() -> None:
    desk = connected(4)
    trained(desk, {0: QUICK, 1: SLOW, 2: QUICK, 3: QUICK})
    batch, text = desk.run.report().held_up
    assert batch == 0
    assert text == (
        "rank 1 of 4 (node0, local rank 1) takes 710 ms of 800 ms between two batches, the others 10 ms: they wait for it since "
        "about batch 0; look at its data, host and disk"
    )
    assert [note for note in desk.notes if "710 ms" in note] == [f"run train-0: {text}"]
    trained(desk, dict.fromkeys(range(4), QUICK), 200, 40)
    assert desk.run.report().held_up == (-1, "")
    assert any("no rank holds up the others" in note for note in desk.notes)


def test_it_is_a_reason_of_the_judgement() -> None:
    desk = connected(2)
    trained(desk, {0: QUICK, 1: SLOW})
    desk.receive((0, 1), messages.Bye(2, "finished", "", Moment(200, 200, 0, 1)))
    desk.wait(1.0)
    judged = judgement_of(desk.reports[-1])
    assert judged is not None
    assert (judged.healthy, [one.kind for one in judged.reasons]) == (False, ["rank-waited-for"])


@pytest.mark.parametrize(
    "spent",
    [
        {0: QUICK, 1: QUICK},
        {0: SLOW, 1: SLOW},  # all wait for one disk, or compute little
        {0: QUICK, 1: SLOW._replace(batches=8)},
        {0: QUICK, 1: Spent(OF, 0.2, 0.02, 0.57, 0.01)},  # not so much that each batch takes twice as long
    ],
)
def test_nothing_is_said_of_others(spent: dict[int, Spent]) -> None:
    desk = connected(2)
    trained(desk, spent)
    assert desk.run.report().held_up == (-1, "")


def test_nor_of_ranks_on_devices_or_for_a_few_batches() -> None:
    desk = Desk()
    for rank in (0, 1):
        desk.receive(rank, makers.hello(rank, 2, device=f"cuda:{rank}"))
    trained(desk, {0: QUICK, 1: SLOW})
    assert desk.run.report().held_up == (-1, "")
    short = connected(2)
    trained(short, {0: QUICK, 1: SLOW}, 100, 24)
    assert short.run.report().held_up == (-1, "")


def test_the_time_of_a_batch_in_words() -> None:
    told = "800 ms a batch: between 710 ms, forward 20 ms, backward 60 ms, step 10 ms (medians of the last 32)"
    assert describe_spent(SLOW) == told
