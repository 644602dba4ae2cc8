"""The gradients of a module's call, as one frame of the backward; and the gradients of parameters, when accumulated."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ..measure.extremes import dtype_name, local
from ..measure.modules import NamedModule
from ..measure.tape import Cell
from ..measure.walk import inputs, leaves
from ..measure.weights import mark_shard
from ..rerun.batch import outputs_of
from ..shared.frame import Kind, ReadingSpec
from ..shared.notice import ZEROS
from .hooks import never_compile, quietly

FEW_PARAMETERS = 64

Emit = Callable[[tuple[ReadingSpec, ...], list[Cell]], None]
"""Takes the readings of one frame of the backward, in the thread that runs the backward."""
EmitFor = Callable[[NamedModule, tuple[ReadingSpec, ...], list[Cell]], None]
Hook = Callable[[Callable[..., None]], Callable[..., None]]
"""Makes a hook that catches the errors of its body: torch calls it within the user's backward."""


def is_running() -> bool:
    """Whether the calling thread is inside a backward: a forward that runs there is a checkpoint's recomputation."""
    return torch._C._current_graph_task_id() != -1


class CallGradients:
    """Measures the gradients with respect to the outputs and inputs of calls.

    The hooks are on tensors: torch's module backward hooks wrap outputs in views, which forbid in-place changes.
    """

    def __init__(self, take: Callable[[Tensor], Cell], hook: Hook) -> None:
        self._take = take
        self._arrived = hook(self._arrive)
        self._finish = hook(_Call.finish)

    def watch(self, args: Any, kwargs: Any, output: Any, emit: Emit) -> None:
        """Emits the gradients of a call when all have come."""
        given = [(Kind.GRAD_OUTPUT, "output", output), *inputs(args, kwargs, Kind.GRAD_INPUT, Kind.GRAD_INPUT)]
        found = [
            (kind, f"grad_{path}", value)
            for kind, label, container in given
            for path, value in leaves(container, label)
            if isinstance(value, Tensor) and value.requires_grad and value.grad_fn is not None
        ]
        if found:
            call = _Call(emit)
            for kind, label, value in found:
                value.register_hook(partial(self._arrived, call, call.expect(kind, label, value)))

    def _arrive(self, call: _Call, index: int, gradient: Tensor | None) -> None:
        if gradient is None:  # it is 0: a Function returned None for it
            return
        if not call.has_begun:
            # Some gradients may never come: an output is unused, or an input's gradient not wanted. So finish at the end.
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._finish, call))
        if call.take(index, self._take(gradient)):
            call.finish()


class _Call:
    """A call of a module whose backward has yet to come. The graph refers to it, so it must not refer to the graph."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._rows: list[ReadingSpec] = []
        self._cells: dict[int, Cell] = {}
        self._inputs: set[int] = set()

    @property
    def has_begun(self) -> bool:
        return bool(self._cells)

    def expect(self, kind: Kind, label: str, value: Tensor) -> int:
        index = len(self._rows)
        self._rows.append(ReadingSpec(kind, label, dtype_name(value.dtype)))
        if kind is Kind.GRAD_INPUT:
            self._inputs.add(index)
        return index

    def take(self, index: int, cell: Cell) -> bool:
        """A gradient has come. Returns whether all have: the gradients of inputs come after those of outputs."""
        self._cells[index] = cell
        return self._inputs.issubset(self._cells) if self._inputs else len(self._cells) == len(self._rows)

    def finish(self) -> None:
        if self._cells:
            order = sorted(self._cells)
            cells, self._cells = [self._cells[index] for index in order], {}
            self._emit(tuple([self._rows[index] for index in order]), cells)


class ParameterGradients:
    """Measures the gradients of parameters each time a backward has added to them.

    Args:
        counts_zeros: tells whether to measure the share of exact zeros, too.
    """

    def __init__(self, take: Callable[[Tensor], Cell], emit: EmitFor, hook: Hook, counts_zeros: Callable[[], bool]) -> None:
        self._take = take
        self._accumulated = hook(self._measure_accumulated)
        self._counts_zeros = counts_zeros
        self._emit = emit
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
                accumulated = partial(self._accumulated, named, *_rows(name, value))
                self._hooked[id(value)] = ref(value), value.register_post_accumulate_grad_hook(accumulated)

    def was_measured(self, value: Tensor) -> bool:
        """Whether a hook has measured this parameter's gradient since the last sweep."""
        return id(value) in self._seen

    def sweep(self, modules: Iterable[NamedModule]) -> None:
        """Before an optimizer step: measures the gradients for which no hook was called, such as those of FSDP's shards."""
        for named in modules:
            for name, value in named.module._parameters.items():
                if value is not None and value.grad is not None and id(value) not in self._seen:
                    self._measure(named, value.grad, *_rows(name, value))
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

    def _measure_accumulated(self, named: NamedModule, row: ReadingSpec, zeros: ReadingSpec, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._seen.add(id(parameter))
            self._measure(named, parameter.grad, row, zeros)

    def _measure(self, named: NamedModule, gradient: Tensor, row: ReadingSpec, zeros: ReadingSpec) -> None:
        values = local(gradient)
        if self._counts_zeros() and values.layout is torch.strided and values.numel():
            share = 1 - torch.count_nonzero(values).to(torch.float32) / values.numel()
            self._emit(named, (row, zeros), [self._take(gradient), self._take(share)])
        else:
            self._emit(named, (row,), [self._take(gradient)])


def _rows(name: str, parameter: Tensor) -> tuple[ReadingSpec, ReadingSpec]:
    label = mark_shard(f"{name}.grad", parameter)
    return (
        ReadingSpec(Kind.GRADIENT, label, dtype_name(parameter.dtype)),
        ReadingSpec(Kind.GRADIENT, label + ZEROS, "float32"),
    )


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
