"""The hooks inside of a compiled model: tensor operations that Inductor fuses, and one opaque call with the numbers.

Dynamo traces ``enter`` and ``leave`` into the user's graph. They measure with plain tensor operations. The custom operator
``record``, which is opaque to the compiler, takes the numbers to the watch at run time. It is declared to change ``_ORDER``:
so the compiler neither removes nor reorders it, and activation checkpointing does not repeat it. The key of a hook is a
tensor, not a constant, so that blocks that share one graph (regional compilation) still have different keys. Before the graph
is compiled, the calls of ``record`` in it become one (see ``joined``).
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ...measure.extremes import dtype_name
from ...measure.modules import NamedModule
from ...measure.walk import leaves
from ...shared.types.frame import Kind, ReadingSpec, State
from .joined import EVAL, GIVEN, LEAVE, PLANS, TRAIN, join_at_end

_ORDER = torch.zeros(1, device="cpu")
_NAMES = {value: dtype_name(value) for name in dir(torch) if isinstance(value := getattr(torch, name), torch.dtype)}
_WITH_GRADIENTS = "gradients"
_FIELD, _ROW = "\x1f", "\x1e"
# Kinds and states as text, made outside of what dynamo traces.
_INPUT, _OUTPUT, _KEYWORD = (str(int(kind)) for kind in (Kind.INPUT, Kind.OUTPUT, Kind.KEYWORD))
_NONE, _NOT_A_TENSOR, _EMPTY, _NOT_FLOAT, _UNMATERIALISED = (
    str(int(state)) for state in (State.NONE, State.NOT_A_TENSOR, State.EMPTY, State.NOT_FLOAT, State.UNMATERIALISED)
)


def _never() -> bool:
    return False


# An exported program is for elsewhere, where nobody takes the numbers. torch before 2.7 does not tell.
_is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", _never)

_keys = itertools.count()
_receivers: WeakValueDictionary[int, Receiver] = WeakValueDictionary()


class Receiver:
    """The receiver of a traced hook's numbers: ``receive(calls, numbers)`` is called in the training thread.

    The calls are those of consecutive hooks with the same ``receive``; the beginning of the root's forward is by itself.
    ``numbers``: abs min and abs max of each measured reading of all these calls; on a device, rows of one tensor.
    """

    def __init__(self, named: NamedModule, receive: Receive) -> None:
        self.named = named
        self.receive = receive
        key = next(_keys)
        self.key = torch.tensor(key, device="cpu")  # whatever the default device is
        _receivers[key] = self


class What(NamedTuple):
    """The meaning of numbers: the readings, and for each the state, if it was known while tracing.

    The readings with state None or NOT_FLOAT, ``measured`` in all, have numbers, in this order. ``event``: the root's forward
    begins, in training mode or not; this is what it was given; or a module's forward ends. ``has_gradients``: with gradients
    enabled.
    """

    event: str
    has_gradients: bool
    rows: tuple[ReadingSpec, ...]
    states: tuple[State | None, ...]
    measured: int


Calls: TypeAlias = list[tuple[NamedModule, What]]
Numbers: TypeAlias = list[float] | Tensor
Receive: TypeAlias = Callable[[Calls, Numbers], None]


def enter(key: Tensor, is_training: bool, args: Any, kwargs: Any) -> None:
    """The root's forward begins. Traced."""
    if _is_exporting():
        return
    gradients = _WITH_GRADIENTS if torch.is_grad_enabled() else ""
    torch.ops.rankwatch.record(_ORDER, [], [key], _ROW.join([TRAIN if is_training else EVAL, gradients]))
    numbers: list[Tensor] = []
    plan = [GIVEN, gradients]
    _inputs(args, kwargs, numbers, plan)
    torch.ops.rankwatch.record(_ORDER, _gathered(numbers), [key], _ROW.join(plan))


def leave(key: Tensor, args: Any, kwargs: Any, output: Any) -> None:
    """A module's forward ends. Traced."""
    if _is_exporting():
        return
    numbers: list[Tensor] = []
    plan = [LEAVE, _WITH_GRADIENTS if torch.is_grad_enabled() else ""]
    _inputs(args, kwargs, numbers, plan)
    for label, value in leaves(output, "output"):
        _reading(_OUTPUT, label, value, numbers, plan)
    torch.ops.rankwatch.record(_ORDER, _gathered(numbers), [key], _ROW.join(plan))


