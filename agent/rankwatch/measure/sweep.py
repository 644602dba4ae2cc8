"""Looks at all trainable parameters in the first batch after an optimizer step: has one gone bad?

A module's own frame measures its weights in full, but only every few forwards; a bad weight need not show in any output (a
fused attention, a clamp, a row that is hardly read), and some modules are never called (``nn.MultiheadAttention.out_proj``).
So one look, as cheap as can be, finds that there is a bad one, and only then it is measured.

On the host, a parameter is summed: this reads it at the speed of the memory, and any nan or inf is in the sum. Where the sum
is beyond the dtype, each value is looked at. Small parameters are summed together. On a device, one fused operator writes
all largest values, and one row of the tape has the worst of them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..shared.types.frame import Kind, Position
from . import norms
from .extremes import has_values, local
from .modules import Modules, NamedModule
from .norms import SMALL, chunks, joined
from .recorder import PendingFrame, Recorder
from .shards import Key, own_shards
from .tape import Cell

_PLAIN = frozenset({Tensor, nn.Parameter})

LOOK_EVERY = 16
"""Forwards between two looks where no optimizer step is seen."""


class Look(NamedTuple):
    """One look, in ``batch``. ``is_first``: none came before it.

    ``found``: the modules with a parameter on the host that is bad. ``cells`` are of parameters on devices: if one is bad, any
    of ``modules`` may have it.
    """

    is_first: bool
    batch: int
    found: list[NamedModule]
    cells: list[Cell]
    modules: list[NamedModule]

    @property
    def suspects(self) -> list[NamedModule]:
        """The modules that may have a bad parameter, as far as the host knows: those on a device once the tape was read."""
        return self.modules if any(cell.is_bad for cell in self.cells) else self.found


class Sweep:
    """Decides when to look, and makes frames of bad weights that no other frame shows.

    Args:
        modules: the modules to look at.
    """

    def __init__(self, model: nn.Module, recorder: Recorder, modules: Modules) -> None:
        self._model = ref(model)
        self._recorder = recorder
        self._modules = modules
        self._seen: tuple[int, int] | None = None  # the steps and the versions of the parameters at the last look
        self._forwards = 0
        self._finite_in = -1  # the batch of the last look without a suspect
        self._known: set[int] = set()  # modules whose bad weights have a frame, or were there from the start
        self._ways: _Ways | None = None
        self._signs: list[int] = []  # of the tensors that are looked at in these ways

    def look(self, batch: int, step: int) -> Look | None:
        """Looks at the parameters as a forward of ``batch`` begins, after ``step`` optimizer steps; None: there is no need."""
        self._forwards += 1
        modules = [named for named in self._modules.watched if named.number not in self._known]
        found = [
            (named, name, value)
            for named in modules
            for name, value in named.module._parameters.items()
            if value is not None and value.requires_grad and (type(value) is nn.Parameter or not is_lazy(value))
        ]
        shards = self.shards()
        versions = 0 if shards else versions_of([value for _, _, value in found])
        if self._seen == (step, versions) and (step or self._forwards < LOOK_EVERY):
            return None
        is_first, self._seen, self._forwards = self._seen is None, (step, versions), 0
        own: list[tuple[NamedModule, Tensor]] = [
            (named, value) for named, name, value in found if not shards or (id(named.module), name) not in shards
        ]
        by_id = {id(named.module): named for named in modules} if shards else {}
        own += [(by_id[module], shard) for (module, _), shard in shards.items() if module in by_id]
        with torch.no_grad():
            look = self._look(is_first, batch, own)
        for named in look.suspects:
            self._recorder.expire(named, self._finite_in)
        return look

    def unseen(self, look: Look, frames: list[PendingFrame], position: Position) -> list[PendingFrame]:
        """After a forward and its frames: frames of the weights that are suspected, their cells not filled yet.

        Frames of modules that ran get their weights measured anew.
        """
        suspects = look.suspects
        if look.is_first:
            # What is bad from the start shows where it is used; memory that is never used may have any values.
            self._known.update(named.number for named in suspects)
        suspects = [named for named in suspects if named.number not in self._known]
        if suspects:
            self._recorder.refresh(frames)
        else:
            self._finite_in = look.batch
        return [self._recorder.weights(position, named) for named in suspects]

    def keep(self, made: list[PendingFrame], frames: list[PendingFrame]) -> list[PendingFrame]:
        """Those of the frames from ``unseen`` that are bad, and that no other frame shows, once the tape was read."""
        shown = {frame.named.number for frame in frames if _has_bad_weight(frame)}
        bad = [frame for frame in made if _has_bad_weight(frame)]
        self._known.update(frame.named.number for frame in bad)
        return [frame for frame in bad if frame.named.number not in shown]

    def shards(self) -> dict[Key, Tensor]:
        """This rank's own values of parameters that are gathered during a forward."""
        model = self._model()
        distributed = torch.distributed
        is_alone = model is None or not distributed.is_available() or not distributed.is_initialized()
        return {} if model is None or is_alone else own_shards(model)

    def _look(self, is_first: bool, batch: int, found: list[tuple[NamedModule, Tensor]]) -> Look:
        if not all([type(value) in _PLAIN for _, value in found]):
            found = [(named, local(value)) for named, value in found]
        values = [value for _, value in found]
        ways = self._ways_of(values)
        suspects = {found[number][0].number: found[number][0] for number in ways.bad_among(values)}
        cells = [self._recorder.cell(values[number]) for number in ways.apart]
        cells += [self._recorder.cell(_largest([values[number] for number in group])) for group in ways.elsewhere]
        modules = {named.number: named for named, _ in found} if cells else {}
        return Look(is_first, batch, [*suspects.values()], cells, [*modules.values()])

    def _ways_of(self, values: list[Tensor]) -> _Ways:
        """How to look at each of these tensors: as before, if they are the same ones, in the same memory."""
        try:
            signs = [*map(id, values), *map(Tensor.data_ptr, values)]
        except RuntimeError:  # one has no address: it is sparse, say, or within a transformation of torch.func
            return _Ways(values)
        if self._ways is None or signs != self._signs:
            self._ways, self._signs = _Ways(values), signs
        return self._ways


