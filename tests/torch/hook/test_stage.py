"""Stages of a pipeline: which modules are watched, under which names, and which of their forwards are batches."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rankwatch
from collectors import Running, until
from notebook import sgd, unwatch, watched
from rankwatch.hook.stage import PipelineStage, module_and_stage
from rankwatch.shared.types.frame import NO_STAGE, Position
from trainings.parts import Root

pipelining = pytest.importorskip("torch.distributed.pipelining")


def run(self: Root, x: Tensor) -> Tensor:
    for layer in self.layers:
        x = layer(x)
    return x


def learn_shapes(self: Any, x: Tensor) -> Tensor:
    """Recognizes the schedule's shape inference by its input, and turns that input into nan."""
    self.calls += 1
    return run(self, x if self.calls > 1 else x * float("nan"))


def layers(call: Callable[..., Tensor] = run) -> Root:
    return Root(call, layers=nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), calls=0)


def stage_of(model: nn.Module, index: int = 0, stages: int = 1) -> PipelineStage:
    asks = inspect.signature(pipelining.PipelineStage).parameters["input_args"].default is inspect.Parameter.empty
    given = {"input_args": (torch.ones(2, 4),)} if asks else {}  # torch 2.4 learns shapes as the stage is made
    made: PipelineStage = pipelining.PipelineStage(model, index, stages, torch.device("cpu"), **given)
    return made


def test_a_module_is_no_stage_and_a_string_is_neither() -> None:
    model = nn.ReLU()
    assert module_and_stage(model) == (model, NO_STAGE)
    model.submod, model.stage_index = nn.ReLU(), 3  # type: ignore[assignment]  # a module that happens to look like one
    assert module_and_stage(model) == (model, NO_STAGE)
    with pytest.raises(rankwatch.UsageError, match="or a pipeline stage, not str"):
        module_and_stage("model")


@pytest.mark.usefixtures("one_rank")
def test_a_stage_is_watched_as_the_part_that_it_runs() -> None:
    model = layers()
    stage = stage_of(model)
    assert module_and_stage(stage) == (model, 0)
    with rankwatch.watch(stage) as watch:
        assert watch.root is model


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("gradients", [False, True])
def test_a_loss_that_calls_a_part_of_the_stage_is_rehearsed_too(gradients: bool) -> None:
    model = layers(learn_shapes)
    schedule = pipelining.ScheduleGPipe(
        stage_of(model), 2, loss_fn=lambda out, target: nn.functional.mse_loss(model.layers[2](out), target)
    )
    detector, notebook = watched(model, gradients=gradients, sends_at_once=True)
    optimizer = sgd(model)
    for _ in range(2):
        schedule.step(torch.ones(8, 4), target=torch.ones(8, 4))
        optimizer.step()
    unwatch()
    assert (detector.fault, notebook.trips, notebook.found) == ("", [], [])
    assert detector.position.batch == 3


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("gradients", [False, True])
def test_each_micro_batch_is_a_batch_and_shape_inference_is_none(gradients: bool) -> None:
    model = layers(learn_shapes)
    schedule = pipelining.ScheduleGPipe(stage_of(model), 4, loss_fn=nn.functional.mse_loss)
    detector, notebook = watched(model, gradients=gradients, sends_at_once=True)
    optimizer = sgd(model)
    for step in range(2):
        schedule.step(torch.ones(8, 4), target=torch.ones(8, 4))
        assert detector.position[:2] == (4 * step + 3, 0)
        optimizer.step()
    unwatch()
    assert (detector.fault, notebook.trips, notebook.found) == ("", [], [])
    batches = [(summary.batch, summary.optimizer_step) for _, summary in notebook.batches if not summary.first_frame]
    assert batches == [(batch, batch // 4) for batch in range(8)]
    losses = [
        spec.readings[0].label for table, summary in notebook.batches if summary.first_frame for spec in table.specs[:1]
    ]
    assert losses == ["loss"] * 8  # apart from the forward: the other stages wait for that


@pytest.mark.usefixtures("one_rank")
def test_a_stage_that_its_user_calls_counts() -> None:
    stage = stage_of(layers())
    detector, _ = watched(stage.submod)
    stage.submod(torch.ones(2, 4))
    assert detector.position == Position(0, 0, 4)


def test_a_stage_that_torch_cut_has_the_users_names() -> None:
    split = {"layers.1": pipelining.SplitPoint.BEGINNING}
    pipe = pipelining.pipeline(layers(), mb_args=(torch.ones(2, 4),), split_spec=split)
    part = pipe.get_stage_module(1)
    _, notebook = watched(part)
    part(torch.ones(2, 4))
    assert [frame.spec.module for frame in notebook.frames()] == ["layers.1", "layers.2", ""]
    unwatch()


@pytest.mark.usefixtures("one_rank")
def test_the_abort_of_a_rank_is_seen_through_the_schedules_own_exception(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    collector = Running(tmp_path)
    monkeypatch.setenv("RANKWATCH_CONNECTION", str(tmp_path / "connection.json"))
    stage = stage_of(layers())
    schedule = pipelining.ScheduleGPipe(stage, 4, loss_fn=nn.functional.mse_loss)
    with pytest.raises(RuntimeError) as raised, rankwatch.watch(stage, abort_after_batch_num=2):
        schedule.step(torch.ones(8, 4), target=torch.ones(8, 4))
    assert not isinstance(raised.value, rankwatch.TrainingAborted)
    until(lambda: collector.reports)
    collector.stop()
    (report,) = collector.reports
    assert report.outcome.value == "aborted"
    assert report.reason == "stopped after batch 2, as abort_after_batch_num=2 asked for"
    assert report.ranks[0].stage == 0
