"""Every fact that a record can hold, in words."""

from __future__ import annotations

import pytest

import makers
from rankwatch.shared.types import messages
from rankwatch.shared.types.frame import Moment
from rankwatch.shared.types.tuning import Tuning
from rankwatch.shared.words.divergence import Divergence
from rankwatch_monitor.decide.calls.differs import Callers, How, UnequalCalls
from rankwatch_monitor.decide.core import journal
from rankwatch_monitor.decide.core.fact import OWN_FACTS, OwnFact
from rankwatch_monitor.decide.core.gaps import Gap
from rankwatch_monitor.decide.core.journal import NO_RANK, Entry, Fact
from rankwatch_monitor.decide.core.report import Outcome, RankState, Stall
from rankwatch_monitor.decide.ending.judgement import Doubt
from rankwatch_monitor.decide.replicas.desync import Compared, Desync, DesyncPattern
from rankwatch_monitor.views import events

TOLD: list[tuple[Fact, str]] = [
    (journal.Opened("train", 1, 8), "job train, restart 1, 8 ranks"),
    (makers.hello(3, 8), "rank 3 of 8 (node1, local rank 3) connected: process 103, cpu, torch 2.13.0"),
    (
        makers.hello(3, 8, device="cuda:3", gpu=makers.gpu(3)),
        "rank 3 of 8 (node1, local rank 3) connected: process 103, cuda:3, "
        "NVIDIA H200, GPU-5f3a0003, PCI bus 0000:03:00.0, driver 550.54.15, torch 2.13.0",
    ),
    (makers.hello(3, 8, stage=1), "rank 3 of 8 (node1, local rank 3, stage 1) connected"),
    (messages.Tripped(4, makers.trip()), "tripped: rank 5, batch 0: layer (Linear), output: inf"),
    (
        messages.LookedCloser(5, makers.closeup()),
        "looked closer: aten.exp at model.py:87, in forward: e = torch.exp(scores), self (2, 3) float32",
    ),
    (messages.Noticed(5, makers.notice()), "noticed: next to overflow: layer (Linear), output: abs max 4,090"),
    (messages.Beat(Moment(7, 7, 0, 2), "backward", 0, 0, 1.0), "was in batch 7, frame 2, phase backward"),
    (messages.Off(8, "switched itself off in batch 3"), "its watch switched itself off in batch 3"),
    (messages.Ack(0, abort=True), "acknowledged the abort"),
    (messages.Bye(9, "failed", "ValueError: no"), "said goodbye: failed: ValueError: no"),
    (messages.Bye(9, "failed", "ValueError: no", at="a.py:3 in f"), "said goodbye: failed: ValueError: no, at a.py:3 in f"),
    (messages.Bye(9, "finished", ""), "said goodbye: finished"),
    (messages.Tune("train-0", Tuning(every=3)), "options changed: every 3"),
    (journal.Left(RankState.LOST), "counted as lost"),
    (journal.Left(RankState.LOST, "memory 31 GiB"), "counted as lost; memory 31 GiB"),
    (
        journal.Aside(("saved: /data/a.pt, after batch 49", "wandb: https://w")),
        "saved: /data/a.pt, after batch 49; wandb: https://w",
    ),
    (journal.Reached((5,), ((1, 1, 0, 3),), (0,)), "answered: it was in batch 1, frame 3"),
    (journal.Miscounted("rank 1 counts more batches"), "rank 1 counts more batches"),
    (messages.Inspected(1, "train.py:31 in load", ("main thread",)), "stalls: it is in train.py:31 in load"),
    (journal.NoStack("it is not connected"), "gave no stack: it is not connected"),
    (journal.Stood(Stall((5,), (), "rank 5 stalled", 1, 0)), "rank 5 stalled"),
    (journal.Stood(None), "no rank is stalled any more"),
    (journal.WaitedFor(40, "rank 1 of 2 takes long"), "rank 1 of 2 takes long"),
    (journal.WaitedFor(-1, ""), "no rank holds up the others any more"),
    (journal.Paced(8, 64), "from batch 64 on, 1 of 8 is measured in full"),
    (journal.Paced(1, 64, "it communicates"), "from batch 64 on, 1 of 1 is measured in full: it communicates"),
    (journal.LookedClosely(9, 60, "a step was left out"), "batches 9 to 60 are all measured in full: a step was left out"),
    (journal.Waited(), "the decision window ended"),
    (journal.InTurn(7, "Tripped"), "what it said before its trip is here"),
    (journal.InTurn(8, "LookedCloser"), "what it said before its close-up is here"),
    (journal.JobInterrupted("SIGINT"), "the command received SIGINT"),
    (journal.Died("killed by SIGKILL"), "killed by SIGKILL"),
    (journal.JobEnded(1, "SIGTERM"), "the command ended: exit code 1, stopped by SIGTERM"),
    (journal.JobEnded(None), "the command ended: exit code unknown"),
    (journal.Decided(Outcome.ABORTED, "because", True), "decided: aborted, all ranks are to stop: because"),
    (
        journal.Diverged(Divergence(2, 2, "Net", "loss", True, 4.2, 300.0, 4e6, 20, 2, True)),
        "diverged: the loss left its range in batch 2 on all 2 ranks that were compared: about 4.2 before, 300 in this batch",
    ),
    (
        journal.Skipped(4, 0, "optimizer step 4 was left out: rank 1", "1 step was left out: batch 4", "for the third time"),
        "optimizer step 4 was left out: rank 1; for the third time",
    ),
    (
        journal.Desynced((Desync(20, "layer.weight", (1,), 4, DesyncPattern.ONE_RANK),) * 6, 0),
        "desynced (one-rank): layer.weight of rank 1 since step 20; desynced (one-rank): layer.weight",
    ),
    (
        journal.ReplicasCompared(Compared(82, 146, 4, 83, True)),
        "replicas compared: equal at step 82 (all 146 parameters, 4 ranks), compared 83 times",
    ),
    (
        journal.CollectivesDiffer(
            UnequalCalls(
                "7",
                "the default group",
                41,
                How.OTHER,
                (Callers((0,), 1, "barrier", "a.py:1 in f"), Callers((1, 2), 2, "all_reduce", "a.py:2 in g")),
            )
        ),
        "rank 0 called another collective than ranks 1-2: its 41st of the default group is barrier at a.py:1 in f; that of",
    ),
    (journal.Paced(8, 64), "from batch 64 on, 1 of 8 is measured in full"),
    (journal.LookedClosely(130, 180, "a jump on rank 1"), "batches 130 to 180 are all measured in full: a jump on rank 1"),
    (journal.Doubted((Doubt("loss-grown", 7, "the loss has grown"),)), "the loss has grown"),
    (journal.Doubted(()), "nothing speaks against the run any more"),
    (Gap((5,), 50, 249, "the disk was full"), "batches 50 to 249 are not on record: the disk was full"),
    (journal.Closed(), "the run is over"),
]


@pytest.mark.parametrize(("fact", "text"), TOLD, ids=lambda value: type(value).__name__)
def test_a_fact_in_words(fact: Fact, text: str) -> None:
    assert events.describe(Entry(0.0, 5, fact)).startswith(text)


def test_each_of_the_collectors_own_events_has_words() -> None:
    assert set(OWN_FACTS.values()) == {type(fact) for fact, _ in TOLD if isinstance(fact, OwnFact)}


def test_an_event_of_the_whole_run_has_no_rank() -> None:
    reached = journal.Reached((0, 1), ((1, 1, 0, 3), (1, 1, 0, 0)), (0, 0))
    assert events.describe(Entry(0.0, NO_RANK, reached)) == "where the 2 ranks were when one of them tripped"
    told = events.to_dict(100.0, Entry(0.0, NO_RANK, journal.Closed()))
    assert told == {"time": 100.0, "rank": None, "kind": "closed", "text": "the run is over"}
