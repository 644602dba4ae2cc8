"""One call of the opaque operator in each compiled graph: what all hooks in it hand over goes at its end.

An opaque call costs microseconds at each run, ends what Inductor may fuse, and cuts a CUDA graph in two. The call without
numbers, by which the root's forward begins, stays where it is. Dynamo lets functions change a graph before it is compiled
(private: without them each hook has its own call, and the numbers are the same).
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, fx

from ...touch.parts import modules_in

log = logging.getLogger(__name__)

PLANS = "\x1d"
"""Comes between the plans of hooks."""
TRAIN, EVAL, GIVEN, LEAVE = "train", "eval", "given", "leave"
BEGINNINGS = TRAIN, EVAL

graphs = 0
"""Graphs with our hooks that Dynamo has made in this process."""


def join_at_end() -> None:
    """Call this while Dynamo traces a graph with a call of ``record``. Its calls are joined before it is compiled."""
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        output: Any = InstructionTranslator.current_tx().output
        if _join_calls not in output.register_finalizer_fns:
            output.add_graph_finalizer(_join_calls)
    except Exception as error:  # noqa: BLE001  nothing traces, or it is private and has changed
        log.debug("the hooks of a compiled graph keep a call each: %s: %s", type(error).__name__, error)


def _join_calls(module: fx.GraphModule) -> None:
    """Joins the calls of a graph, and those of each graph within it: of the body of an activation checkpoint, say."""
    global graphs
    graphs += 1
    try:
        for part in _graphs(module):
            for together in _runs(part):
                if len(together) > 1 and len({_example(one).device for call in together for one in _given(call, 1)}) <= 1:
                    _join(part.graph, together)
            part.recompile()
    except Exception:  # the graph is compiled all the same: until `_join` erases them, all calls are in it
        log.exception("rankwatch: the hooks of a compiled graph keep a call each")


def _runs(module: fx.GraphModule) -> list[list[fx.Node]]:
    """The calls that may become one: none of them, and no call in a graph within, would change its place among the others."""
    within = {name for name, part in module.named_children() if any(map(_calls, _graphs(part)))}
    runs: list[list[fx.Node]] = [[]]
    calls = set(_calls(module))
    for node in module.graph.nodes:
        if node in calls and not str(node.args[3]).startswith(BEGINNINGS):
            runs[-1].append(node)
        elif node in calls or any(one.op == "get_attr" and one.target in within for one in node.all_input_nodes):
            runs.append([])
    return runs


def _graphs(module: torch.nn.Module) -> list[fx.GraphModule]:
    return [part for part in modules_in(module) if isinstance(part, fx.GraphModule)]


def _calls(module: fx.GraphModule) -> list[fx.Node]:
    record = torch.ops.rankwatch.record
    return [node for node in module.graph.nodes if node.op == "call_function" and node.target in (record, record.default)]


def _join(graph: fx.Graph, calls: list[fx.Node]) -> None:
    numbers, keys = ([one for call in calls for one in _given(call, part)] for part in (1, 2))
    plan = PLANS.join(str(call.args[3]) for call in calls)
    are_rows = len(numbers) > 1 and _example(numbers[0]).ndim > 0  # on a device
    with graph.inserting_before(calls[-1]):
        if are_rows:
            numbers = [graph.call_function(torch.cat, (numbers,))]
        joined = graph.call_function(torch.ops.rankwatch.record, (calls[-1].args[0], numbers, keys, plan))
    joined.meta.update(calls[-1].meta)
    for call in calls:
        graph.erase_node(call)


def _given(call: Any, part: int) -> list[fx.Node]:
    return list(call.args[part])


def _example(node: fx.Node) -> Tensor:
    example: Tensor = node.meta["example_value"]
    return example
