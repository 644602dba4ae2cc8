"""In a compiled graph, what the hooks hand over goes in one call at its end, and says what the hooks of eager modules say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from compiled import WAYS, Net, by_block, in_place, inside_a_function, whole
from models import Calls
from notebook import Notebook, watched
from rankwatch.hook.compiled import joined, traced
from rankwatch.shared.types.frame import Phase

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def step(call: Callable[..., Tensor], *batch: Tensor) -> None:
    call(*(batch or (torch.ones(4, 8),))).sum().backward()


class Graphs:
    """A backend that runs the graphs as they are, and counts the calls of ``record`` in each."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, module: fx.GraphModule, example: list[Tensor]) -> Callable[..., Any]:
        self.calls.append(sum(len(joined._calls(part)) for part in joined._graphs(module)))
        return module.forward


@pytest.mark.parametrize(("way", "calls"), [(whole, 1), (in_place, 1), (inside_a_function, 2), (by_block, 1)])
def test_a_graph_has_one_call_and_one_where_the_root_begins(way: Any, calls: int) -> None:
    """The hooks of the root itself, if it is of a user's class, torch.compile(model) calls outside of the graph."""
    model, graphs = Net(), Graphs()
    detector, _ = watched(model)
    step(way(model, graphs))
    assert detector.fault == ""
    assert set(graphs.calls) == {calls}  # torch 2.4 makes a graph for each block


def numbers(notebook: Notebook, options: dict[str, Any] | None = None) -> list[Any]:
    """What was sent of full batches, with the extremes as text: they are the same to the last bit, nan included."""
    every = (options or {}).get("every", 1)
    return [
        (frame.position, frame.spec.module, frame.spec.readings, str(frame.abs_min), str(frame.abs_max), frame.states)
        for table, summary in notebook.batches
        for frame in summary.frames(table)
        if summary.batch % every == 0
        and frame.spec.phase is not Phase.RECOMPUTE  # what a compiled checkpoint computes again has no hooks
    ]


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        *(
            pytest.param(one, marks=pytest.mark.slow)
            for one in ({"check": "batch"}, {"every": 2}, {"modules": ("blocks.1.*",)})
        ),
    ],
)
def test_compiled_frames_are_those_of_eager_modules(way: Any, checkpointed: bool, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    eager, compiled = Net(checkpointed=checkpointed), Net(checkpointed=checkpointed)
    compiled.load_state_dict(eager.state_dict())
    (_, said), (_, told) = watched(eager, **options), watched(compiled, **options)
    call = way(compiled, "aot_eager")
    for number in range(3):
        torch.manual_seed(number)
        batch = torch.randn(4, 8)
        step((lambda x: eager(x) * 2) if way is inside_a_function else eager, batch)
        step(call, batch)
    assert numbers(told, options) == numbers(said, options)
    assert {summary.batch for _, summary in said.batches} == {summary.batch for _, summary in told.batches} == {0, 1, 2}


@pytest.mark.parametrize("way", WAYS)
def test_the_first_bad_module_is_named_and_none_after_it_is_seen(way: Any) -> None:
    model = Net()
    _, notebook = watched(model, closeup=0)
    call = way(model, "aot_eager")
    step(call)
    with torch.no_grad():
        model.blocks[1].up.bias[3] = float("inf")
    trip = notebook.trip_of(step, call)
    assert (trip.position.batch, trip.frame.spec.module) == (1, "blocks.1.up")


def test_without_dynamos_function_each_hook_has_its_call_and_the_frames_are_the_same(monkeypatch: Any) -> None:
    told = []
    for is_missing in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, graphs = Net(), Graphs()
        _, notebook = watched(model)
        if is_missing:
            monkeypatch.delattr("torch._dynamo.output_graph.OutputGraph.add_graph_finalizer")
        step(whole(model, graphs))
        told.append(numbers(notebook))
        assert graphs.calls == [16 if is_missing else 1]
    assert told[0] == told[1]


def test_a_graph_that_outlives_a_watch_still_serves_the_other_one() -> None:
    first, second = Net(), Net()
    (detector, gone), (_, notebook) = watched(first), watched(second)
    call = torch.compile(lambda x: first(x) + second(x), backend="aot_eager")
    step(call)
    before = len(numbers(gone)), len(numbers(notebook))
    assert before[0] == before[1] > 0
    for hooks in [hooks for module in first.modules() for hooks in (module._forward_hooks, module._forward_pre_hooks)]:
        for hook in hooks.values():
            del traced._receivers[int(vars(hook)["key"])]
    step(call)
    assert (len(numbers(gone)), len(numbers(notebook))) == (before[0], 2 * before[1])
    assert detector.fault == ""


@torch.library.custom_op("rankwatch_tests::finite_only", mutates_args=(), schema="(Tensor x) -> Tensor")
def finite_only(x: Tensor) -> Tensor:
    """Raises an exception at what is not finite, as an index that was computed from it may."""
    if not x.isfinite().all():
        raise IndexError("out of range")
    return x.clone()


finite_only.register_fake(lambda x: torch.empty_like(x))
finite_only.register_autograd(lambda context, gradient: gradient)


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks: Any = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8), Calls(finite_only), nn.Linear(8, 8)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


