"""A module call -> a frame: its spec (interned) and the cells of its readings. A tensor is measured once per batch."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from ctypes import c_float
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..shared.bounded import BoundedDict
from ..shared.types.frame import SHARD, Frame, FrameSpec, Kind, Phase, Position, Reading, ReadingSpec, State
from ..shared.types.trip import GrownWeight
from . import norms
from .extremes import Unmeasurable, dtype_name, is_stored_apart, local
from .measured_memory import MeasuredMemory
from .modules import NamedModule, class_name
from .tape import Cell, Tape
from .walk import flatten, inputs, leaves
from .weights import ModuleWeights, Weights

log = logging.getLogger(__name__)

LARGE = 1 << 20
"""Elements from which on a large output is asked for its norm first. There abs min and abs max take 0.6 ms, a norm half of it."""

MAX_SPECS = 128
"""Specs cached per module. Some calls are never alike: dicts with the names of samples as keys, say."""

_NONE, _NOT_A_TENSOR, _EMPTY, _UNMATERIALISED = map(
    Cell, (State.NONE, State.NOT_A_TENSOR, State.EMPTY, State.UNMATERIALISED)
)


Call = tuple[Any, Any, Any]
"""The args, kwargs and output of a module's call."""


class Reduction(NamedTuple):
    """A collective that returned a sum: the readings of this rank's part of it, and of what it returned."""

    name: str
    parts: list[Cell]
    wholes: list[Cell]

    @property
    def made_bad(self) -> bool:
        """Whether this rank's part was finite, and the sum is not."""
        return any(whole.is_bad for whole in self.wholes) and all(part.state is State.FINITE for part in self.parts)


class WeightReading(NamedTuple):
    """A parameter or buffer with its reading, and the last batch before in which it was measured finite; -1: none."""

    named: NamedModule
    value: Tensor
    reading: Reading
    finite_in: int


@dataclass(slots=True)
class PendingFrame:
    """A frame without its numbers: ``cells`` are filled when the tape is read.

    The first ``weights`` cells are the module's weights. ``step``: the optimizer steps done when the frame ran.
    ``reductions``: those that ended since the frame before.
    ``is_absorbed``: a loss scaler is expected to deal with what is not finite. ``guarded``: the gradient guard made it, before
    an optimizer step; ``unfound``: why it could not be said where its gradients came from; ``was_finite``: they were finite when
    the batches were run again. ``graded``: of each input and output, whether it needs a gradient; empty: not known.
    """

    position: Position
    named: NamedModule
    spec: FrameSpec
    cells: list[Cell]
    step: int
    weights: int = 0
    reductions: Sequence[Reduction] = ()
    is_absorbed: bool = False
    guarded: bool = False
    unfound: str = ""
    was_finite: bool = False
    received: str = ""
    graded: Sequence[bool] = ()

    def measured(self) -> Frame:
        return Frame(
            self.position,
            self.spec,
            tuple([cell.low for cell in self.cells]),
            tuple([cell.high for cell in self.cells]),
            self.states,
        )

    @property
    def states(self) -> bytes:
        return bytes([cell.state or 0 for cell in self.cells])


class CompiledCall(NamedTuple):
    """The call of a module in a compiled graph, with the readings of its inputs and outputs; or what the root was given."""

    named: NamedModule
    rows: tuple[ReadingSpec, ...]
    cells: list[Cell]


