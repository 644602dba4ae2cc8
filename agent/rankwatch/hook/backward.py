"""The gradients of a module's call, as one frame of the backward; and the gradients of parameters, when accumulated."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ..judge.health import is_looked_at
from ..judge.lifecycle import Life
from ..measure.extremes import dtype_name
from ..measure.modules import NamedModule
from ..measure.recorder import Recorder
from ..measure.tape import Cell
from ..measure.walk import flatten, inputs, leaves, outputs_of
from ..measure.weights import mark_shard
from ..shared.bounded import BoundedDict
from ..shared.types.frame import Kind, ReadingSpec
from ..shared.types.notice import ZEROS
from ..touch.torch_private import graph_task, never_compile
from ..touch.unseen import quietly

FEW_PARAMETERS = 64

MAX_PLANS = 256
"""Structures of calls whose readings are remembered."""

Emit = Callable[[tuple[ReadingSpec, ...], list[Cell]], None]
"""Takes the readings of one frame of the backward, in the thread that runs the backward."""
EmitFor = Callable[[NamedModule, tuple[ReadingSpec, ...], list[Cell]], None]
Hook = Callable[[Callable[..., None]], Callable[..., None]]
"""Makes a hook that catches the errors of its body: torch calls it within the user's backward."""


def is_running() -> bool:
    """Whether the calling thread is inside a backward: a forward that runs there is a checkpoint's recomputation."""
    return graph_task() != -1


class CallGradients:
    """Measures the gradients with respect to the outputs and inputs of calls.

    The hooks are on tensors: torch's module backward hooks wrap outputs in views, which forbid in-place changes.
    """

    def __init__(self, take: Callable[[Tensor], Cell], hook: Hook) -> None:
        self._take = take
        self._arrived = hook(self._arrive)
        self._end = hook(self._finish)
        self._plans = BoundedDict[Hashable, _Plan](MAX_PLANS)
        self._begun: dict[int, list[_Call]] = {}
        """The calls whose first gradient has come, by the backward that runs."""

    def watch(self, args: Any, kwargs: Any, output: Any, emit: Emit) -> None:
        """Emits the gradients of a call when all have come."""
        if self._begun and not is_running():
            self._begun.clear()  # their backwards have raised
        values: list[Any]
        key: Hashable
        if len(args) == 1 and not kwargs and type(args[0]) is Tensor and type(output) is Tensor:  # the usual case
            values = [output, args[0]]
            key = output.dtype, args[0].dtype
        else:
            values = []
            given = [flatten(output, values), len(args), *[flatten(value, values) for value in args]]
            key = *given, *[(name, flatten(value, values)) for name, value in kwargs.items()]
        expected = tuple([index for index, value in enumerate(values) if isinstance(value, Tensor) and not value.is_leaf])
        if not expected:
            return
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = _Plan(args, kwargs, output)
        call = _Call(emit, plan, expected)
        for index in expected:
            values[index].register_hook(partial(self._arrived, call, index))

    def _arrive(self, call: _Call, index: int, gradient: Tensor | None) -> None:
        if gradient is None:  # it is 0: a Function returned None for it
            return
        if not call.cells:
            # Some gradients may never come: an output is unused, or an input's gradient not wanted. So finish at the end.
            backward = graph_task()
            begun = self._begun.get(backward)
            if begun is None:
                begun = self._begun[backward] = []
                torch.autograd.Variable._execution_engine.queue_callback(partial(self._end, backward))
            begun.append(call)
        call.cells[index] = self._take(gradient)
        # The gradients of inputs come after those of outputs.
        if call.awaited <= call.cells.keys():
            call.finish()

    def _finish(self, backward: int) -> None:
        for call in self._begun.pop(backward, ()):
            call.finish()


class _Plan:
    """What calls of one structure have: a reading for each leaf of the output, then of the inputs."""

    def __init__(self, args: Any, kwargs: Any, output: Any) -> None:
        outputs = leaves(output, "output")
        found = [(Kind.GRAD_OUTPUT, path, value) for path, value in outputs]
        for kind, label, container in inputs(args, kwargs, Kind.GRAD_INPUT, Kind.GRAD_INPUT):
            found += [(kind, path, value) for path, value in leaves(container, label)]
        self._outputs = len(outputs)
        self._rows = [
            ReadingSpec(kind, f"grad_{path}", dtype_name(value.dtype) if isinstance(value, Tensor) else "")
            for kind, path, value in found
        ]
        self._picked = BoundedDict[tuple[int, ...], tuple[ReadingSpec, ...]](MAX_PLANS)
        self._awaited = BoundedDict[tuple[int, ...], frozenset[int]](MAX_PLANS)

    def rows(self, indices: tuple[int, ...]) -> tuple[ReadingSpec, ...]:
        """The rows of some leaves: the same tuple each time."""
        rows = self._picked.get(indices)
        if rows is None:
            rows = self._picked[indices] = tuple([self._rows[index] for index in indices])
        return rows

    def awaited(self, expected: tuple[int, ...]) -> frozenset[int]:
        """Those of the expected leaves that come last: of the inputs, or if there are none, of the outputs."""
        awaited = self._awaited.get(expected)
        if awaited is None:
            given = frozenset([index for index in expected if index >= self._outputs])
            awaited = self._awaited[expected] = given or frozenset(expected)
        return awaited


