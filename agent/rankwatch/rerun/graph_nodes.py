"""The nodes of autograd's graph -> the operators that made them, with what autograd has saved of their arguments."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Edge = tuple[Any, int]
"""An output of a node: the node, and the number of the output."""


class Arrow(NamedTuple):
    """Stands in a call for what came in by this edge of the node."""

    number: int


class Guess(NamedTuple):
    """Stands in a call for a constant that autograd has not saved."""

    value: Any


class OperatorCall(NamedTuple):
    """An operator with its arguments."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class GraphNode:
    """A node of the graph: the calls that it may stand for, and what is known of its inputs and outputs."""

    def __init__(self, node: Any, saved: Mapping[str, Any], *, is_model: bool) -> None:
        self.edges: tuple[Edge | None, ...] = tuple([edge if edge[0] is not None else None for edge in node.next_functions])
        self.is_model = is_model
        self.calls = list(_calls(node, saved)) if not is_model else []
        self.given: dict[int, Tensor] = {}
        """What came in by an edge, where it was saved."""
        for number, name in enumerate(names_of_edges(self.calls[0].func, len(self.edges)) if self.calls else ()):
            if is_plain(saved.get(name)):
                self.given[number] = saved[name]
        self.made = {_number_of(name): value for name, value in saved.items() if _is_result(name) and is_plain(value)}
        """Its outputs, where they were saved."""

    @property
    def has_unknown(self) -> bool:
        """Whether something went in that is not at hand, and came by no edge of another node."""
        return not self.calls or any(edge is None and number not in self.given for number, edge in enumerate(self.edges))


def name_of_node(node: Any, known: GraphNode) -> str:
    if known.calls:
        return str(known.calls[0].func)
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        if type(node).__name__ == "CompiledFunctionBackward":
            return "compiled code"
        return f"the autograd.Function {type(node).__name__.removesuffix('Backward')}"
    found = operators_by_title().get(title_of(node), [])
    return str(found[0]) if found else str(node.name())


def _calls(node: Any, saved: Mapping[str, Any]) -> Iterator[OperatorCall]:
    """The operators that a node may stand for, with what is known of their arguments."""
    for func in operators_by_title().get(title_of(node), ()):
        call = _call(func, node, saved)
        if call is not None:
            yield call


def _call(func: Any, node: Any, saved: Mapping[str, Any]) -> OperatorCall | None:
    """None: the node is another overload's, or an argument of this one was not saved."""
    schema, count = func._schema, len(node.next_functions)
    rows = {row.name: row for row in schema.arguments}
    made = {row.name for row in schema.returns}
    if any(name not in rows and name not in made and not _is_result(name) and not _is_derived(name) for name in saved):
        return None
    arrows = {name: Arrow(number) for number, name in enumerate(names_of_edges(func, count))}
    if len(arrows) != count and not _takes_a_list(func):
        return None
    about = metadata(node, 0)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for name, row in rows.items():
        if name in arrows:
            value: Any = arrows[name]
        elif str(row.type) == "List[Tensor]":
            value = [Arrow(number) for number in range(count)]
        elif name in saved:
            value = saved[name]
        elif name in ("size", "shape") and about is not None:
            value = list(about.shape)
        elif name == "dtype" and about is not None:
            value = about.dtype
        elif row.has_default_value():
            value = row.default_value
        elif name in _ASSUMED:
            value = _ASSUMED[name]
        elif name in _CONSTANTS:
            value = _CONSTANTS[name]
        else:
            return None
        if str(row.type) == "Tensor" and not isinstance(value, (Tensor, Arrow)):
            return None
        if isinstance(value, (Tensor, Arrow)) and "Tensor" not in str(row.type):
            return None
        if isinstance(value, Tensor) and not is_plain(value):
            return None
        if row.kwarg_only:
            kwargs[name] = value
        else:
            args.append(value)
    return OperatorCall(func, tuple(args), kwargs)


def names_of_edges(func: Any, count: int) -> list[str]:
    """The arguments that may need a gradient: a node has an edge for each of them."""
    names = [row.name for row in func._schema.arguments if str(row.type) in ("Tensor", "Optional[Tensor]")]
    return [name for name in names if name not in _CHOOSE][:count] if not _takes_a_list(func) else []


def _takes_a_list(func: Any) -> bool:
    return any(str(row.type) == "List[Tensor]" for row in func._schema.arguments)


_CHOOSE = ("condition", "index", "indices", "mask")
"""Arguments that choose elements."""

_ASSUMED = {"half_to_float": False}

MASK = Guess(-math.inf)
"""What fills a mask, if a softmax of it is nan: a softmax of finite numbers never is."""


_CONSTANTS = {"other": Guess(1.0), "value": MASK}
"""Numbers that autograd does not save."""


def short_of(func: Any) -> str:
    return str(func._schema.name).partition("::")[2]


def title_of(node: Any) -> str:
    """``Log`` of ``LogBackward0``; empty if autograd has not named it after an operator."""
    name, is_one, _ = str(node.name()).rpartition("Backward")
    return name if is_one else ""


@functools.cache
def operators_by_title() -> dict[str, list[Any]]:
    """The operators that have a derivative of their own, by the name that autograd gives to their nodes."""
    found: dict[str, list[Any]] = {}
    for name in sorted(torch._C._dispatch_get_all_op_names(), key=lambda name: (len(name), name)):
        full, _, overload = name.partition(".")
        plain = full.removeprefix("aten::")
        is_other = plain == full or plain.endswith("_") or "out" in overload
        if is_other or torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"):
            continue
        title = "".join([part.title() for part in plain.split("_")]) + "Backward"
        func = getattr(getattr(torch.ops.aten, plain), overload or "default", None)
        if func is not None and torch.Tag.nondeterministic_seeded not in func.tags:
            found.setdefault(title.replace("ForwardBackward", "Backward").removesuffix("Backward"), []).append(func)
    return found


def saved_names(kind: Any) -> list[str]:
    return [name.removeprefix("_saved_") for name in dir(kind) if name.startswith("_saved_")]


def metadata(node: Any, number: int) -> Any:
    """Shape and dtype of an output of a node; None if this release of torch does not tell."""
    found = getattr(node, "_input_metadata", ())
    return found[number] if number < len(found) else None


def _is_derived(name: str) -> bool:
    return name.endswith(("_sizes", "_numel", "_scalar_type", "_options", "_sym_strides", "_storage_offset", "_dim"))


def _is_result(name: str) -> bool:
    return name == "result" or (name.startswith("result") and name[6:].isdigit())


def _number_of(name: str) -> int:
    return int(name.removeprefix("result") or 0)


def is_plain(value: Any) -> bool:
    """Whether it can be computed with here: nothing of another class, whose operators may communicate."""
    return type(value) in (Tensor, nn.Parameter)
