"""What the ledger records and what it refuses."""

from __future__ import annotations

import pytest

import makers
from desk import Desk, connected
from invariants import CheckedLedger
from rankwatch.shared.types import messages
from rankwatch.shared.types.fingerprint import FingerprintTable
from rankwatch.shared.types.frame import FrameTable
from rankwatch_monitor.decide.core.effects import Note, RecordTrace, Send
from rankwatch_monitor.decide.core.ledger import Ledger, Malformed, Received, Stored
from rankwatch_monitor.decide.core.options import Options
from rankwatch_monitor.decide.keys.tables import MAX_TABLES


def test_traced_batches_are_recorded_by_rank() -> None:
    desk = connected(2)
    desk.receive(1, messages.Table(makers.table()), messages.Batch(1, makers.summary(4, traced=True)))
    (trace,) = desk.asked(RecordTrace)
    assert (trace.run, trace.rank, trace.summary.batch, trace.table) == ("train-0", 1, 4, makers.table())


def test_the_parts_of_a_traced_batch_are_recorded_one_by_one() -> None:
    desk = connected(1)
    desk.receive(0, messages.Table(makers.table()), messages.Batch(1, makers.summary(4, traced=True)))
    desk.receive(0, messages.Batch(2, makers.summary(4, first=2, traced=True)))
    traces = desk.asked(RecordTrace)
    assert [[frame.position.frame for frame in trace.summary.frames(trace.table)] for trace in traces] == [[0, 1], [2, 3]]


def test_a_batch_whose_table_is_not_known_is_asked_for_again() -> None:
    desk = connected(1)
    desk.receive(0, messages.Batch(1, makers.summary(0)))
    assert desk.sent(0, messages.Error) == [messages.Error("the frame table of batch 0 is not known here", "hello")]
    desk.receive(0, makers.hello(), messages.Table(makers.table()), messages.Batch(1, makers.summary(0)))
    assert desk.run.ranks[0].last_batch == 0


@pytest.mark.parametrize("traced", [True, False])
def test_a_batch_that_does_not_fit_its_table_costs_its_sender_an_error(traced: bool) -> None:
    desk = connected(1)
    good = makers.summary(0, traced=traced)
    wide = good._replace(abs_min=good.abs_min * 2, abs_max=good.abs_max * 2)
    empty = good._replace(abs_min=b"", abs_max=b"", states=b"")
    desk.receive(0, messages.Table(makers.table()), messages.Batch(2, wide), messages.Batch(3, empty))
    assert desk.sent(0, messages.Error) == [messages.Error("batch 0 does not fit its frame table", "none")] * 2
    assert desk.run.ranks[0].last_batch == -1


def test_of_many_tables_the_one_in_use_is_kept() -> None:
    desk = connected(1)
    desk.receive(0, messages.Table(makers.table()))
    for number in range(MAX_TABLES + 10):
        desk.receive(0, messages.Table(FrameTable((makers.frame(module=f"m{number}").spec,))))
        desk.receive(0, messages.Batch(number + 1, makers.summary(number)))
    assert desk.sent(0, messages.Error) == []


def test_malformed_messages_are_counted_and_answered() -> None:
    ledger = CheckedLedger(Options())
    assert ledger.handle(Malformed(b"x", "HELLO.rank: no"), 0.0) == [
        Note("refused a message: HELLO.rank: no"),
        Send(b"x", messages.Error("HELLO.rank: no", "none")),
    ]
    assert ledger.refused == 1


def test_a_peer_that_sends_nonsense_for_ever_does_not_fill_the_log() -> None:
    ledger = CheckedLedger(Options())
    told = [effect for _ in range(5000) for effect in ledger.handle(Malformed(b"x", "no"), 0.0) if isinstance(effect, Note)]
    assert len(told) == 1003
    assert told[-1] == Note("refused a message: no (4096 refusals by now)")
    assert ledger.refused == 5000


def test_what_a_rank_has_no_business_to_send_is_refused() -> None:
    desk = connected(1)
    desk.receive(0, messages.Abort("stop it", 0, 0.0, 1.0))
    assert desk.sent(0, messages.Error) == [messages.Error("a rank does not send Abort", "none")]
    assert desk.sent(0, messages.Abort) == []


def test_runs_that_are_over_are_forgotten_in_the_end() -> None:
    desk = Desk()
    for number in range(40):
        first = Received(b"%d" % number, makers.hello(job=f"job{number}", incarnation=str(number)))
        desk.handle(first)
        desk.handle(Received(b"%d" % number, messages.Bye(1, "finished", "")))
    desk.wait(0.1)
    assert len(desk.ledger.runs) == 16


def test_a_rank_is_told_as_stored_what_the_record_has_and_what_needs_no_record_after_it() -> None:
    ledger = CheckedLedger(Options())
    table = makers.fingerprint_table(2, 1)

    def stored(of: Ledger, *said: messages.Message) -> int:
        """Up to which message a rank that says this, and then HELLO, need not repeat its own."""
        for message in said:
            list(of.handle(Received(b"rank", message), 0.0))
        sent = [effect.message for effect in of.handle(Received(b"rank", makers.hello()), 0.0) if isinstance(effect, Send)]
        (welcome,) = (message for message in sent if isinstance(message, messages.Welcome))
        return welcome.seq

    first, second = (messages.Noticed(seq, makers.notice(label=f"input[{seq}]")) for seq in (2, 3))
    assert stored(ledger, makers.hello(), messages.Fingerprints(table), fingerprinted(1, table)) == 1
    assert stored(ledger, first, second, fingerprinted(4, table)) == 1
    list(ledger.handle(Stored("train-0", {0: 2}), 0.0))
    assert stored(ledger) == 2
    list(ledger.handle(Stored("train-0", {0: 3}), 0.0))
    assert stored(ledger) == 4
    again = Ledger(Options())
    again.restore("train-0", [entry for _, entries in ledger.take_journals() for entry in entries], [], 0.0)
    assert stored(again) == 3


def fingerprinted(seq: int, table: FingerprintTable) -> messages.Fingerprinted:
    return messages.Fingerprinted(seq, makers.fingerprint(table, seq))
