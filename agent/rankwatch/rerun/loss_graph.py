"""Where a bad loss came from: read from autograd's graph before the backward, which frees what the graph has saved.

The user's code is not run again. The operators of the graph are: on what autograd has saved for the backward, from the model's
outputs up to the loss. Only the part of the graph is looked at whose numbers are bad, or not saved.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from ..measure.extremes import dtype_name
from ..shared.bounded import BoundedDict
from ..shared.types.frame import Kind, Reading, State
from ..shared.types.trip import Operator, Source
from .arguments import Input, name_of, reading_of, state_of_tensor, storage_of
from .careful import Stopped
from .details import detail_of
from .engine import describe_error
from .forward import Forward
from .graph_nodes import (
    MASK,
    Arrow,
    Edge,
    GraphNode,
    Guess,
    OperatorCall,
    is_plain,
    metadata,
    name_of_node,
    names_of_edges,
    saved_names,
)
from .limit import Limit, before_a_trip
from .loss_line import lines_of_operator
from .repetition import Repetition
from .user_line import bad_variables, caller_of, tensors_with_a_graph

log = logging.getLogger(__name__)

MAX_NODES = 2_000
"""Of a graph, that are looked at."""

_STAYS_FINITE = (
    *("add", "sub", "rsub", "neg", "abs", "mul", "sum", "clamp", "relu", "sigmoid", "tanh", "_softmax", "_log_softmax"),
    *("view", "_unsafe_view", "_reshape_alias", "t", "transpose", "permute", "select", "slice", "index", "gather", "expand"),
    *("squeeze", "unsqueeze", "clone", "cat", "stack", "alias", "detach", "diagonal", "index_select", "masked_select"),
)
"""Operators whose output is finite if what goes in is finite, and not near the end of its dtype."""

_TELL_A_MASK = {"_softmax", "_log_softmax"}
"""A softmax of finite numbers is never nan: what filled the mask was -inf."""


class LossOrigin(NamedTuple):
    """The operator that made a loss bad; None: ``note`` says why it is not known.

    ``supposes_finite``: it is the origin if the model's outputs were finite, which were not at hand any more.
    ``caller`` is the line that called backward.
    """

    operator: Operator | None = None
    note: str = ""
    supposes_finite: bool = False
    caller: Source | None = None
    later: Callable[[], LossOrigin] | None = None
    """Looks for it at the trip, where the loss must not be read before its backward."""


class Outputs:
    """Remembers what the model returned, without keeping it alive."""

    def __init__(self) -> None:
        self._known = BoundedDict[tuple[str, int], ref[Tensor]](_MAX_OUTPUTS)

    def add(self, outputs: Sequence[Tensor]) -> None:
        for value in outputs:
            self._known.pop(key := _key(value.grad_fn), None)
            self._known[key] = ref(value)

    def __contains__(self, node: Any) -> bool:
        return _key(node) in self._known

    def value(self, edge: Edge) -> Tensor | None:
        """The value, if the user's code still has it, and has not changed it."""
        value = self._known[_key(edge[0])]()
        return value if value is not None and (value.grad_fn, value.output_nr) == edge else None


_MAX_OUTPUTS = 256


def _key(node: Any) -> tuple[str, int]:
    return node.name(), node._sequence_nr()


def origin_of_loss(loss: Tensor, outputs: Outputs, is_model: Callable[[nn.Module], bool]) -> LossOrigin:
    """The origin of a bad loss whose backward is about to run. ``is_model``: whether a module is the model, or has it inside."""
    caller = caller_of()
    found = _origin_of_loss(loss, outputs)._replace(caller=caller.source if caller is not None else None)
    return found if found.operator is None else _with_line(found, found.operator, is_model)


def origin_after_backward(loss: Callable[[], Tensor | None], outputs: Outputs) -> LossOrigin:
    """What is known of a bad loss whose backward has freed what autograd had saved: the operators that remain."""
    value = loss()
    found = _origin_of_loss(value, outputs) if value is not None else LossOrigin()
    return LossOrigin(note="; ".join(filter(None, (_FREED, found.note))))


_FREED = (
    'its operator is not known: this loss was read after its backward, which frees what autograd had saved (check="frame" reads '
    "it before)"
)


