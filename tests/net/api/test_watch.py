"""``watch`` in this process with a real collector."""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import ValuesView
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rankwatch
from collectors import Running, until
from rankwatch.shared.types.messages import Abort
from rankwatch.tell.link import Link
from rankwatch_monitor.record import mounts

pytestmark = pytest.mark.usefixtures("watched")


def test_each_model_of_a_process_is_a_run_of_its_own(collector: Running) -> None:
    generator, discriminator = nn.Linear(2, 2), nn.Linear(2, 2)
    with rankwatch.watch(generator) as first, rankwatch.watch(discriminator) as second:
        assert first.is_connected
        assert second.is_connected
        discriminator(generator(torch.ones(2)))
        nn.init.constant_(discriminator.weight, math.nan)
        with pytest.raises(rankwatch.OverflowDetected, match="weight: nan"):
            discriminator(generator(torch.ones(2)))
        until(lambda: collector.reports)
    runs = collector.collector.ledger.runs
    assert {name: run.verdict is not None for name, run in runs.items()} == {"train-0": False, "train.2-0": True}
    until(lambda: len(collector.reports) == 2)


@pytest.mark.parametrize("kind", ["xfs", "nfs4"])
def test_a_capsule_lies_in_the_runs_folder_on_a_network_file_system_as_well(
    collector: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """There the record has no write-ahead log, by which a rank knows the folder of a run under way."""
    (tmp_path / "mounts").write_text(f"40 27 0:40 / {tmp_path} rw - {kind} filer:/home rw\n")
    monkeypatch.setattr(mounts, "MOUNTS", tmp_path / "mounts")
    monkeypatch.setenv("RANKWATCH_CAPSULE", "on")
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(2, 2)
    with rankwatch.watch(model, closeup=30):
        run = tmp_path / "runs" / next(iter(collector.collector.ledger.runs))
        until(lambda: len(list(run.glob("run.db*"))) > 1)
        nn.init.constant_(model.weight, 3e38)
        with pytest.raises(rankwatch.OverflowDetected, match="output: inf"):
            model(torch.full((2,), 10.0))
    assert (run / "capsule" / "rank-0" / "capsule.json").exists()
    until(lambda: {path.name for path in run.iterdir()} >= {"report.json", "report.txt"})
    # SQLite removes its own files with a writer alone, and the report reads the record.
    left = {path.name for path in run.iterdir()} - {"run.db-shm", "run.db-wal", "run.db-journal"}
    assert left == {"capsule", "report.json", "report.txt", "run.db"}


def test_a_detector_that_switched_itself_off_is_told_in_the_report(
    collector: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(2, 2)
    with caplog.at_level(logging.CRITICAL), rankwatch.watch(model) as watch:
        model(torch.ones(2))
        monkeypatch.setattr(watch._detector._recorder, "call", lambda *_: 1 / 0)  # type: ignore[union-attr]
        model(torch.ones(2))
    until(lambda: collector.reports)
    assert collector.reports[0].ranks[0].farewell == (
        "switched itself off in batch 1 by an error of its own: ZeroDivisionError('division by zero')"
    )


@pytest.mark.parametrize(
    ("abort", "raised", "who"),
    [
        (Abort("rank 0 of 1: inf", 0, 1000.0, 10.0), rankwatch.OverflowDetected, (None,) * 4),
        (Abort("rank 0 of 1: weight differs", 0, 0.0, 10.0), rankwatch.TrainingAborted, (None,) * 4),
        (
            Abort("rank 5 of 8: inf", 5, 1000.0, 10.0, 0.0, 7, "decoder.wo", "overflow"),
            rankwatch.TrainingAborted,
            (5, 7, "decoder.wo", "overflow"),
        ),
        (Abort("rank 3 went silent", 3, 0.0, 10.0), rankwatch.TrainingAborted, (None,) * 4),
    ],
    ids=["own overflow", "own weights differ", "another rank's overflow", "no verdict"],
)
def test_an_abort_raises_what_happened_and_says_to_whom(
    abort: Abort, raised: type[Exception], who: tuple[object, ...]
) -> None:
    """A culprit whose weights differ has no overflow, nor has any other rank than the culprit."""
    model = nn.Linear(2, 2)
    with rankwatch.watch(model) as watch:
        model(torch.ones(2))
        watch.on_abort(abort)
        with pytest.raises(rankwatch.TrainingAborted, match=abort.reason) as found:
            model(torch.ones(2))
    error = found.value
    assert found.type is raised
    assert (error.rank, error.batch, error.module, error.cause) == who


def test_the_exception_says_who_and_where(collector: Running) -> None:
    """So that a script can decide by them, without reading the text."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with rankwatch.watch(model, closeup=0) as watch:
        model(torch.ones(2))
        with pytest.raises(rankwatch.OverflowDetected) as found:
            model(torch.full((2,), math.inf))
    error = found.value
    assert (error.rank, error.batch, error.module, error.cause) == (0, 1, "0", "data")
    assert error.report is not None
    assert Path(error.report, "report.json").exists() or Path(error.report, "run.db").exists()
    assert repr(watch).startswith("<Watch of Sequential, rank 0 of 1 (")
    assert repr(watch).endswith(", tripped, closed>")


def test_a_model_that_nobody_holds_ends_its_run(collector: Running) -> None:
    def train() -> None:
        model = nn.Linear(2, 2)
        rankwatch.watch(model)
        model(torch.ones(2)).sum().backward()

    gc.freeze()  # to look through all that other tests have left takes longer than a rank may be silent
    try:
        train()
        gc.collect()
    finally:
        gc.unfreeze()
    until(lambda: collector.reports)
    assert collector.reports[0].batches == 1


def test_a_rank_that_is_refused_says_so_and_why(
    collector: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rankwatch.tell.link.CONNECT_TIMEOUT", 1.0)
    held = "rank 0 of run train-0 is held by process"
    with rankwatch.watch(nn.Linear(2, 2)):
        monkeypatch.setattr(
            "rankwatch.api.link_owner.open_watches", lambda: iter(())
        )  # as another process of this launch does
        model = nn.Linear(2, 2)
        with caplog.at_level(logging.WARNING), rankwatch.watch(model):
            assert f"refused this process, which is not watched until then: {held}" in caplog.text
            assert "no collector answers" not in caplog.text
            with pytest.raises(rankwatch.OverflowDetected):
                model(torch.full((1, 2), math.inf))
    assert f"this rank alone: the collector refused it: {held}" in capsys.readouterr().out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x)
        return out


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: int) -> None:
    for _ in range(batches):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("how", ["plain", "parallel", "compiled"])
def test_a_model_that_is_watched_again_goes_on_in_its_run(
    collector: Running, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    first = rankwatch.watch(model, trace_batch_nums=[1])
    train(model, optimizer, 3)
    wrapped: nn.Module = model
    if how != "plain":
        wrapped = nn.DataParallel(model) if how == "parallel" else torch.compile(model)  # type: ignore[assignment]
    second = rankwatch.watch(wrapped, gradients=True)
    assert caplog.messages == ["rankwatch: this Net was watched already: the new watch takes over"]
    assert repr(first).endswith("no collector, closed>")
    assert second.is_connected
    assert (second.batch, second.optimizer_step) == (2, 3)
    train(model, optimizer, 2)
    first.close()
    del first
    gc.collect()
    assert second.is_connected
    assert second.batch == 4
    second.close()
    assert not model._forward_hooks
    until(lambda: collector.reports)
    (report,) = collector.reports
    assert (report.run, report.outcome.value, report.batches) == ("train-0", "finished", 5)


def test_an_abort_that_comes_between_two_watches_of_a_model_stops_the_training(collector: Running) -> None:
    class Slow(dict[str, nn.Parameter | None]):
        def values(self) -> ValuesView[nn.Parameter | None]:  # type: ignore[override]
            for link in links:  # the second watch is being made
                link._abort(Abort("rank 5 of 8: inf", 5, 1000.0, 10.0))
            return super().values()

    links = list[Link]()
    model = Net()
    model._parameters = Slow(model._parameters)
    first = rankwatch.watch(model)
    assert first._link is not None
    links.append(first._link)
    with rankwatch.watch(model), pytest.raises(rankwatch.TrainingAborted, match="rank 5 of 8: inf"):
        model(torch.ones(1, 2))


@pytest.mark.parametrize(("option", "batches"), [("abort_after_batch_num", [4, 3]), ("trace_batch_nums", [4, 4])])
def test_where_an_option_names_a_batch_that_is_past_a_run_begins(
    collector: Running, option: str, batches: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rankwatch.watch(model)
    train(model, optimizer, 4)
    value: Any = {"abort_after_batch_num": 2, "trace_batch_nums": [1]}[option]
    with rankwatch.watch(model, **{option: value}), suppress(rankwatch.BatchLimitReached):
        train(model, optimizer, 4)
    until(lambda: len(collector.reports) == 2)
    assert [report.batches for report in collector.reports] == batches
    assert ("Starting batch number=1" in capsys.readouterr().out) is (option == "trace_batch_nums")


def test_after_a_verdict_a_model_that_is_watched_again_begins_a_run(collector: Running) -> None:
    model = Net()
    rankwatch.watch(model)
    with pytest.raises(rankwatch.OverflowDetected):
        model(torch.full((1, 2), math.nan)).sum().backward()
    with rankwatch.watch(model) as second:
        model(torch.ones(1, 2)).sum().backward()
        assert second.batch == 0
    until(lambda: len(collector.reports) == 2)
    ends = [(report.run, report.outcome.value) for report in collector.reports]
    assert ends == [("train-0", "aborted"), ("train-0.2", "finished")]


def test_the_watch_of_a_model_is_taken_off_by_the_model(collector: Running) -> None:
    model = Net()
    watch = rankwatch.watch(model)
    assert rankwatch.unwatch(nn.DataParallel(model))
    assert not rankwatch.unwatch(model)
    assert not model._forward_hooks
    watch.close()
    until(lambda: collector.reports)
    with pytest.raises(rankwatch.UsageError, match=r"takes a torch\.nn\.Module"):
        rankwatch.unwatch(3)  # type: ignore[arg-type]