class _Ways:
    """How to look at each of some tensors. They are given again at each look, and known by their index."""

    def __init__(self, values: list[Tensor]) -> None:
        self.apart: list[int] = []
        """They are measured in full."""
        elsewhere: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
        small: dict[tuple[torch.dtype, torch.Size], list[int]] = defaultdict(list)
        self._large: list[int] = []
        for number, value in enumerate(values):
            if not _can_be_summed(value):
                self.apart.append(number)
            elif not value.is_cpu:
                elsewhere[value.device, value.dtype].append(number)
            elif value.numel() <= SMALL:
                small[value.dtype, value.shape].append(number)
            else:
                self._large.append(number)
        self.elsewhere = list(elsewhere.values())
        """On devices, by device and dtype."""
        self._small = [some for members in small.values() for some in chunks(members)]

    def bad_among(self, values: list[Tensor]) -> Iterator[int]:
        """The indices of those on the host that are bad."""
        yield from (number for number in self._large if _is_bad(values[number]))
        for some in self._small:
            if _is_bad(joined([values[number] for number in some])):
                yield from (number for number in some if _is_bad(values[number]))


def versions_of(values: list[Tensor]) -> int:
    """How often torch has seen that they were written to, in all. ``x.data`` writes unseen."""
    try:
        return sum([value._version for value in values])
    except RuntimeError:  # some are of inference mode, and have none
        return sum([value._version for value in values if not value.is_inference()])


def _has_bad_weight(frame: PendingFrame) -> bool:
    weights = zip(frame.spec.readings[: frame.weights], frame.cells, strict=False)
    return any(row.kind is Kind.PARAMETER and cell.is_bad for row, cell in weights)


def _can_be_summed(values: Tensor) -> bool:
    return type(values) in _PLAIN and not values.is_meta and values.dtype.itemsize > 1 and has_values(values)


def _is_bad(values: Tensor) -> bool:
    is_finite = math.isfinite(abs(values.sum().item())) or bool(values.isfinite().all())
    return not is_finite


def _largest(group: list[Tensor]) -> Tensor:
    """The largest values of tensors of one device and dtype; nan for a tensor with a nan."""
    return torch.stack(norms.largest([values for values in group if values.numel()]))
