"""Options that change at run time."""

from __future__ import annotations

import makers
from desk import Desk, connected, peer
from rankwatch.shared.types import messages
from rankwatch.shared.types.tuning import Check, Tuning
from rankwatch_monitor.decide.core.effects import Send
from rankwatch_monitor.decide.core.ledger import Received


def tuned(desk: Desk, tune: messages.Tune) -> list[messages.Message]:
    """The answer to a control client."""
    return desk.answers(Received(b"control", tune))


def test_a_tuning_reaches_the_ranks_that_are_there_and_those_that_come() -> None:
    desk = connected(3, ranks=[0, 1])
    assert tuned(desk, messages.Tune(tuning=Tuning(every=10))) == [messages.Tuned(("train-0",), 2)]
    assert tuned(desk, messages.Tune("train-0", Tuning(ignore=("*.rotary",)))) == [messages.Tuned(("train-0",), 2)]
    merged = messages.Tune("train-0", Tuning(every=10, ignore=("*.rotary",)))
    for rank in (0, 1):
        assert desk.sent(rank, messages.Tune) == [messages.Tune("train-0", Tuning(every=10)), merged]
    desk.take()
    desk.connect(3, ranks=[2, 1])
    for rank in (1, 2):
        sent = [effect.message for effect in desk.asked(Send) if effect.peer == peer(rank)]
        assert sent[0] == merged  # before WELCOME: the first batch obeys it
        assert isinstance(sent[1], messages.Welcome)
    desk.take()
    tuned(desk, messages.Tune(tuning=Tuning(every=10)))
    assert "run train-0: options changed: every 10" in desk.notes


def test_patterns_that_match_nothing_are_refused() -> None:
    desk = connected(2)
    mistyped = messages.Tune(tuning=Tuning(modules=("*", "blocks.9.*"), ignore=("*:outptu",)))
    assert tuned(desk, mistyped) == [messages.Tuned(("train-0",), 2)]  # before anything was measured
    table = makers.table()
    desk.receive(0, messages.Table(table), messages.Batch(2, makers.summary(of=table)))
    desk.wait(2.0)
    desk.take()
    (answer,) = tuned(desk, mistyped)
    assert isinstance(answer, messages.Error)
    for line in (
        "modules: 'blocks.9.*' matches no name among the 1 module measured so far",
        "ignore: '*:outptu' matches no name or reading among the 1 module measured so far",
        "nothing was changed",
    ):
        assert line in answer.text
    assert desk.sent(0, messages.Tune) == []
    assert tuned(desk, messages.Tune(tuning=Tuning(every=2, modules=()))) == [messages.Tuned(("train-0",), 2)]


def test_a_rank_without_a_connection_is_not_counted_as_told() -> None:
    desk = connected(3)
    desk.disconnect(1)
    desk.receive(2, messages.Bye(1, "finished", ""))
    assert tuned(desk, messages.Tune(tuning=Tuning(check=Check.ASYNC))) == [messages.Tuned(("train-0",), 1)]
    assert [len(desk.sent(rank, messages.Tune)) for rank in range(3)] == [1, 0, 0]


def test_a_tuning_goes_to_the_run_that_is_named_or_to_all_that_are_under_way() -> None:
    desk = Desk()
    assert tuned(desk, messages.Tune(tuning=Tuning(every=2))) == [messages.Error("no run is under way here", "none")]
    assert tuned(desk, messages.Tune("x", Tuning(every=2))) == [messages.Error("no run x; no run is under way here", "none")]
    for name in ("one", "two", "three"):
        desk.handle(Received(name.encode(), makers.hello(job=name)))
    desk.handle(Received(b"three", messages.Bye(1, "finished", "")))
    assert tuned(desk, messages.Tune(tuning=Tuning(every=2))) == [messages.Tuned(("one-0", "two-0"), 2)]
    assert tuned(desk, messages.Tune("two-0", Tuning(every=3))) == [messages.Tuned(("two-0",), 1)]
    assert [run.tuning.every for run in desk.ledger.runs.values()] == [2, 3, None]
    (refused,) = tuned(desk, messages.Tune("three-0", Tuning(every=3)))
    assert refused == messages.Error("no run three-0; under way here: one-0, two-0", "none")


def test_a_collector_may_begin_with_a_tuning() -> None:
    desk = connected(1, every=5)
    assert desk.sent(0, messages.Tune) == [messages.Tune("train-0", Tuning(every=5))]


def test_a_rank_does_not_tune_and_a_control_client_does_nothing_else() -> None:
    desk = connected(1)
    desk.receive(0, messages.Tune(tuning=Tuning(every=2)), messages.Tuned((), 0))
    assert desk.sent(0, messages.Error) == [
        messages.Error("a rank does not send Tune", "none"), messages.Error("a rank does not send Tuned", "none")
    ]  # fmt: skip
    (refused,) = desk.handle(Received(b"control", messages.Noticed(1, makers.notice())))
    assert refused == Send(b"control", messages.Error("you are not known here: say HELLO", "hello"))