class _Call:
    """A call of a module whose backward has yet to come. The graph refers to it, so it must not refer to the graph."""

    __slots__ = ("_emit", "_plan", "awaited", "cells")

    def __init__(self, emit: Emit, plan: _Plan, expected: tuple[int, ...]) -> None:
        self._emit = emit
        self._plan = plan
        self.awaited = plan.awaited(expected)
        self.cells: dict[int, Cell] = {}

    def finish(self) -> None:
        if self.cells:
            order = tuple(sorted(self.cells))
            cells, self.cells = [self.cells[index] for index in order], {}
            self._emit(self._plan.rows(order), cells)


class ParameterGradients:
    """Measures the gradients of parameters each time a backward has added to them.

    Args:
        life: the batches; in some of them, the share of exact zeros is measured, too.
    """

    def __init__(
        self,
        recorder: Recorder,
        emit: EmitFor,
        hook: Hook,
        life: Life,
    ) -> None:
        self._recorder = recorder
        self._emit = emit
        self._accumulated = hook(self._measure_accumulated)
        self._life = life
        self._hooked: dict[int, tuple[ReferenceType[Tensor], RemovableHandle]] = {}
        self._room = FEW_PARAMETERS
        """At so many hooks, those of parameters that are gone are forgotten."""
        self._seen: set[int] = set()  # parameters whose gradients came since the last sweep

    def watch(self, named: NamedModule) -> None:
        """Puts hooks on the parameters of a module that have none yet."""
        for name, value in named.module._parameters.items():
            if value is not None and value.requires_grad and value.is_leaf and not self._is_hooked(value):
                if len(self._hooked) >= self._room:
                    self._forget_gone()
                accumulated = partial(self._accumulated, named, _rows(name, value))
                self._hooked[id(value)] = ref(value), value.register_post_accumulate_grad_hook(accumulated)

    def was_measured(self, value: Tensor) -> bool:
        """Whether a hook has measured this parameter's gradient since the last sweep."""
        return id(value) in self._seen

    def sweep(self, modules: Iterable[NamedModule]) -> None:
        """Before an optimizer step: measures the gradients for which no hook was called, such as those of FSDP's shards."""
        for named in modules:
            for name, value in named.module._parameters.items():
                if value is not None and id(value) not in self._seen and (gradient := value.grad) is not None:
                    self._measure(named, gradient, _rows(name, value))
        self._seen.clear()

    def remove(self) -> None:
        while self._hooked:
            self._hooked.popitem()[1][1].remove()

    def _forget_gone(self) -> None:
        self._hooked = {key: hooked for key, hooked in self._hooked.items() if hooked[0]() is not None}
        self._room = 2 * len(self._hooked) + FEW_PARAMETERS

    def _is_hooked(self, value: Tensor) -> bool:
        hooked = self._hooked.get(id(value))
        return hooked is not None and hooked[0]() is value

    def _measure_accumulated(self, named: NamedModule, rows: _Rows, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is not None:
            self._seen.add(id(parameter))
            self._measure(named, gradient, rows)

    def _measure(self, named: NamedModule, gradient: Tensor, rows: _Rows) -> None:
        batch = self._life.of_backward
        share = self._recorder.share_of_zeros(gradient) if is_looked_at(batch, batch.position.batch) else None
        if share is not None:
            self._emit(named, rows.with_zeros, [self._recorder.cell(gradient), share])
            return
        self._emit(named, rows.alone, [self._recorder.cell(gradient)])


class _Rows(NamedTuple):
    """The readings of a parameter's gradient: alone, and with the share of exact zeros in it."""

    alone: tuple[ReadingSpec, ...]
    with_zeros: tuple[ReadingSpec, ...]


def _rows(name: str, parameter: Tensor) -> _Rows:
    label = mark_shard(f"{name}.grad", parameter)
    row = ReadingSpec(Kind.GRADIENT, label, dtype_name(parameter.dtype))
    return _Rows((row,), (row, ReadingSpec(Kind.GRADIENT, label + ZEROS, "float32")))


def mark_outputs(output: Any, reached: Callable[[int, Tensor | None], None]) -> list[Tensor]:
    """Calls ``reached`` when a backward begins at a root's output: its frames belong to that forward's batch.

    It is called with the output's number and its gradient. None is a gradient of 0: a Function returned None for it.
    Returns the outputs.
    """
    outputs = outputs_of(output)
    for number, value in enumerate(outputs):
        value.register_hook(partial(_call_reached, reached, number))
    return outputs


def _call_reached(reached: Callable[[int, Tensor | None], None], number: int, gradient: Tensor | None) -> None:
    if not torch.compiler.is_dynamo_compiling():  # in compiled autograd: BackwardWatch sees the end of the backward
        quietly(reached, number, gradient)


never_compile(_call_reached)
