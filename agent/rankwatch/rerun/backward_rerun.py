"""Runs a rank's own batch again, forward and backward, without any collective: what this rank's part of a gradient was.

The loss is the user's code, and is not run again: the gradients that it handed to the root's outputs were kept, by
reference. The gradients of this backward go nowhere: no ``.grad`` changes, and no hook that waits for one is called.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..measure.walk import outputs_of
from ..shared.bounded import BoundedDict
from ..shared.types.frame import State
from ..shared.types.trip import Operator, Source
from ..touch.torch_private import graph_node, graph_task
from ..touch.whose_code import owner_of, text_of
from .arguments import Input, state_of_tensor
from .careful import Altered, Careful
from .engine import Ran, Rerun, Watch
from .forward import Forward, RootEntry
from .limit import Limit
from .repetition import Repeated, Repetition, why_it_differs
from .user_line import caller_of

MAX_NODES = 5_000
"""Of a graph, that are looked at for an output that another output was made from."""

NEAR = 16
"""Nodes up to an output that two graphs must have alike to count as the same one: those of the model's last operators."""

MAX_GRAPHS = 64
"""Looks of graphs that are remembered. A forward that takes another way in each batch is walked through each time."""

Made: TypeAlias = "Mapping[int, frozenset[int]]"
"""For the number of an output, those of the later ones that were made from it."""

_NOTHING_MADE: Made = MappingProxyType({})

_known = WeakKeyDictionary[nn.Module, BoundedDict[tuple[object, ...], Made]]()
"""By root, and by the look of the graph."""

_OTHER_WAYS = (
    "it came by a way that does not lead through the model's outputs, the training changed it after the backward, or it did not "
    "recur"
)
OTHERWISE = f"run again, it was finite: {_OTHER_WAYS}"
OTHERWISE_COMPILED = f"run again eagerly, it was finite: the compiled code made it, {_OTHER_WAYS}"

FROM_THE_LOSS = "not run again: the gradient that came from the loss was bad, and the loss is the user's code"


class RootRun:
    """A forward of the root, and the gradients that the loss handed to its outputs.

    ``gradients`` has one entry for each backward that came: the gradients by the number of the output (see ``outputs_of``).
    An output that another one was made from, as a loss is made from logits, needs none: its gradient follows.
    """

    def __init__(
        self,
        entry: RootEntry,
        output: Any,
        *,
        gradients: Sequence[dict[int, Tensor]] = (),
        is_compiled: bool = False,
    ) -> None:
        entry.leave()
        self.entry = entry
        self.is_compiled = is_compiled
        self.gradients = list(gradients)
        self._task = -1
        self._made = _made_of(entry.module, output)

    def keep(self, number: int, gradient: Tensor | None) -> None:
        """A backward hands a gradient to an output. None is a gradient of 0."""
        task = graph_task()
        if task != self._task or not self.gradients:
            self._task = task
            self.gradients.append({})
        handed = self.gradients[-1]
        if gradient is not None and not any(later in handed for later in self._made.get(number, ())):
            handed[number] = gradient.detach()

    @property
    def was_handed_bad(self) -> bool:
        """Whether a gradient that came from the loss was not finite."""
        return any(state_of_tensor(one) is not State.FINITE for handed in self.gradients for one in handed.values())

    @property
    def forward(self) -> Forward:
        """The forward alone."""
        return Forward(self.entry.module, self.entry.args, self.entry.kwargs, "output", entry=self.entry)

    def again(self, mode: Careful, watch: Watch | None = None) -> Ran[Tensor | None]:
        """Runs it again, forward and backward, if it may be. ``watch`` is called for each module that runs."""
        if why := self.forward.refusal:
            return Ran(None, Altered(), why)
        return Rerun(self.forward, mode, watch).backward(self.gradients)

    @property
    def kept(self) -> Iterator[Tensor]:
        """What it keeps alive."""
        yield from (gradient for handed in self.gradients for gradient in handed.values())
        yield from self.entry.given


