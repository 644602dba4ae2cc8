"""Compiled models: a watch adds only tensor code to their graphs, and the verdicts are the same as in eager mode."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import rankwatch
from compiled import Net, by_block, in_place, inside_a_function, whole
from models import Calls
from notebook import learn, sgd, watched

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def train(step: Callable[[Tensor], Tensor], model: nn.Module) -> None:
    optimizer = sgd(model, 1e-3)
    for seed in range(4):
        torch.manual_seed(seed)
        learn(step(torch.randn(4, 8)).sum(), optimizer)


@pytest.mark.parametrize(
    ("compiled", "checkpointed"),
    [
        (whole, False),
        *(
            pytest.param(compiled, checkpointed, marks=pytest.mark.slow)
            for compiled in (whole, in_place, inside_a_function, by_block)
            for checkpointed in (False, True)
            if (compiled, checkpointed) != (whole, False)
        ),
    ],
)
def test_a_watch_adds_no_graph_and_names_the_module(compiled: Any, checkpointed: bool) -> None:
    graphs = []
    for is_watched in (False, True):
        torch._dynamo.reset()
        # More blocks than dynamo's recompile limit: the blocks must share a graph.
        model = Net(12 if compiled is by_block else 3, checkpointed=checkpointed)
        counter = CompileCounterWithBackend("aot_eager")
        if is_watched:
            with rankwatch.watch(model):
                step = compiled(model, counter, fullgraph=True)
                train(step, model)
                graphs.append(counter.frame_count)
                with torch.no_grad():
                    model.blocks[2].up.bias[3] = math.inf
                with pytest.raises(rankwatch.OverflowDetected, match=r"batch 4: blocks\.2\.up \(Linear\), bias: inf"):
                    step(torch.ones(4, 8))
        else:
            train(compiled(model, counter, fullgraph=True), model)
            graphs.append(counter.frame_count)
    assert graphs[0] == graphs[1]


@pytest.mark.slow
def test_a_watched_model_does_not_reuse_the_graph_of_an_unwatched_one() -> None:
    bare, model = Net(), Net()
    with rankwatch.watch(model):
        train(torch.compile(bare, backend="aot_eager"), bare)
        step = torch.compile(model, backend="aot_eager")
        train(step, model)
        with torch.no_grad():
            model.blocks[2].up.bias[3] = math.inf
        with pytest.raises(rankwatch.OverflowDetected, match=r"batch 4: blocks\.2\.up \(Linear\), bias: inf"):
            step(torch.ones(4, 8))


class Fuse:
    blown = False


@torch.library.custom_op("rankwatch_tests::fuse", mutates_args=(), schema="(Tensor x) -> Tensor")
def pass_fuse(x: Tensor) -> Tensor:
    """The identity as an operation of the graph; it fails once the fuse is blown."""
    if Fuse.blown:
        raise RuntimeError("blown")
    return x.clone()


pass_fuse.register_fake(lambda x: torch.empty_like(x))
pass_fuse.register_autograd(lambda context, gradient: gradient)


def test_a_compiled_forward_that_raises_half_way_ends_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Calls(pass_fuse), nn.Linear(8, 2))
    detector, notebook = watched(model)
    step = whole(model, "aot_eager", fullgraph=True)
    train(step, model)
    monkeypatch.setattr(Fuse, "blown", True)
    with pytest.raises(RuntimeError, match="blown"):
        step(torch.ones(4, 8))
    monkeypatch.undo()
    train(step, model)
    assert [summary.batch for _, summary in notebook.batches] == [0, 1, 2, 3, 5, 6, 7, 8]
    assert detector.fault == ""


def test_the_gradients_of_the_parameters_of_a_compiled_model_are_seen() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    detector, notebook = watched(model, gradients=True)
    counter = CompileCounterWithBackend("aot_eager")
    train(whole(model, counter, fullgraph=True), model)
    detector.remove()
    backward = [
        frame.spec for table, summary in notebook.batches for frame in summary.frames(table) if frame.position.frame > 2
    ]
    named = {f"{spec.module}.{row.label}" for spec in backward for row in spec.readings}
    assert {"0.weight.grad", "0.bias.grad", "1.weight.grad", "1.bias.grad"} <= named
    assert counter.frame_count == 1
