"""Compiled models: a watch adds only tensor code to their graphs, and the verdicts are the same as in eager mode."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import rankwatch
from compiled import Net, by_block, in_place, inside_a_function, whole
from models import Calls
from notebook import learn, sgd, watched
from rankwatch.shared.types.tuning import Tuning
from rankwatch.touch import torch_private

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def train(step: Callable[[Tensor], Tensor], model: nn.Module, batches: int = 4) -> None:
    optimizer = sgd(model, 1e-3)
    for seed in range(batches):
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


class Graphs:
    """Keeps the graphs, and runs them as they are."""

    def __init__(self) -> None:
        self.made: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.made.append(graph)
        return graph.forward

    @property
    def readings(self) -> list[int]:
        """Of each graph, the numbers of tensors that are measured in it."""
        return [sum("amax" in str(node.target) for node in one.graph.nodes) for one in self.made]


MODULES = 16
"""Those of the net, without the root and the list of its blocks."""


def traced_root() -> nn.Module:
    """torch compiles a root of a class of its own with the root's hooks, and calls those of others outside of the graph."""
    return nn.Sequential(*Net().blocks, nn.Linear(8, 2))


ROOTS = pytest.mark.parametrize("build", [Net, traced_root])


@ROOTS
@pytest.mark.parametrize("compiled", [whole, in_place])
def test_between_full_batches_a_second_graph_runs_without_the_readings_of_modules(compiled: Any, build: Any) -> None:
    model, graphs = build(), Graphs()
    _, notebook = watched(model, every=3)
    step = compiled(model, graphs, fullgraph=True)
    train(step, model, 7)
    full, lean = graphs.readings
    assert (full > MODULES, lean < 4) == (True, True)
    with torch.no_grad():
        model.eval()
        step(torch.ones(4, 8))
    assert graphs.readings == [full, lean, full]
    model.train()
    train(step, model, 5)
    assert graphs.readings == [full, lean, full]
    assert [len(notebook.frames(batch)) for batch in range(7)] == [MODULES + 2, 2, 2] * 2 + [MODULES + 2]


@pytest.mark.parametrize("compiled", [whole, in_place])
def test_the_second_graph_is_that_of_a_model_that_is_not_watched(compiled: Any) -> None:
    made = Graphs()
    for is_watched in (False, True):
        torch._dynamo.reset()
        model = Net()
        if is_watched:
            watched(model, every=3)
        train(compiled(model, made, fullgraph=True), model, 2)
    unwatched, full, lean = (
        [str(node.target) for node in one.graph.nodes if node.op.startswith("call")] for one in made.made
    )
    assert (lean, full == unwatched) == (unwatched, False)


def test_blocks_that_share_a_graph_share_the_one_without_readings() -> None:
    model, graphs = Net(12), Graphs()
    _, notebook = watched(model, every=3)
    step = by_block(model, graphs, fullgraph=True)
    train(step, model, 7)
    first, later, *lean = [
        bool(found) for found in graphs.readings
    ]  # of the first block, and of those whose input has a gradient
    assert (first, later, lean) == (True, True, [False, False])
    assert len({len(notebook.frames(batch)) for batch in (0, 3, 6)}) == 1
    assert {len(notebook.frames(batch)) for batch in (1, 2, 4, 5)} == {2}


@ROOTS
@pytest.mark.parametrize("compiled", [whole, in_place, by_block])
def test_what_goes_bad_in_the_graph_without_readings_is_named(compiled: Any, build: Any) -> None:
    model = build()
    if compiled is by_block and build is traced_root:
        model.blocks = [*model]
    bad = model.get_submodule("blocks.2.up" if build is Net else "2.up")
    with rankwatch.watch(model, every=10):
        step = compiled(model, "eager", fullgraph=True)
        train(step, model)
        with torch.no_grad():
            bad.bias[3] = math.inf
        with pytest.raises(rankwatch.OverflowDetected, match=r"batch 4: (blocks\.)?2\.up \(Linear\), bias: inf"):
            step(torch.ones(4, 8))


class CheckpointedNet(Net):
    """Its blocks are checkpointed outside of their graphs, which run again in the backward."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        out: Tensor = self.head(x)
        return out


def test_what_a_checkpoint_runs_again_in_the_backward_is_the_graph_of_the_forward() -> None:
    model, counter = CheckpointedNet(), CompileCounterWithBackend("aot_eager")
    _, notebook = watched(model, every=2)
    train(by_block(model, counter, fullgraph=True), model, 5)
    assert counter.frame_count == 2  # of the first block, and of those whose input has a gradient
    assert {len(notebook.frames(batch)) for batch in (1, 3)} == {2}


def test_no_graph_is_lean_before_a_backward_is_known_to_run_none_again() -> None:
    model, graphs = Net(), Graphs()
    watched(model, every=2)
    step = whole(model, graphs, fullgraph=True)
    outputs = [step(torch.ones(4, 8)).sum() for _ in range(4)]
    assert len(graphs.made) == 1
    learn(sum(outputs, start=torch.zeros(())), sgd(model, 1e-3))
    train(step, model, 2)
    assert len(graphs.made) == 2


def test_where_the_training_lets_nothing_be_compiled_again_each_batch_runs_the_graph_with_readings() -> None:
    model, graphs = Net(), Graphs()
    _, notebook = watched(model, every=3)
    step = whole(model, graphs, fullgraph=True)
    train(step, model, 1)
    with torch.compiler.set_stance("fail_on_recompile"):
        train(step, model, 2)
    with torch._dynamo.config.patch(error_on_recompile=True):
        train(step, model, 1)
    assert len(graphs.made) == 1
    assert [len(notebook.frames(batch)) for batch in range(4)] == [MODULES + 2, 2, 2, MODULES + 2]


@ROOTS
def test_the_second_graph_leaves_the_training_as_many_of_its_own_as_before(
    build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_private, "_given_room", [])
    with torch._dynamo.config.patch(recompile_limit=3):
        model, graphs = build(), Graphs()
        _, notebook = watched(model, every=2)
        step = whole(model, graphs, dynamic=False)
        optimizer = sgd(model, 1e-3)
        for rows in (2, 3, 4):  # each is a graph of its own, with readings and without
            for _ in range(2):
                learn(step(torch.randn(rows, 8)).sum(), optimizer)
    assert [found > MODULES for found in graphs.readings] == [True, False] * 3
    assert {len(notebook.frames(batch)) for batch in (0, 2, 4)} == {MODULES + 2}


def test_a_batch_that_turns_out_to_be_full_after_its_graph_was_chosen_has_the_root_alone() -> None:
    model = traced_root()
    detector, notebook = watched(model, every=10)
    step = whole(model, "eager", fullgraph=True)
    train(step, model, 2)
    detector.tune(Tuning(every=1))  # it is taken as the graph begins
    train(step, model, 2)
    assert [len(notebook.frames(batch)) for batch in range(4)] == [MODULES + 2, 2, 2, MODULES + 2]
    assert detector.fault == ""