def _made_of(root: nn.Module, output: Any) -> Made:
    """For each output the later ones that were made from it: found in the graph, and remembered for graphs that look the same.

    A walk through the graph of T5-small takes 1.4 ms, and batches hardly ever differ in their graph. Two graphs look the same if
    the nodes of their outputs do, and the nodes next to them, with as many nodes in between.
    """
    nodes = [one.grad_fn for one in outputs_of(output)]
    if len(nodes) < 2:
        return _NOTHING_MADE
    lowest = min(map(_sequence, nodes))
    near = [before for node in nodes for before in _before(node, lowest, NEAR)]
    look = tuple([(node.name(), _sequence(node) - lowest) for node in near])
    known = _known.setdefault(root, BoundedDict(MAX_GRAPHS))
    made = known.get(look)
    if made is None:
        made = known[look] = _made_from(nodes, lowest)
    return made


def _made_from(nodes: Sequence[Any], lowest: int) -> Made:
    """``nodes``: those of the outputs, none of which is older than ``lowest``."""
    numbers: dict[Any, int] = {}
    for number, node in enumerate(nodes):
        numbers.setdefault(node, number)
    found: dict[int, set[int]] = {}
    for start, number in numbers.items():
        for node in _before(start, lowest, MAX_NODES)[1:]:
            if node in numbers:
                found.setdefault(numbers[node], set()).add(number)
    return {number: frozenset(later) for number, later in found.items()}


def _before(start: Any, lowest: int, most: int) -> list[Any]:
    """A node, and those that it was made from: the nearest first, ``most`` in all, none older than ``lowest``."""
    seen, found = {start}, [start]
    for node in found:  # which grows
        for before, _ in node.next_functions:
            if before is None or before in seen or not lowest <= _sequence(before) < _LEAF:
                continue
            if len(found) == most:
                return found
            seen.add(before)
            found.append(before)
    return found


_LEAF = 2**63
"""The sequence number of a node that accumulates a gradient is above it."""


def _sequence(node: Any) -> int:
    return int(node._sequence_nr())


def origin_of_gradient(run: RootRun, limit: Limit) -> Repeated:
    """The operator that made a gradient bad, with the line of the forward whose backward ran it."""
    forward = run.forward
    if why := forward.refusal:
        return Repeated(note=f"not run again: {why}")
    if run.was_handed_bad:
        return Repeated(note=FROM_THE_LOSS)
    mode = _Backward(forward, limit)
    # With the mode for anomalies, each node remembers the line that made it. It warns where a backward raises.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ran = Rerun(forward, mode).backward(run.gradients, keeps_lines=True)
    if ran.values is None:
        return Repeated(note=f"not run again: {ran.note}", is_late=mode.is_late)
    found = mode.origin_of([gradient for gradient in ran.values if gradient is not None])
    if found is None:
        otherwise = OTHERWISE_COMPILED if run.is_compiled else OTHERWISE
        return Repeated(note=why_gradients_differ(run, ran.changes) or otherwise)
    return found if found.given is None else found._replace(operator=None)


def why_gradients_differ(run: RootRun, changes: Altered) -> str:
    """Why a batch whose gradients were finite when it was run again may not have been the same batch. Empty: it was."""
    if run.is_compiled and changes.drew:
        return "it draws random numbers, and compiled code may draw others"
    return why_it_differs(run.forward, changes)


# --- the line of the forward ------------------------------------------------------------------------------------------


class _Backward(Repetition):
    """Follows bad numbers through a forward and its backward."""

    _is_backward = False

    def turn(self) -> None:
        self._is_backward = True

    def _operator(self, func: Any, inputs: list[Input], output: Tensor) -> Operator:
        operator = super()._operator(func, inputs, output)
        if not self._is_backward:
            return operator
        node = graph_node()
        here = caller_of(within_run=True)
        if here is not None and not isinstance(node, torch.autograd.function.BackwardCFunction):
            return replace(operator, source=here.source)  # a tensor's hook, or a checkpoint's forward
        if node is None:  # the sum of what came from several uses of a tensor
            return replace(operator, source=None)
        return replace(operator, source=_line_of(node, self._forward.entry), node=node.name())


_LINE = re.compile(r'\s*File "(?P<file>.*)", line (?P<line>\d+), in (?P<function>.*)')


def _line_of(node: Any, entry: RootEntry | None) -> Source | None:
    """The user's line whose forward made this node of the graph: the innermost one within the forward."""
    for text in reversed(node.metadata.get("traceback_") or []):
        found = _LINE.match(text)
        if found is None:
            continue
        owner = owner_of(found["file"])
        if owner == "user":
            line = int(found["line"])
            return Source(found["file"], line, found["function"].strip(), text_of(found["file"], line))
        if owner == "ours":
            break
    return entry.caller.source if entry is not None and entry.caller is not None else None