def _inputs(args: Any, kwargs: Any, numbers: list[Tensor], plan: list[str]) -> None:
    for index, value in enumerate(args):  # as `inputs` does: each function that dynamo traces takes time
        for path, leaf in leaves(value, f"input[{index}]"):
            _reading(_INPUT, path, leaf, numbers, plan)
    for name, value in kwargs.items():
        for path, leaf in leaves(value, f"input[{name}]"):
            _reading(_KEYWORD, path, leaf, numbers, plan)


def _reading(kind: str, label: str, value: Any, numbers: list[Tensor], plan: list[str]) -> None:
    """Appends a reading's kind, label, dtype and state to ``plan``, as far as known, and its two numbers to ``numbers``."""
    if not isinstance(value, Tensor):
        plan.append(f"{kind}{_FIELD}{label}{_FIELD}{_FIELD}{_NONE if value is None else _NOT_A_TENSOR}")
        return
    state = "" if value.dtype.is_floating_point or value.dtype.is_complex else _NOT_FLOAT
    if value.layout is not torch.strided or value.is_nested or value.is_quantized:
        state = _UNMATERIALISED
    elif value.numel() == 0:
        state = _EMPTY
    else:
        values: Any = value.detach()
        if _is_sharded(values):
            values = values.to_local()
        if values.dtype.is_complex:
            values = values.to(torch.complex128)
        elif values.dtype.itemsize == 1:
            values = values.to(torch.float32)
        magnitudes = values.abs()
        numbers += [magnitudes.amin(), magnitudes.amax()]
    plan.append(f"{kind}{_FIELD}{label}{_FIELD}{_NAMES[value.dtype]}{_FIELD}{state}")


def _is_sharded(values: Tensor) -> bool:
    return hasattr(values, "to_local")


if torch.__version__.startswith("2.4.") and torch.distributed.is_available():
    # Its Dynamo cannot trace hasattr() of a tensor. (Later ones can; for them the import would cost half a second.)
    _DTensor: Any = importlib.import_module("torch.distributed._tensor").DTensor

    def _is_sharded(values: Tensor) -> bool:
        return isinstance(values, _DTensor)


def _gathered(numbers: list[Tensor]) -> list[Tensor]:
    """On a device, the numbers are joined into one tensor in the graph, where this needs no kernel of its own."""
    for number in numbers:
        if number.device.type != "cpu":
            break
    else:
        return numbers
    device = numbers[-1].device
    if device.type == "cpu":
        return [number.cpu() for number in numbers]
    return [torch.stack([number.to(device, torch.float64) for number in numbers]).view(-1, 2)]


# --- at run time ------------------------------------------------------------------------------------------------------


def _record(order: Tensor, numbers: list[Tensor], keys: list[Tensor], plan: str) -> None:
    """``numbers``: on the host two for each measured reading of all hooks; on a device one tensor with a row for each."""
    values, width = (numbers[0], 1) if numbers and numbers[0].ndim else ([number.item() for number in numbers], 2)
    found = [(_receivers.get(int(key.item())), what) for key, what in zip(keys, _read(plan), strict=True)]
    first = 0
    for receive, group in itertools.groupby(found, _receive_of):
        part = [*group]
        end = first + width * sum([what.measured for _, what in part])
        if receive is not None:
            receive([(receiver.named, what) for receiver, what in part if receiver is not None], values[first:end])
        first = end


def _receive_of(found: tuple[Receiver | None, What]) -> Receive | None:
    """None: the graph may outlive the watch."""
    return found[0].receive if found[0] is not None else None


@cache
def _read(plan: str) -> tuple[What, ...]:
    return tuple(map(_what, plan.split(PLANS)))


def _what(plan: str) -> What:
    event, gradients, *lines = plan.split(_ROW)
    fields = [line.rsplit(_FIELD, 2) for line in lines]
    rows = tuple(
        ReadingSpec(Kind(int(head[: head.index(_FIELD)])), head[head.index(_FIELD) + 1 :], dtype)
        for head, dtype, _ in fields
    )
    states = tuple(State(int(state)) if state else None for _, _, state in fields)
    return What(event, bool(gradients), rows, states, sum(state in (None, State.NOT_FLOAT) for state in states))


_library = torch.library.Library("rankwatch", "DEF")
# Not for a CUDA graph: a replay would not call it.
_tags = [tag] if (tag := getattr(torch.Tag, "cudagraph_unsafe", None)) is not None else []
_library.define("record(Tensor(a!) order, Tensor[] numbers, Tensor[] keys, str plan) -> ()", tags=_tags)
_library.impl("record", _record, "CompositeExplicitAutograd")


@torch.library.register_fake("rankwatch::record")  # type: ignore[untyped-decorator,unused-ignore]
def _fake(order: Tensor, numbers: list[Tensor], keys: list[Tensor], plan: str) -> None:
    join_at_end()