class Recorder:
    """Measures the tensors of module calls, and makes frames of them. Not thread-safe.

    Args:
        tape: where readings are written.
        weights_every: ``every`` of ``Weights``.
    """

    def __init__(self, tape: Tape, weights_every: int) -> None:
        self._tape = tape
        self._weights = Weights(self.cell, weights_every)
        self._seen: dict[int, MeasuredMemory] = {}
        self._specs: dict[int, BoundedDict[Hashable, FrameSpec]] = {}
        self._forward = 0
        self._step = 0
        self.reductions: list[Reduction] = []
        """Those that ended since the last frame."""

    def begin(self, step: int, batch: int) -> None:
        """Starts a forward of ``batch``, after ``step`` optimizer steps."""
        self._forward += 1
        self._step = step
        self.reductions.clear()
        self._weights.batch = batch
        self.forget()

    def forget(self) -> None:
        """Forgets which tensors were measured; the readings of weights stay cached."""
        self._seen.clear()

    def restart(self) -> None:
        """After an interruption anywhere, in here too: what was measured and is not read yet is not trusted."""
        self.forget()
        self.reductions.clear()
        self._tape.restart()
        self._weights.expire_all()

    def release(self, number: int) -> None:
        """The module of this number is no part of the model any more."""
        self._specs.pop(number, None)
        self._weights.release(number)

    def forget_changed(self, tensors: Iterable[Tensor]) -> None:
        """Forgets the measurements of tensors that were changed without their version counters, and of their views."""
        storages = [tensor.untyped_storage() for tensor in tensors] if self._seen else []
        for address in [address for address, known in self._seen.items() if known.is_in(storages)] if storages else ():
            del self._seen[address]

    def take_reductions(self) -> list[Reduction]:
        taken, self.reductions = self.reductions, []
        return taken

    def of_root(self, position: Position, named: NamedModule, output: Any) -> PendingFrame:
        """The frame of a root, in a batch of which only the root's output is measured.

        Of a large output on the host, abs min and abs max are not measured if its norm is finite: then each value is finite, and
        the norm takes half the time. A norm may also overflow, so one that is not finite tells nothing.
        """
        return self.call(position, named, Phase.FORWARD, (), {}, output, cell=self._cell_or_finite)

    def call(
        self,
        position: Position,
        named: NamedModule,
        phase: Phase,
        args: Any,
        kwargs: Any,
        output: Any,
        *,
        cell: Callable[[Any], Cell] | None = None,
    ) -> PendingFrame:
        """The frame of a module's call: its weights, inputs and outputs.

        Args:
            cell: measures an input or output. Default: ``self.cell``.
        """
        weights = self._weights.of(named, self._forward, self._step)
        specs = self._specs_of(named)
        found: list[Any]
        key: Hashable
        if len(args) == 1 and not kwargs and type(args[0]) is Tensor and type(output) is Tensor:  # the usual case
            found = [args[0], output]
            key = phase.real, id(weights.rows), args[0].dtype, output.dtype  # real: an enum's own hash is slow
        else:
            found = []
            given = [_flatten_input(value, found) for value in args]
            if kwargs:
                given += [(name, _flatten_input(value, found)) for name, value in kwargs.items()]
            key = phase.real, id(weights.rows), tuple(given), len(args), flatten(output, found)
        spec = specs.get(key)
        if spec is None:
            values = [*labelled_inputs(args, kwargs), *((Kind.OUTPUT, *leaf) for leaf in leaves(output, "output"))]
            rows = (*weights.rows, *(ReadingSpec(kind, label, _dtype(value)) for kind, label, value in values))
            spec = specs[key] = _spec(named, rows, phase)
        cells = [*weights.cells, *map(cell or self.cell, found)]
        frame = PendingFrame(position, named, spec, cells, self._step, len(weights.cells))
        frame.graded = [getattr(value, "requires_grad", False) for value in found]
        return frame

    def again(self, frame: PendingFrame, args: Any, kwargs: Any, output: Any) -> tuple[PendingFrame, list[Any]]:
        """Measures a frame's call anew; also returns the values of its readings. A marked tensor is passed as the output."""
        named, spec = frame.named, frame.spec
        if spec.readings[0].kind is Kind.MARKED:
            return self.values(frame.position, named, [(Kind.MARKED, spec.readings[0].label, output)]), [output]
        weights = {**named.module._parameters, **named.module._buffers}
        values = [weights.get(row.label.partition(SHARD)[0]) for row in spec.readings[: frame.weights]]
        values += [value for _, _, value in labelled_inputs(args, kwargs)]
        values += [value for _, value in leaves(output, "output")]
        return self.call(frame.position, named, spec.phase, args, kwargs, output), values

    def before_in_place(self, frame: PendingFrame, args: Any, kwargs: Any, output: Any) -> dict[int, Cell]:
        """The readings of inputs that the call has overwritten with its output, from before: by their row in the frame.

        torch's own modules that work in place make no inf or nan: if there is one, it was there before.
        """
        if type(frame.named.module).__module__.startswith("torch.nn."):
            return {}
        made = {address_of(leaf) for _, leaf in leaves(output, "output")} - {None}
        given = [value for _, _, value in labelled_inputs(args, kwargs)]
        found = {}
        for row, value in enumerate(given, frame.weights):
            address = address_of(value)
            seen = self._seen.get(address) if address is not None and address in made else None
            if seen is not None and seen.before is not None:
                found[row] = seen.before
        return found

    def inputs(self, position: Position, named: NamedModule, args: Any, kwargs: Any, owner: str = "") -> PendingFrame:
        """A frame of a module's inputs alone. ``owner``: comes before their labels."""
        found = labelled_inputs(args, kwargs)
        return self.values(position, named, [(kind, owner + label, value) for kind, label, value in found])

    def values(self, position: Position, named: NamedModule, found: list[tuple[Kind, str, Any]]) -> PendingFrame:
        """A frame of labelled values under a module's name."""
        rows = tuple([ReadingSpec(kind, label, _dtype(value)) for kind, label, value in found])
        return self.cells(position, named, Phase.FORWARD, rows, [self.cell(value) for _, _, value in found])

    def losses(
        self, position: Position, named: NamedModule, found: list[tuple[str, Tensor]], trained: str = ""
    ) -> PendingFrame:
        """A frame of labelled losses, each with its sign: see ``Kind.LOSS``. ``trained``: the class that they train, if known."""
        rows = tuple([ReadingSpec(Kind.LOSS, label, _dtype(value)) for label, value in found])
        specs, cells = self._specs_of(named), [self._signed(value) for _, value in found]
        spec = specs.get((trained, rows))
        if spec is None:
            spec = _spec(named, rows, Phase.FORWARD)
            spec = specs[trained, rows] = replace(spec, module_class=trained or spec.module_class)
        return PendingFrame(position, named, spec, cells, self._step)

    def _signed(self, loss: Tensor) -> Cell:
        if type(loss) is not Tensor or loss.numel() != 1 or loss.is_meta or not loss.is_floating_point():
            return self.cell(loss)
        try:
            if loss.is_cpu:
                number = loss.item()
                return self._tape.known(number, abs(number))
            cell, one = Cell(), loss.reshape(1)
            self._tape.take(torch.stack((one, one.abs()), dim=1), [cell])
            return cell
        except RuntimeError:  # within a transformation of torch.func, say, it has no number
            return self.cell(loss)

    def cells(
        self, position: Position, named: NamedModule, phase: Phase, rows: tuple[ReadingSpec, ...], cells: list[Cell]
    ) -> PendingFrame:
        """A frame of readings that were already measured."""
        specs = self._specs_of(named)
        spec = specs.get((phase, rows))
        if spec is None:
            spec = specs[phase, rows] = _spec(named, rows, phase)
        return PendingFrame(position, named, spec, cells, self._step)

    def weights(self, position: Position, named: NamedModule) -> PendingFrame:
        """A frame of a module's weights alone, measured anew."""
        known = self._weights.measure(named, self._forward, self._step)
        frame = self.cells(position, named, Phase.FORWARD, known.rows, list(known.cells))
        frame.weights = len(known.cells)
        return frame

    def expire(self, named: NamedModule, finite_in: int) -> None:
        """Has a module's weights measured anew in its next frame: they have gone bad after batch ``finite_in``."""
        self._weights.expire(named, finite_in)

    def expire_all(self) -> None:
        """Has all weights measured anew: other code has written them."""
        self._weights.expire_all()

    def handed(self, calls: list[tuple[State | None, ...]], numbers: list[float] | Tensor) -> list[list[Cell]]:
        """The cells of compiled calls, by the states of their readings; see ``traced``."""
        made = [[Cell(state) for state in states] for states in calls]
        measured = [cell for cells in made for cell in cells if cell.state is None or cell.state is State.NOT_FLOAT]
        self._tape.take(numbers, measured)
        return made

    def compiled(self, position: Position, calls: list[CompiledCall]) -> list[PendingFrame]:
        """The frames of compiled calls, which measured their inputs and outputs themselves, and of the modules' weights."""
        batch, evaluation, first = position
        made = []
        for number, (named, rows, cells) in enumerate(calls, first):
            weights = self._weights.of(named, self._forward, self._step)
            specs = self._specs_of(named)
            key = id(weights.rows), id(rows)  # both are interned
            spec = specs.get(key)
            if spec is None:
                spec = specs[key] = _spec(named, weights.rows + rows, Phase.FORWARD)
            at = Position(batch, evaluation, number)
            made.append(PendingFrame(at, named, spec, weights.cells + cells, self._step, len(weights.cells)))
        return made

    def refresh(self, frames: Iterable[PendingFrame]) -> None:
        """After a trip, measures the weights of these frames anew.

        Weights that cannot be read now keep their readings; so do weights that FSDP has sharded since.
        """
        done: dict[int, ModuleWeights] = {}
        for frame in frames:
            if frame.weights:
                number = frame.named.number
                if number not in done:
                    done[number] = self._weights.measure(frame.named, self._forward, self._step)
                rows, fresh, *_ = done[number]
                is_same = rows == frame.spec.readings[: frame.weights]
                if is_same and not any(cell.state is State.UNMATERIALISED for cell in fresh):
                    frame.cells[: frame.weights] = fresh

    def look_at(self, modules: Iterable[NamedModule]) -> list[NamedModule]:
        """Measures the weights of modules whose own forward is not called, as often as others; returns those with weights."""
        return [named for named in modules if self._weights.of(named, self._forward, self._step).rows]

    def was_called(self, named: NamedModule) -> bool:
        return self._weights.is_known(named)

    def grown_weight(self, modules: Iterable[NamedModule]) -> GrownWeight | None:
        """The largest finite parameter of these modules, of those that were measured before the last steps as well."""
        largest, found = 0.0, list[GrownWeight]()
        for named in modules:
            known = self._weights.known(named)
            if known is None or known.earlier is None:
                continue
            for row, cell, before in zip(known.rows, known.cells, known.earlier.cells, strict=True):
                if row.kind is Kind.PARAMETER and before.state is cell.state is State.FINITE:
                    largest, module = max(largest, before.high), (named.names[0], class_name(named.module))
                    found.append(GrownWeight(*module, row.label, before.high, cell.high, known.earlier.batch, 0.0))
        first = max(found, key=lambda one: one.now, default=None)
        return None if first is None or not largest else first._replace(largest=largest)

    def bad_weights(self, modules: Iterable[NamedModule]) -> list[WeightReading]:
        """After a trip, measures the weights of these modules, and returns those that are not finite, each once."""
        found: dict[int, tuple[NamedModule, Tensor, ReadingSpec, Cell, int]] = {}
        for named in modules:
            weights = {**named.module._parameters, **named.module._buffers}
            known = self._weights.measure(named, self._forward, self._step)
            for row, cell, finite_in in zip(known.rows, known.cells, known.finite_in, strict=True):
                value = weights.get(row.label.partition(SHARD)[0])
                if value is not None:
                    found.setdefault(id(value), (named, value, row, cell, finite_in))
        self._tape.read()
        return [
            WeightReading(named, value, Reading(row.label, row.kind, row.dtype, cell.low, cell.high, cell.state), finite_in)
            for named, value, row, cell, finite_in in found.values()
            if cell.state is not None and cell.is_bad
        ]

    def dtypes_before(self, weight: WeightReading) -> set[str]:
        """The dtypes that this weight had in any frame of its module."""
        kind, label = weight.reading.kind, weight.reading.label
        specs = self._specs.get(weight.named.number, {}).values()
        return {row.dtype for spec in specs for row in spec.readings if (row.kind, row.label) == (kind, label)}

    def _cell_or_finite(self, value: Any) -> Cell:
        is_large = type(value) is Tensor and value.is_cpu and value.dtype is torch.float32 and value.numel() >= LARGE
        if is_large and value.is_contiguous() and math.isfinite(norms.of([value.detach()])[0]):
            return Cell(State.SEEN_FINITE)
        return self.cell(value)

    def cell(self, value: Any) -> Cell:
        """The reading of a value, filled when the tape is read. A tensor measured before in this batch has the same cell."""
        if not isinstance(value, Tensor):
            if isinstance(value, float) and not math.isfinite(value):
                return self._tape.known(abs(value), abs(value))
            return _NONE if value is None else _NOT_A_TENSOR
        try:
            values = value
            if type(value) is not Tensor and type(value) is not torch.nn.Parameter:
                values = local(value)
            try:
                version = values._version
            except RuntimeError:  # of inference mode: measured anew each time
                return self._tape.write(values, _state_of(value.dtype)) if values.numel() else _EMPTY
            address = values.data_ptr()
            seen = self._seen.get(address)
            if seen is not None and seen.is_of(values, version):
                return seen.cell
            if not values.numel():
                return _EMPTY
            state = None if value.dtype.is_floating_point else _state_of(value.dtype)  # a call less for nearly all of them
            cell = self._tape.write(values.detach() if values.requires_grad else values, state)
        except (Unmeasurable, RuntimeError, TypeError, ValueError) as error:
            if is_stored_apart(value):  # asked here and not before, as hardly any tensor is
                with suppress(Unmeasurable, RuntimeError):
                    return self.cell(local(value))
            # RuntimeError: out of memory, or an exotic layout. The reading's state is then UNMATERIALISED.
            log.debug("cannot measure a %s tensor: %s", value.dtype, error)
            return _UNMATERIALISED
        before = seen.cell if seen is not None and seen.is_in([values.untyped_storage()]) else None
        self._seen[address] = MeasuredMemory(values, version, cell, before)
        return cell

    def share_of_zeros(self, gradient: Tensor) -> Cell | None:
        """The share of exact zeros among the values of a gradient, as a float32; None: it stores none that can be counted."""
        values = local(gradient)
        if values.layout is not torch.strided or not values.numel():
            return None
        nonzero = torch.count_nonzero(values)
        if not values.is_cpu:
            return self.cell(1 - nonzero.to(torch.float32) / values.numel())
        rounded = c_float(c_float(nonzero.item()).value / c_float(values.numel()).value).value
        share = c_float(1 - rounded).value
        return self._tape.known(share, share)

    def _specs_of(self, named: NamedModule) -> dict[Hashable, FrameSpec]:
        """The specs of a module's calls, by the structure of the call."""
        specs = self._specs.get(named.number)
        if specs is None:
            specs = self._specs[named.number] = BoundedDict(MAX_SPECS)
        return specs


