"""Compiled models: a watch adds only tensor code to their graphs, and the verdicts are the same as in eager mode."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import rankwatch
from notebook import watched


class Block(nn.Module):
    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.act = nn.GELU()
        self.down = nn.Linear(16, 8)
        self.checkpointed = checkpointed

    def inner(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.act(self.up(self.norm(x))))
        return out

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = checkpoint(self.inner, x, use_reentrant=False) if self.checkpointed else self.inner(x)
        return x + inner


class Net(nn.Module):
    def __init__(self, depth: int = 3, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks: Any = nn.ModuleList(Block(checkpointed=checkpointed) for _ in range(depth))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def whole(model: nn.Module, backend: Any) -> Callable[[Tensor], Tensor]:
    return torch.compile(model, backend=backend, fullgraph=True)


def in_place(model: nn.Module, backend: Any) -> Callable[[Tensor], Tensor]:
    model.compile(backend=backend, fullgraph=True)
    return model


def inside_a_function(model: nn.Module, backend: Any) -> Callable[[Tensor], Tensor]:
    return torch.compile(lambda x: model(x) * 2, backend=backend, fullgraph=True)


def by_block(model: Net, backend: Any) -> Callable[[Tensor], Tensor]:
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True)
    return model


def train(step: Callable[[Tensor], Tensor], model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for seed in range(4):
        torch.manual_seed(seed)
        step(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


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
                step = compiled(model, counter)
                train(step, model)
                graphs.append(counter.frame_count)
                with torch.no_grad():
                    model.blocks[2].up.bias[3] = math.inf
                with pytest.raises(rankwatch.OverflowDetected, match=r"batch 4: blocks\.2\.up \(Linear\), bias: inf"):
                    step(torch.ones(4, 8))
        else:
            train(compiled(model, counter), model)
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


class Fuse(nn.Module):
    """The identity as an operation of the graph; it fails once the fuse is blown."""

    blown = False

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = pass_fuse(x)
        return out


@torch.library.custom_op("rankwatch_tests::fuse", mutates_args=(), schema="(Tensor x) -> Tensor")
def pass_fuse(x: Tensor) -> Tensor:
    if Fuse.blown:
        raise RuntimeError("blown")
    return x.clone()


pass_fuse.register_fake(lambda x: torch.empty_like(x))
pass_fuse.register_autograd(lambda context, gradient: gradient)


def test_a_compiled_forward_that_raises_half_way_ends_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Fuse(), nn.Linear(8, 2))
    detector, notebook = watched(model)
    step = whole(model, "aot_eager")
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
    train(whole(model, counter), model)
    detector.remove()
    backward = [
        frame.spec for table, summary in notebook.batches for frame in summary.frames(table) if frame.position.frame > 2
    ]
    named = {f"{spec.module}.{row.label}" for spec in backward for row in spec.readings}
    assert {"0.weight.grad", "0.bias.grad", "1.weight.grad", "1.bias.grad"} <= named
    assert counter.frame_count == 1
