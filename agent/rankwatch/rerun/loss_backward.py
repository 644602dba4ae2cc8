"""Where a finite loss made a bad gradient: looks at what each operator between the loss and the model's outputs hands on.

An ``exp`` behind a clamp, a ratio behind a min: the loss is finite, and its gradient is 0 * inf. The first operator that hands
on a bad gradient is the one, as all before it handed on finite ones. What autograd had saved for it tells why.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from ..shared.types.frame import Kind, State
from ..shared.types.trip import LOSS, Operator, Source
from ..touch.unseen import quietly
from .arguments import reading_of, state_of_tensor
from .details import detail_of
from .graph_nodes import GraphNode, is_plain, name_of_node, saved_names
from .loss_graph import Outputs, perhaps
from .loss_line import lines_of_operator

log = logging.getLogger(__name__)

MAX_NODES = 200
"""Operators between the loss and the outputs."""

_HANDS_ON = {
    "Abs", "Add", "Alias", "AsStrided", "Cat", "Clamp", "ClampMax", "ClampMin", "Clone", "Diagonal", "Expand", "Gather", "Index",
    "IndexSelect", "LogSoftmax", "MaskedFill", "MaskedSelect", "Max", "Maximum", "Mean", "Min", "Minimum", "Neg", "NllLoss",
    "NllLoss2D", "Permute", "Relu", "ReshapeAlias", "Rsub", "Select", "Sigmoid", "Slice", "Softmax", "Split", "Squeeze", "Stack",
    "Sub", "Sum", "T", "Tanh", "Threshold", "ToCopy", "Transpose", "Unbind", "UnsafeView", "Unsqueeze", "View", "Where",
}  # fmt: skip
"""Operators, by autograd's names, that hand on a finite gradient as a finite one. All others are looked at."""


class LossBackward:
    """One backward of these losses, until ``remove``. ``is_model``: whether a module is the model, or has it inside."""

    def __init__(self, losses: Sequence[Tensor], outputs: Outputs, is_model: Callable[[nn.Module], bool]) -> None:
        self._is_model = is_model
        self._found: Operator | None = None
        self._note = ""
        self._flags: list[tuple[str, str, Tensor]] = []
        """On a device: the names of an operator and of its node, and the largest number that it handed on."""
        self._nodes = [node for node in _between(losses, outputs) if not _hands_on(node.name())]
        self._handles = [node.register_hook(partial(self._hook, node)) for node in self._nodes]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._nodes = [], []

    def origin(self) -> tuple[Operator | None, str]:
        """The operator that made the gradient bad, if it is known; and a note on its line."""
        if self._found is None:
            bad = next((one for one in self._flags if not math.isfinite(float(one[-1]))), None)
            if bad is not None:
                name, node, value = bad
                self._found = Operator(name, (), reading_of("gradient", Kind.OUTPUT, value), node=node, module=LOSS)
        return self._found, self._note

    def _hook(self, node: Any, handed: Any, _: Any) -> None:
        if self._found is None:
            quietly(self._look, node, handed)

    def _look(self, node: Any, handed: Any) -> None:
        try:
            # Gradients are on in a backward with ``create_graph`` alone; the context costs as much as the rest.
            with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
                for value in handed:
                    if is_plain(value) and value.dtype.is_floating_point and value.numel():
                        self._look_at(node, value)
        except Exception as error:  # noqa: BLE001  the training's backward runs
            log.debug("cannot look at what %s hands on: %r", node.name(), error)

    def _look_at(self, node: Any, value: Tensor) -> None:
        if not value.is_cpu:
            self._flags.append((name_of_node(node, GraphNode(node, {}, is_model=False)), node.name(), value.abs().amax()))
        elif self._found is None and not math.isfinite(float(value.sum())) and state_of_tensor(value) is not State.FINITE:
            self._found = self._operator(node, value)

    def _operator(self, node: Any, value: Tensor) -> Operator:
        saved = _saved(node)
        known = GraphNode(node, saved, is_model=False)
        name = name_of_node(node, known)
        given = {label: one for label, one in saved.items() if is_plain(one) or type(one) is float}
        detail = detail_of(known.calls[0].func, known.calls[0].args, known.calls[0].kwargs) if known.calls else ""
        return Operator(
            name,
            tuple([reading_of(label, Kind.INPUT, one) for label, one in given.items()]),
            reading_of("gradient", Kind.OUTPUT, value),
            _operands(given, value),
            tuple([tuple(one.shape) if isinstance(one, Tensor) else () for one in given.values()]),
            self._line_of(name),
            node.name(),
            LOSS,
            detail,
        )

    def _line_of(self, name: str) -> Source | None:
        parts = name.split(".")
        lines, is_sure = lines_of_operator(parts[1], self._is_model) if len(parts) > 1 else ([], False)
        self._note = perhaps(lines) if not is_sure else ""
        return lines[0] if is_sure else None


@lru_cache(MAX_NODES)
def _hands_on(name: str) -> bool:
    """Whether a node of this name hands on a finite gradient as a finite one."""
    title, is_one, _ = name.rpartition("Backward")
    return bool(is_one) and title in _HANDS_ON


def _between(losses: Sequence[Tensor], outputs: Outputs) -> list[Any]:
    """The nodes of the graph from the losses to the model's outputs, those nearest to the losses first.

    Where there are too many and the outputs are among them, the rest is of a loss that depends on the model in another way, too,
    as a penalty of gradients does: the first ones are looked at. Where they are not, there are none.
    """
    seen: dict[Any, None] = {}
    rest = deque(loss.grad_fn for loss in losses)
    meets = False
    while rest:
        node = rest.popleft()
        if node is None or node in seen or hasattr(node, "variable"):
            continue
        if node in outputs:
            meets = True
        elif len(seen) < MAX_NODES:
            seen[node] = None
            rest += [below for below, _ in node.next_functions]
        else:
            return list(seen) if meets else []
    return list(seen)


def _saved(node: Any) -> dict[str, Any]:
    found = {}
    for name in saved_names(type(node)):
        try:
            found[name] = getattr(node, f"_saved_{name}")
        except RuntimeError:  # it was changed in place, or is freed
            continue
    return found


def _operands(given: dict[str, Any], value: Tensor) -> tuple[float, ...]:
    """What went into the first element whose gradient is bad; empty: the operator has saved something else."""
    alike = [one for one in given.values() if not isinstance(one, Tensor) or one.shape == value.shape]
    if "result" in given or len(alike) < len(given) or not given:
        return ()
    at = tuple((~torch.isfinite(value)).nonzero()[0].tolist())
    return tuple([float(one[at]) if isinstance(one, Tensor) else one for one in alike])