def address_of(value: Any) -> int | None:
    """Where the values of a plain tensor are; None for other values, and for tensors without memory of their own."""
    is_plain = type(value) is Tensor and value.layout is torch.strided and not value.is_nested and not value.is_meta
    return value.data_ptr() if is_plain else None


def _spec(named: NamedModule, rows: tuple[ReadingSpec, ...], phase: Phase) -> FrameSpec:
    name, *aliases = named.names
    return FrameSpec(name, class_name(named.module), rows, tuple(aliases), phase)


def labelled_inputs(args: Any, kwargs: Any) -> list[tuple[Kind, str, Any]]:
    """The leaves of a call's inputs, with kind and label."""
    return [
        (kind, path, leaf)
        for kind, label, value in inputs(args, kwargs, Kind.INPUT, Kind.KEYWORD)
        for path, leaf in leaves(value, label) or [(label, value)]  # an empty tuple is one leaf
    ]


def _flatten_input(value: Any, found: list[Any]) -> Hashable:
    before = len(found)
    structure = flatten(value, found)
    if len(found) == before:  # an empty tuple
        found.append(value)
    return structure


def _state_of(dtype: torch.dtype) -> State | None:
    """The state of a reading of this dtype; None: follows from its numbers."""
    return None if dtype.is_floating_point or dtype.is_complex else State.NOT_FLOAT


def _dtype(value: Any) -> str:
    if isinstance(value, Tensor):
        return dtype_name(value.dtype)
    return "float" if isinstance(value, float) and not math.isfinite(value) else ""
