"""The arguments of an operator: what it reads and writes, and whether that is bad."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..measure.extremes import dtype_name
from ..measure.walk import leaves
from ..shared.types.frame import Kind, Reading, State, state_of

_OVERWRITES = ("copy_", "fill_", "zero_", "uniform_", "normal_", "bernoulli_", "random_", "exponential_", "set_")
"""They write to their first argument without reading it."""

_NUMBERS = ("number", "float", "Tensor")
"""The types of an argument for which a number may be passed."""


class _NoRow(NamedTuple):
    alias_info: None = None
    is_out: bool = False


_NO_ROW = _NoRow()
"""Stands for the row of a schema where an operator has none."""


class Input(NamedTuple):
    """A tensor or number that an operator reads, as it is before the operator runs. ``changed``: the tensor itself, which the
    operator changes in place, and of which the value is a copy."""

    label: str
    value: Tensor | float
    state: State
    changed: Tensor | None = None


def name_of(func: Any) -> str:
    """``exp`` of ``aten.exp.default``."""
    return str(getattr(func, "_opname", "")) or str(func).rpartition(".")[2]


def storage_of(value: Tensor) -> int:
    try:
        return int(value.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # a sparse tensor has no storage of its own
        return id(value)


def _arguments(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, str, Any]]:
    """Each argument that was passed: its row of the schema, label and value; the items of a list one by one."""
    if not hasattr(func, "_schema"):  # an operator on functions, such as flex_attention
        yield from ((_NO_ROW, label, value) for label, value in leaves(list(args), "input") if isinstance(value, Tensor))
        return
    for index, row in enumerate(func._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(row.name)
        if isinstance(value, (list, tuple)):
            for number, item in enumerate(value):
                yield row, f"{row.name}[{number}]", item
        elif value is not None:
            yield row, row.name, value


def written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The arguments that an operator writes to."""
    if not hasattr(func, "_schema") or not func._schema.is_mutable:
        return []
    found = _arguments(func, args, kwargs)
    return [value for row, _, value in found if _is_written(row) and isinstance(value, Tensor)]


def _is_written(row: Any) -> bool:
    return row.alias_info is not None and row.alias_info.is_write


def inputs_of(func: Any, args: Any, kwargs: Any) -> Iterator[Input]:
    """What an operator reads: its tensors, those that it changes in place as copies, and its numbers."""
    overwrites = name_of(func) in _OVERWRITES
    for row, label, value in _arguments(func, args, kwargs):
        if isinstance(value, Tensor):
            if row.is_out or (overwrites and _is_written(row)):
                continue
            state = state_of_tensor(value)
            yield Input(label, value.detach().clone(), state, value) if _is_written(row) else Input(label, value, state)
        elif type(value) in (int, float) and str(row.type) in _NUMBERS and value != row.default_value:
            number = float(value)
            yield Input(label, number, state_of(abs(number), abs(number)))


def is_given(output: Tensor, inputs: list[Input]) -> bool:
    """Whether an output is a view of one of the inputs."""
    storage = storage_of(output)
    return any(isinstance(one.value, Tensor) and storage_of(one.value) == storage for one in inputs)


def values_of(value: Tensor) -> Tensor:
    """The numbers of a tensor of any layout."""
    value = value.detach()
    if value.is_nested:
        value = value.values()
    elif value.layout is torch.sparse_coo:
        value = value._values()
    elif value.layout is not torch.strided:
        value = value.values()
    return value.to(torch.float32) if value.dtype.is_floating_point and value.dtype.itemsize == 1 else value


def state_of_tensor(value: Tensor) -> State:
    """FINITE also for what has no numbers that can be bad."""
    if not (value.dtype.is_floating_point or value.dtype.is_complex) or value.is_meta or not value.numel():
        return State.FINITE
    values = values_of(value)
    if bool(torch.isfinite(values).all()):
        return State.FINITE
    return State.NAN if bool(torch.isnan(values).any()) else State.INF


def is_mask(value: Any) -> bool:
    """Whether a parameter is a mask that is added to scores: it is not trained, and holds nothing else."""
    return isinstance(value, nn.Parameter) and not value.requires_grad and holds_mask(value)


def holds_mask(value: Tensor) -> bool:
    """Whether all numbers are 0 or -inf, and both are there."""
    if value.is_complex() or state_of_tensor(value) is not State.INF:
        return False
    values = values_of(value)
    return bool(((values == 0) | torch.isneginf(values)).all()) and bool((values == 0).any())


def reading_of(label: str, kind: Kind, value: Tensor | float) -> Reading:
    if not isinstance(value, Tensor):
        return Reading(label, kind, "float", abs(value), abs(value), state_of(abs(value), abs(value)))
    dtype = dtype_name(value.dtype)
    values = values_of(value)
    if not values.numel():
        return Reading(label, kind, dtype, 0.0, 0.0, State.EMPTY)
    is_float = values.dtype.is_floating_point or values.dtype.is_complex
    wide = torch.complex128 if values.dtype.is_complex else torch.float64
    low, high = (float(end) for end in torch.aminmax(values.to(wide).abs()))
    return Reading(label, kind, dtype, low, high, state_of(low, high) if is_float else State.NOT_FLOAT)


def operands_of(func: Any, inputs: list[Input], output: Tensor) -> tuple[float, ...]:
    """What an operator that works element by element had for its first bad element, one number for each input."""
    is_pointwise = torch.Tag.pointwise in getattr(func, "tags", ()) or name_of(func) in ("_to_copy", "copy_")
    tensors = [one.value for one in inputs if isinstance(one.value, Tensor)]
    plain = [value.layout is torch.strided and not value.is_nested for value in [output, *tensors]]
    if not is_pointwise or not all(plain) or any(value.dtype.is_complex for value in [output, *tensors]):
        return ()
    values = values_of(output)
    bad = torch.isnan(values)
    if not bool(bad.any()):
        bad = ~torch.isfinite(values)
    at = tuple(bad.nonzero()[0].tolist())
    found = []
    for one in inputs:
        value = one.value
        if isinstance(value, Tensor):
            value = float(values_of(value).expand(output.shape)[at].item())
        found.append(value)
    return tuple(found)