def _with_line(origin: LossOrigin, operator: Operator, is_model: Callable[[nn.Module], bool]) -> LossOrigin:
    """With the line that called the operator, if one alone can have; or with those that may have."""
    try:
        lines, is_sure = lines_of_operator(operator.name.split(".")[1], is_model)
    except Exception as error:  # noqa: BLE001  the operator is known without it
        log.debug("the line of %s is not known: %r", operator.name, error)
        return origin
    if is_sure:
        return origin._replace(operator=replace(operator, source=lines[0]))
    return origin._replace(note="; ".join(filter(None, (origin.note, perhaps(lines)))))


def perhaps(lines: Sequence[Source]) -> str:
    """Lines one of which has called an operator; empty: there are too many, or none."""
    if not 1 <= len(lines) <= _MOST_LINES:
        return ""
    places = _and([f"{one.file}:{one.line}" for one in lines])
    return f"perhaps its line is {'one of ' if len(lines) > 1 else ''}{places}"


def _origin_of_loss(loss: Tensor, outputs: Outputs) -> LossOrigin:
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=[loss.device] if loss.is_cuda else []))
            stack.enter_context(torch.no_grad())
            for device in {"cpu", loss.device.type}:
                stack.enter_context(torch.autocast(device, enabled=False))
            return _Walk(outputs, before_a_trip()).origin_of(loss)
    except (Exception, Stopped) as error:  # noqa: BLE001  the trip matters more than its operator
        log.debug("the graph of the loss cannot be read: %r", error)
        return LossOrigin(note=f"its operator is not known: {describe_error(error)}")


class _Mode(Repetition):
    """Follows bad numbers through the operators of the graph. No line of the user's calls them."""

    def __init__(self, limit: Limit) -> None:
        super().__init__(Forward(nn.Module(), (), {}, "loss", is_live=False), limit)
        self._guessed: set[int] = set()

    def _operator(self, func: Any, inputs: list[Input], output: Tensor) -> Operator:
        known = [one for one in inputs if not isinstance(one.value, Tensor) or not self.is_guess(one.value)]
        operator = super()._operator(func, known, output)
        return replace(operator, operands=operator.operands if len(known) == len(inputs) else (), source=None)

    def guess(self, value: Tensor) -> Tensor:
        """A tensor whose numbers are not those of the training."""
        self._held.append(value)
        self._guessed.add(storage_of(value))
        return value

    def is_guess(self, value: Tensor) -> bool:
        return storage_of(value) in self._guessed

    def stands_for(self, value: Tensor, other: Tensor) -> None:
        """What was saved is what an operator that was run again has made: its bad numbers have the same origin."""
        if storage_of(other) in self._origins:
            self._held += [value, other]
            self._origins[storage_of(value)] = self._origins[storage_of(other)]


