"""A module call -> readings: what is measured of it, each tensor once per batch, and the interned specs of its frames."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from .frame import Frame, FrameSpec, Kind, Position, Reading, ReadingSpec, State, state_of
from .measure import Unmeasurable, dtype_name, local
from .modules import NamedModule, class_name
from .tape import Tape
from .walk import leaves

log = logging.getLogger(__name__)


class Ingredient(NamedTuple):
    """Something to measure: a tensor, or whatever else stood in its place."""

    kind: Kind
    label: str
    value: Any


def ingredients(module: nn.Module, args: Any, kwargs: Any, output: Any) -> list[Ingredient]:
    """What a frame measures, in the order it is printed: parameters, floating buffers, inputs, outputs."""
    parameters: dict[int, Ingredient] = {}  # one that has two names here is measured under the first
    for name, value in module._parameters.items():
        if value is not None:
            parameters.setdefault(id(value), Ingredient(Kind.PARAMETER, name, value))
    found = list(parameters.values())
    found += [
        Ingredient(Kind.BUFFER, name, value)
        for name, value in module._buffers.items()
        if value is not None and value.dtype.is_floating_point
    ]
    found += inputs(args, kwargs)
    found += [Ingredient(Kind.OUTPUT, label, value) for label, value in leaves(output, "output")]
    return found


def inputs(args: Any, kwargs: Any) -> Iterator[Ingredient]:
    """The positional and keyword inputs of a call: ``input[0]``, ``input[attention_mask]``."""
    for kind, named in ((Kind.INPUT, enumerate(args)), (Kind.KEYWORD, kwargs.items())):
        for name, value in named:
            label = f"input[{name}]"
            for path, leaf in leaves(value, label) or [(label, value)]:
                yield Ingredient(kind, path, leaf)


class Recorder:
    """Measures ingredients. Not thread-safe."""

    def __init__(self) -> None:
        self._tape = Tape()
        self._seen: dict[int, _Seen] = {}
        self._dtypes: dict[torch.dtype, str] = {}
        self._readings: dict[tuple[Kind, str, str], ReadingSpec] = {}
        self._specs: dict[tuple[int, ...], FrameSpec] = {}

    def forget(self) -> None:
        """Starts a batch: nothing measured before counts as measured."""
        self._seen.clear()

    def frame(self, position: Position, named: NamedModule, found: list[Ingredient]) -> Frame:
        readings = self.readings(found)
        return Frame(
            position,
            self._spec(named, readings),
            tuple([reading.abs_min for reading in readings]),
            tuple([reading.abs_max for reading in readings]),
            bytes([reading.state for reading in readings]),
        )

    def readings(self, found: list[Ingredient]) -> list[Reading]:
        """The readings of ``found``: written to the tape one by one, read back together."""
        self._tape.rewind()
        taken = [self._take(ingredient.value) for ingredient in found]
        rows = self._tape.read()
        result = []
        for (kind, label, _), (dtype, state, cell, written) in zip(found, taken, strict=True):
            if written is not None:
                device, row = written
                cell[:] = rows[device][row]
            low, high = cell
            result.append(Reading(label, kind, dtype, low, high, state_of(low, high) if state is None else state))
        return result

    def _take(self, value: Any) -> _Taken:
        if not isinstance(value, Tensor):
            if isinstance(value, float) and not math.isfinite(value):
                return _Taken("float", None, [abs(value), abs(value)], None)
            return _Taken("", State.NONE if value is None else State.NOT_A_TENSOR, [0.0, 0.0], None)
        dtype = self._dtypes.get(value.dtype)
        if dtype is None:
            dtype = self._dtypes[value.dtype] = dtype_name(value.dtype)
        state = None if value.dtype.is_floating_point or value.dtype.is_complex else State.NOT_FLOAT
        try:
            values = local(value)
            # Inference tensors do not count their changes: each is measured anew.
            change = None if value.is_inference() else (value._version, values.data_ptr())
            seen = self._seen.get(id(value))
            if change is not None and seen is not None and seen.tensor() is value and seen.change == change:
                return _Taken(dtype, state, seen.cell, None)
            if values.numel() == 0:
                return _Taken(dtype, State.EMPTY, [0.0, 0.0], None)
            written = self._tape.write(values)
        except (Unmeasurable, RuntimeError, TypeError) as error:  # RuntimeError: out of memory, or an exotic layout
            log.debug("cannot measure a %s tensor: %s", dtype, error)
            return _Taken(dtype, State.UNMATERIALISED, [0.0, 0.0], None)
        cell = [0.0, 0.0]
        self._seen[id(value)] = _Seen(ref(value), change, cell)
        return _Taken(dtype, state, cell, written)

    def _spec(self, named: NamedModule, readings: list[Reading]) -> FrameSpec:
        key = (id(named), *[id(self._reading_spec(reading)) for reading in readings])
        spec = self._specs.get(key)
        if spec is None:
            name, *aliases = named.names
            rows = tuple(map(self._reading_spec, readings))
            spec = self._specs[key] = FrameSpec(name, class_name(named.module), rows, tuple(aliases))
        return spec

    def _reading_spec(self, reading: Reading) -> ReadingSpec:
        key = reading.kind, reading.label, reading.dtype
        spec = self._readings.get(key)
        if spec is None:
            spec = self._readings[key] = ReadingSpec(*key)
        return spec


class _Seen(NamedTuple):
    """A tensor measured in this batch: valid while it lives and neither its version counter nor its address changes.

    ``x.data.mul_()`` changes neither: a tensor changed so between two modules shows its old figures in the second. The frame
    that trips is measured anew.
    """

    tensor: ReferenceType[Tensor]
    change: tuple[int, int] | None
    cell: list[float]


class _Taken(NamedTuple):
    """``state`` None: to be told from the numbers. ``cell`` holds abs min and abs max, once the tape's row has filled it."""

    dtype: str
    state: State | None
    cell: list[float]
    written: tuple[torch.device, int] | None