# torch 2.4 moves our calls, and what raises, within a graph of model.compile().
IN_ORDER = [whole] if torch.__version__.startswith("2.4.") else [whole, in_place]


@pytest.mark.parametrize("way", IN_ORDER)
def test_what_was_bad_before_a_graph_raised_in_its_first_run_is_found(way: Any) -> None:
    model = Broken()
    nn.init.constant_(model.blocks[0].weight, 1.0)
    nn.init.constant_(model.blocks[1].weight, 3e38)
    _, notebook = watched(model, closeup=0)
    with pytest.raises(IndexError, match="out of range"):
        step(way(model, "aot_eager"))
    assert [position for position, _ in notebook.found] == [(0, 0, 1)]


@pytest.mark.parametrize("way", [whole, in_place, by_block])
def test_a_batch_goes_on_in_full_after_a_graph_that_raised_with_nothing_bad(
    way: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In eval mode with gradients, the next forward belongs to the batch of the one that raised."""
    model = Broken().eval()
    _, notebook = watched(model, closeup=0)
    call = way(model, "aot_eager")
    step(call)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "isfinite", lambda x: torch.zeros_like(x, dtype=torch.bool))
        with pytest.raises(IndexError):
            step(call)
    step(call)
    assert [len(table.specs) for table, _ in notebook.batches] == [6, 6]


def test_a_direct_call_without_gradients_hides_no_batch() -> None:
    """A teacher comes first, in the graph of a training that never calls the root."""
    model = nn.ModuleDict({"teacher": nn.Linear(8, 8), "student": nn.Linear(8, 8)})

    def loss(x: Tensor) -> Tensor:
        with torch.no_grad():
            target = model["teacher"](x)
        difference: Tensor = model["student"](x) - target
        return difference.square()

    told = []
    for call in (loss, torch.compile(loss, backend="aot_eager")):
        _, notebook = watched(model)
        for _ in range(2):
            step(call)
        told.append(numbers(notebook))
    assert told[0]
    assert told[0] == told[1]


def test_an_error_of_ours_while_a_graph_is_compiled_breaks_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, graphs = Net(), Graphs()
    _, notebook = watched(model)
    monkeypatch.setattr(joined, "_join", lambda graph, calls: 1 / 0)
    step(whole(model, graphs))
    assert graphs.calls == [16]
    assert len(numbers(notebook)) == 18
    assert "keep a call each" in caplog.text


@pytest.mark.parametrize("way", IN_ORDER)
def test_what_was_bad_before_a_graph_raised_is_found(way: Any) -> None:
    model = Broken()
    _, notebook = watched(model, closeup=0)
    nn.init.constant_(model.blocks[0].weight, 0.01)
    nn.init.constant_(model.blocks[1].weight, 10.0)
    call = way(model, "aot_eager")
    step(call)
    with pytest.raises(IndexError, match="out of range"):
        step(call, torch.full((4, 8), 3e38))
    ((position, _),) = notebook.found
    assert position == (1, 0, 1)
    model.zero_grad()
    step(call)
    assert [summary.batch for _, summary in notebook.batches] == [0, 2]


def test_the_operator_is_not_for_cuda_graphs() -> None:
    tag = getattr(torch.Tag, "cudagraph_unsafe", None)
    if tag is None:
        pytest.skip("this torch has no such tag, and cuts no CUDA graph in parts")
    assert tag in torch.ops.rankwatch.record.default.tags


@pytest.mark.parametrize(("devices", "calls"), [(("meta", "meta"), 1), (("meta", "cpu"), 2)])
def test_the_rows_of_a_device_are_joined_and_those_of_several_are_not(devices: tuple[str, str], calls: int) -> None:
    graph = fx.Graph()
    order, *given = [graph.placeholder(name) for name in ("order", "a", "b", "key")]
    for node, device in zip(given[:2], devices, strict=True):
        node.meta["example_value"] = torch.empty((2, 2), device=device)
        graph.call_function(torch.ops.rankwatch.record, (order, [node], [given[2]], "leave\x1e"))
    graph.output(())
    module = fx.GraphModule(nn.Module(), graph)
    joined._join_calls(module)
    module.graph.lint()
    found = joined._calls(module)
    assert len(found) == calls
    assert [node.target for node in module.graph.nodes if node.op == "call_function"].count(torch.cat) == 2 - calls
    assert [str(call.args[3]).count("leave") for call in found] == [2 // calls] * calls
