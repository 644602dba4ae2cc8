"""The nodes of autograd's graph -> the operators that made them, with what autograd has saved of their arguments."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
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
        funcs = operators_by_title().get(title_of(node), ()) if not is_model else ()
        self.calls = [call for func in funcs if (call := _call(func, node, saved)) is not None]
        """The operators that it may stand for, with what is known of their arguments."""
        self.given: dict[int, Tensor] = {}
        """What came in by an edge, where it was saved."""
        for number, name in enumerate(names_of_edges(self.calls[0].func, len(self.edges)) if self.calls else ()):
            if is_plain(saved.get(name)):
                self.given[number] = saved[name]
        results = [(_RESULT.fullmatch(name), value) for name, value in saved.items() if is_plain(value)]
        self.made = {int(found[1] or 0): value for found, value in results if found is not None}
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


def _call(func: Any, node: Any, saved: Mapping[str, Any]) -> OperatorCall | None:
    """None: the node is another overload's, or an argument of this one was not saved."""
    schema, count = func._schema, len(node.next_functions)
    rows = {row.name: row for row in schema.arguments}
    made = {row.name for row in schema.returns}
    unknown = saved.keys() - rows.keys() - made
    if not all(_RESULT.fullmatch(name) or name.endswith(_DERIVED) for name in unknown):
        return None
    arrows = {name: Arrow(number) for number, name in enumerate(names_of_edges(func, count))}
    if len(arrows) != count and not _takes_a_list(func):
        return None
    about = metadata(node, 0)
    told = {"size": list(about.shape), "shape": list(about.shape), "dtype": about.dtype} if about is not None else {}
    known: dict[str, Any] = {**told, **saved, **arrows}
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for name, row in rows.items():
        kind = str(row.type)
        if kind == "List[Tensor]":
            value: Any = [Arrow(number) for number in range(count)]
        elif name in known:
            value = known[name]
        elif row.has_default_value():
            value = row.default_value
        elif name in _NEVER_SAVED:
            value = _NEVER_SAVED[name]
        else:
            return None
        is_tensor = isinstance(value, Arrow) or is_plain(value)
        is_of_kind = "Tensor" in kind if is_tensor else kind != "Tensor" and not isinstance(value, Tensor)
        if not is_of_kind:
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

MASK = Guess(-math.inf)
"""What fills a mask, if a softmax of it is nan: a softmax of finite numbers never is."""

_NEVER_SAVED = {"half_to_float": False, "other": Guess(1.0), "value": MASK}
"""What autograd does not save of the arguments without a default."""

_RESULT = re.compile(r"result(\d*)")
"""The name under which a node saves an output."""

_DERIVED = ("_sizes", "_numel", "_scalar_type", "_options", "_sym_strides", "_storage_offset", "_dim")
"""How the names end under which a node saves something about an argument."""


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


def is_plain(value: Any) -> bool:
    """Whether it can be computed with here: nothing of another class, whose operators may communicate."""
    return type(value) in (Tensor, nn.Parameter)