class _Walk:
    def __init__(self, outputs: Outputs, limit: Limit) -> None:
        self._outputs = outputs
        self._mode = _Mode(limit)
        self._nodes: dict[Any, GraphNode] = {}
        self._values: dict[Edge, Tensor] = {}
        """What is known of the outputs of nodes. Those that are guesses are bad, but otherwise not as they were."""
        self._read_by: dict[Any, set[str]] = {}
        """The operators that read what a node has made."""
        self._supposed: dict[Any, tuple[str, ...]] = {}
        """The nodes whose output is not known, and is finite if a constant in these operators was."""
        self._with_unknown: dict[str, Any] = {}
        """The operators in these, by name."""
        self._made_by: dict[int, Any] = {}
        """The nodes whose operator was not run again, by the storage of what they had made."""

    def origin_of(self, loss: Tensor) -> LossOrigin:
        top: Edge = (loss.grad_fn, loss.output_nr)
        if top[0] is None:
            return LossOrigin(note="its operator is not known: the loss was made without a graph")
        self._values = {(value.grad_fn, value.output_nr): value.detach() for value in tensors_with_a_graph()}
        self._values[top] = loss.detach()
        for node in self._in_order(top[0]):
            self._run(node)
        found = self._mode.origin_of([self._values[top]])
        if found is None:
            return LossOrigin(
                note="its operator is not known: repeated on what autograd saved, its operators made it finite"
            )
        if found.given is None:
            return LossOrigin(found.operator)
        node = self._made_by.get(storage_of(found.given))
        if node is not None:
            return self._made_in(node, found.given)
        return LossOrigin(found.operator if _was_given_bad(found.operator) else None, _describe_given(found.operator))

    def _in_order(self, top: Any) -> list[Any]:
        """The nodes to be looked at, each after those that its inputs came from."""
        found: list[Any] = []
        stack: list[tuple[Any, bool]] = [(top, False)]
        while stack:
            node, is_left = stack.pop()
            if is_left:
                found.append(node)
            elif node not in self._nodes:
                if len(self._nodes) >= MAX_NODES:
                    raise Stopped(f"its graph has more than {MAX_NODES} operators")
                known = self._nodes[node] = self._look_at(node)
                stack.append((node, True))
                if not (known.is_model or self._is_finite((node, 0))):  # what came in may be bad
                    stack += [(edge[0], False) for edge in known.edges if edge is not None and not self._is_finite(edge)]
        return found

    def _is_finite(self, edge: Edge) -> bool:
        value = self._values.get(edge)
        return value is not None and not _is_bad(value)

    def _look_at(self, node: Any) -> GraphNode:
        is_model = node in self._outputs
        found = GraphNode(node, {} if is_model else self._saved(node), is_model=is_model)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor) and is_plain(leaf):
            found.made[0] = leaf.detach()
        for number, value in found.made.items():
            self._values.setdefault((node, number), value)
        for number, edge in enumerate(found.edges):
            if edge is None:
                continue
            if found.calls:
                self._read_by.setdefault(edge[0], set()).add(name_of(found.calls[0].func))
            if number in found.given:
                self._values.setdefault(edge, found.given[number])
            elif edge[0] in self._outputs and (value := self._outputs.value(edge)) is not None:
                self._values.setdefault(edge, value.detach())
        return found

    def _saved(self, node: Any) -> dict[str, Any]:
        """What a node has saved for the backward, by the names of the operator's arguments."""
        found = {}
        for name in saved_names(type(node)):
            try:
                with self._mode:  # a checkpoint runs its forward to get it
                    value = getattr(node, f"_saved_{name}")
            except RuntimeError:  # it was changed in place, or is freed
                continue
            found[name] = _signed(value)
        return found

    def _run(self, node: Any) -> None:
        """Runs the operator of a node again."""
        known = self._nodes[node]
        if any(self._run_as(node, call) for call in known.calls):
            return
        made = [value for edge, value in self._values.items() if edge[0] is node]
        self._made_by.update({storage_of(value): node for value in made})
        if not made and known.calls and name_of(known.calls[0].func) in _STAYS_FINITE:
            supposed = [self._supposed_of(edge) for edge in known.edges if edge is not None]
            if None not in supposed:
                own = (str(known.calls[0].func),) if known.has_unknown else ()
                self._with_unknown[str(known.calls[0].func)] = known.calls[0].func
                self._supposed[node] = (*dict.fromkeys(name for names in supposed for name in names or ()), *own)

    def _supposed_of(self, edge: Edge) -> tuple[str, ...] | None:
        """The operators that are supposed to have had finite constants, if this is finite then; None: it may be bad."""
        if self._is_finite(edge) or (edge not in self._values and self._nodes[edge[0]].is_model):
            return ()
        return self._supposed.get(edge[0]) if edge not in self._values else None

    def _run_as(self, node: Any, call: OperatorCall) -> bool:
        guesses: list[Any] = []
        given: list[Tensor] = []
        args, kwargs = self._filled(node, (call.args, call.kwargs), guesses, given)
        if MASK in guesses and (node, 0) not in self._values and not self._read_by.get(node, set()) <= _TELL_A_MASK:
            return False
        if guesses and MASK not in guesses and not any(map(_is_bad, given)):
            return False
        try:
            with self._mode:
                result = call.func(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:  # it was another overload
            log.debug("%s is not %s: %r", node.name(), call.func, error)
            return False
        made = list(result) if isinstance(result, (list, tuple)) else [result]
        found = {(node, number): value for number, value in enumerate(made) if isinstance(value, Tensor)}
        if guesses and not any(map(_is_bad, found.values())):  # a guess shows where bad numbers go, and makes none
            return False
        if not all(self._is_as_before(edge, value, bool(guesses)) for edge, value in found.items()):
            return False
        for edge, value in found.items():
            if edge in self._values:
                self._mode.stands_for(self._values[edge], value)
            else:
                self._values[edge] = self._mode.guess(value) if guesses else value
        return True

    def _filled(self, node: Any, value: Any, guesses: list[Any], given: list[Tensor]) -> Any:
        """Arguments with what the nodes below have made; ``given`` collects what is known, ``guesses`` what is not."""
        if isinstance(value, Arrow):
            known, number = self._nodes[node], value.number
            edge = known.edges[number]
            found = known.given.get(number) if edge is None else self._values.get(edge)
            if found is None:
                guesses.append(value)
                about = metadata(*(edge or (node, 0)))
                like = next(iter(self._values.values()))
                shape, dtype = (about.shape, about.dtype) if about is not None else (like.shape, like.dtype)
                return self._mode.guess(torch.ones(shape if edge is not None else (), dtype=dtype, device=like.device))
            given.append(found)
            guesses += [value] if self._mode.is_guess(found) else []
            return found
        if isinstance(value, Guess):
            guesses.append(value)
            return value.value
        if isinstance(value, (list, tuple)):
            return type(value)([self._filled(node, item, guesses, given) for item in value])
        if isinstance(value, dict):
            return {name: self._filled(node, item, guesses, given) for name, item in value.items()}
        return value

    def _is_as_before(self, edge: Edge, value: Tensor, is_guessed: bool) -> bool:
        """Whether an output is that of the training, as far as that is known."""
        about = metadata(*edge)
        if about is not None and (tuple(about.shape), about.dtype) != (tuple(value.shape), value.dtype):
            return False
        known = self._values.get(edge)
        if known is None or not value.dtype.is_floating_point:
            return True
        if is_guessed:
            return known.shape == value.shape and torch.equal(torch.isfinite(known), torch.isfinite(value))
        return known.shape == value.shape and torch.allclose(known, value, _TOLERANCE, _TOLERANCE, equal_nan=True)

    def _made_in(self, node: Any, made: Tensor) -> LossOrigin:
        """The origin where an operator was not run again: its result was saved, and that was bad."""
        known = self._nodes[node]
        if known.is_model:
            return LossOrigin(note="its operator is not known: the model's output was bad")
        if isinstance(leaf := getattr(node, "variable", None), Tensor):
            return LossOrigin(note=f"a parameter {tuple(leaf.shape)} outside of the model was bad before")
        edges = [edge for edge in known.edges if edge is not None]
        supposed = [self._supposed_of(edge) for edge in edges]
        if None not in supposed and (operand := self._only_unknown(known)) is not None:
            return self._of_operand(known, operand, made)
        if known.has_unknown or None in supposed:
            born = self._born_below(node)
            return LossOrigin(born) if born is not None else LossOrigin(note=self._describe_way(node))
        names = tuple(dict.fromkeys(name for one in supposed for name in one or ()))
        if names and state_of_tensor(made) is State.NAN and name_of(known.calls[0].func) in _STAYS_FINITE:
            return self._of_unknown(names[0], made) if len(names) == 1 else LossOrigin(note=self._describe_way(node))
        inputs = list(filter(None, [self._reading(number, edge, known) for number, edge in enumerate(known.edges)]))
        readings, shapes = tuple([reading for reading, _ in inputs]), tuple([shape for _, shape in inputs])
        call = known.calls[0]
        output, detail = reading_of("output", Kind.OUTPUT, made), detail_of(call.func, call.args, call.kwargs)
        operator = Operator(str(call.func), readings, output, shapes=shapes, detail=detail)
        note = f"supposing that what autograd did not save was finite: a constant in {_and(names)}" if names else ""
        return LossOrigin(operator, note, any(edge not in self._values for edge in edges))

    def _only_unknown(self, known: GraphNode) -> int | None:
        """The one operand of a product or a sum that is not known: the others were finite, and the result is not."""
        if not known.calls or name_of(known.calls[0].func) not in _COMBINE:
            return None
        unknown = [number for number, edge in enumerate(known.edges) if edge is None and number not in known.given]
        return unknown[0] if len(unknown) == 1 else None

    def _of_operand(self, known: GraphNode, number: int, made: Tensor) -> LossOrigin:
        """What the model's output was combined with was bad: a target, a weight of classes, what a teacher made."""
        func = known.calls[0].func
        output, label = reading_of("output", Kind.OUTPUT, made), names_of_edges(func, len(known.edges))[number]
        found = [pair for one, edge in enumerate(known.edges) if one != number and (pair := self._reading(one, edge, known))]
        name, value = next(bad_variables(made.shape), ("", None))
        if value is not None:
            operand, shape = reading_of(f"{label}: {name}", Kind.INPUT, value), tuple(value.shape)
        else:
            operand, shape = Reading(label, Kind.INPUT, output.dtype, math.nan, math.nan, output.state), ()
        inputs = [(operand, shape), *found]
        operator = Operator(str(func), tuple([one for one, _ in inputs]), output, shapes=tuple([at for _, at in inputs]))
        return LossOrigin(operator, _describe_given(operator))

    def _of_unknown(self, name: str, made: Tensor) -> LossOrigin:
        """Were all operands finite, what came of this operator was finite: it was given what is bad, by other ranks say."""
        output, func = reading_of("output", Kind.OUTPUT, made), self._with_unknown[name]
        label = next((row.name for row in func._schema.arguments), "input")
        operand = Reading(label, Kind.INPUT, output.dtype, math.nan, math.nan, output.state)
        operator = Operator(name, (operand,), output, shapes=((),))
        return LossOrigin(operator, _describe_given(operator))

    def _born_below(self, node: Any) -> Operator | None:
        """An operator that was run again, has made bad numbers of finite ones, and leads to this node."""
        rest, seen = [node], {node}
        while rest:
            for edge in [edge for edge in self._nodes[rest.pop(0)].edges if edge is not None and edge[0] in self._nodes]:
                found = self._mode.origin_of([value]) if (value := self._values.get(edge)) is not None else None
                if found is not None and found.given is None and found.operator is not None:
                    return found.operator
                if edge[0] not in seen and not self._is_finite(edge):
                    seen.add(edge[0])
                    rest.append(edge[0])
        return None

    def _reading(self, number: int, edge: Edge | None, known: GraphNode) -> tuple[Reading, tuple[int, ...]] | None:
        """What came in by an edge, and its shape."""
        name = names_of_edges(known.calls[0].func, len(known.edges))[number]
        value = known.given.get(number) if edge is None else self._values.get(edge)
        if value is not None:
            return reading_of(name, Kind.INPUT, value), tuple(value.shape)
        about = metadata(*edge) if edge is not None else None
        if about is not None and not math.prod(about.shape):
            return Reading(name, Kind.INPUT, dtype_name(about.dtype), 0.0, 0.0, State.EMPTY), tuple(about.shape)
        return None

    def _describe_way(self, node: Any) -> str:
        """The operators between what is known to be bad, and what is known to be finite."""
        names: list[str] = []
        rest, seen = [node], {node}
        while rest and len(names) < _MOST_NAMED:
            one = rest.pop(0)
            names.append(name_of_node(one, self._nodes[one]))
            for edge in self._nodes[one].edges:
                if edge is not None and self._supposed_of(edge) != () and edge[0] not in seen and edge[0] in self._nodes:
                    seen.add(edge[0])
                    rest.append(edge[0])
        names = list(dict.fromkeys(reversed(names)))
        if len(names) == 1:
            return f"it came out of {names[0]}; autograd did not save all that went in there"
        return f"it came out of one of {_and(names)}; autograd did not save what is between them"


_COMBINE = ("add", "sub", "rsub", "mul", "mse_loss", "smooth_l1_loss", "l1_loss", "huber_loss")
"""Operators whose result is finite if both operands are, and not near the end of their dtype."""

_MOST_NAMED = 6
_MOST_LINES = 3
_TOLERANCE = 1e-2


def _signed(value: Any) -> Any:
    """What autograd has saved: of a dimension such as -1, or of several, it gives the bits as numbers without a sign."""
    if isinstance(value, (tuple, list)):
        return type(value)(map(_signed, value))
    return value - 2**64 if isinstance(value, int) and value >= 2**63 else value


def _is_bad(value: Tensor) -> bool:
    return state_of_tensor(value) is not State.FINITE


def _and(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _was_given_bad(operator: Operator | None) -> bool:
    return operator is not None and any(one.state in (State.INF, State.NAN) for one in operator.inputs)


def _describe_given(operator: Operator | None) -> str:
    """What was bad before, and needs no gradient."""
    bad = [one for one in operator.inputs if one.state in (State.INF, State.NAN)] if operator is not None else []
    if operator is None or not bad:
        return "its operator is not known: a bad number came from outside of the graph of the loss"
    what = f"{operator.name} was given {bad[0].state.name.lower()} as its {bad[0].label}"
    return f"{what}, which no operator of the graph has made: look at where it comes from"
