"""The readings of parameters and buffers: measured every few forwards (only the optimizer changes them), and at a trip."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import NamedTuple

from torch import Tensor, nn

from ..shared.types.frame import SHARD, Kind, ReadingSpec, State
from .extremes import dtype_name
from .modules import NamedModule
from .tape import Cell

Take = Callable[[Tensor], Cell]


def mark_shard(label: str, value: Tensor) -> str:
    """The label of a parameter, buffer or gradient; ``weight (shard of 4)`` if this rank has only a shard of it."""
    if type(value) in (Tensor, nn.Parameter) and not value.__dict__:
        return label  # neither torch.distributed nor FSDP has marked it
    placements = getattr(value, "placements", None)  # of a DTensor
    if placements is not None:
        sizes = value.device_mesh.shape  # type: ignore[attr-defined]
        shards = math.prod(size for size, one in zip(sizes, placements, strict=True) if not one.is_replicate())
        return f"{label}{SHARD} of {shards})" if shards > 1 else label
    whole = getattr(value, "_unpadded_unsharded_size", None)  # FSDP1's flat parameter, which is complete during a forward
    # During a forward, FSDP1 replaces the user's parameters with tensors, and these are complete.
    is_cut = value.numel() < whole.numel() if whole is not None else hasattr(value, "_fsdp_flattened")
    return f"{label}{SHARD})" if is_cut else label


class ModuleWeights(NamedTuple):
    """The readings of a module's own parameters and floating buffers, measured in ``batch`` after ``step`` optimizer steps.

    ``finite_in`` has for each of them the last batch before in which it was measured finite; -1: none. ``earlier`` is the last
    measurement of the same rows before an optimizer step.
    """

    rows: tuple[ReadingSpec, ...]
    cells: list[Cell]
    step: int
    due: int
    """The forward in which to measure them again, if there was an optimizer step until then."""
    batch: int
    finite_in: tuple[int, ...]
    earlier: ModuleWeights | None = None


class Weights:
    """Caches the readings of each module's weights.

    Args:
        take: measures a tensor.
        every: forwards between two measurements of a module's weights; the modules are spread evenly over them. 0: no cache.
    """

    def __init__(self, take: Take, every: int) -> None:
        self._take = take
        self._every = every
        self.batch = -1
        """The batch that runs now."""
        self._known: dict[int, ModuleWeights] = {}
        self._rows: dict[Hashable, tuple[ReadingSpec, ...]] = {}

    def of(self, named: NamedModule, forward: int, step: int) -> ModuleWeights:
        """The module's weights in forward number ``forward`` (eval forwards count, too), after ``step`` optimizer steps."""
        known = self._known.get(named.number)
        if known is not None and (forward < known.due or (step == known.step and step > 0 and self._every)):
            return known
        return self.measure(named, forward, step)

    def known(self, named: NamedModule) -> ModuleWeights | None:
        """The module's weights as they were last measured."""
        return self._known.get(named.number)

    def is_known(self, named: NamedModule) -> bool:
        """Whether the module's weights were ever measured."""
        return named.number in self._known

    def expire(self, named: NamedModule, finite_in: int) -> None:
        """Has the module's weights measured anew when they are asked for: they have gone bad after batch ``finite_in``."""
        known = self._known.get(named.number)
        if known is not None:
            self._known[named.number] = known._replace(step=-1, due=0, batch=max(finite_in, known.batch))

    def release(self, number: int) -> None:
        self._known.pop(number, None)

    def expire_all(self) -> None:
        """Has all weights measured anew when they are asked for."""
        for number, known in self._known.items():
            self._known[number] = known._replace(step=-1, due=0)

    def measure(self, named: NamedModule, forward: int, step: int) -> ModuleWeights:
        own: dict[int, tuple[str, Tensor]] = {}  # a parameter with two names is measured under the first
        for name, value in named.module._parameters.items():
            if value is not None:
                own.setdefault(id(value), (name, value))
        buffers = [
            (name, value)
            for name, value in named.module._buffers.items()
            if value is not None and value.dtype.is_floating_point
        ]
        found = [*own.values(), *buffers]
        rows = self._rows_of(found, len(own))
        before = self._known.get(named.number)
        finite_in = _finite_in(rows, before)
        cells = [self._take(value) for _, value in found]
        known = ModuleWeights(
            rows, cells, step, self._due(named.number, forward), self.batch, finite_in, _earlier(rows, before, step)
        )
        self._known[named.number] = known
        return known

    def _rows_of(self, weights: list[tuple[str, Tensor]], parameters: int) -> tuple[ReadingSpec, ...]:
        """The same tuple for all modules with weights of these names and dtypes; the first ones are ``parameters``."""
        named = tuple([(mark_shard(name, value), value.dtype) for name, value in weights])
        rows = self._rows.get((named, parameters))
        if rows is None:
            kinds = [Kind.PARAMETER if index < parameters else Kind.BUFFER for index in range(len(named))]
            pairs = zip(kinds, named, strict=True)
            rows = tuple([ReadingSpec(kind, label, dtype_name(dtype)) for kind, (label, dtype) in pairs])
            self._rows[named, parameters] = rows
        return rows

    def _due(self, number: int, forward: int) -> int:
        """The next forward in which to measure this module. Modules take turns, so that no forward measures all of them."""
        if not self._every:
            return forward
        return forward + self._every - (forward + number) % self._every


def _earlier(rows: tuple[ReadingSpec, ...], before: ModuleWeights | None, step: int) -> ModuleWeights | None:
    """The last measurement before an optimizer step. A shard is compared with the whole, whose abs max is no smaller."""
    is_same = before is not None and (before.rows is rows or any(SHARD in row.label for row in rows))
    if before is None or not is_same or len(before.rows) != len(rows):
        return None
    if before.step == step or (before.step < 0 and before.earlier is not None):
        return before.earlier
    return before._replace(earlier=None)


def _finite_in(rows: tuple[ReadingSpec, ...], before: ModuleWeights | None) -> tuple[int, ...]:
    """The batches in which these weights were measured finite, as known from the measurement before."""
    if before is None or before.rows is not rows:
        return (-1,) * len(rows)
    seen = zip(before.cells, before.finite_in, strict=True)
    return tuple([before.batch if cell.state is State.FINITE else batch for cell, batch in seen])
