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
from collections.abc import Callable, Iterable, Iterator, Sequence
from weakref import ref

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors
from torch.nn.parameter import is_lazy

from ..shared.frame import Kind, Position
from .extremes import local
from .modules import NamedModule
from .recorder import PendingFrame, Recorder
from .shards import Key, own_shards
from .tape import Cell

SMALL = 4096
"""Parameters of so few elements are joined and looked at together: there, calling operators costs more than reading."""

JOINED = 1 << 20
"""The most elements that are joined: 4 MiB of float32."""

LOOK_EVERY = 16
"""Forwards between two looks where no optimizer step is seen."""


class Look:
    """One look, in ``batch``. ``is_first``: none came before it."""

    def __init__(
        self, is_first: bool, batch: int, modules: list[NamedModule], suspects: list[NamedModule], cells: list[Cell]
    ) -> None:
        self.is_first = is_first
        self.batch = batch
        self._modules = modules
        self._suspects = suspects
        self._cells = cells

    @property
    def suspects(self) -> list[NamedModule]:
        """The modules that may have a bad parameter, as far as the host knows: those on a device once the tape was read."""
        return self._modules if any(cell.is_bad for cell in self._cells) else self._suspects


class Sweep:
    """Decides when to look, and makes frames of bad weights that no other frame shows.

    Args:
        modules: the modules to look at.
    """

    def __init__(self, model: nn.Module, recorder: Recorder, modules: Callable[[], Iterable[NamedModule]]) -> None:
        self._model = ref(model)
        self._recorder = recorder
        self._modules = modules
        self._seen: tuple[int, int] | None = None  # the steps and the versions of the parameters at the last look
        self._forwards = 0
        self._finite_in = -1  # the batch of the last look without a suspect
        self._known: set[int] = set()  # modules whose bad weights have a frame, or were there from the start

    def look(self, batch: int, step: int) -> Look | None:
        """Looks at the parameters as a forward of ``batch`` begins, after ``step`` optimizer steps; None: there is no need."""
        self._forwards += 1
        modules = [named for named in self._modules() if named.number not in self._known]
        found = [
            (named, name, value)
            for named in modules
            for name, value in named.module._parameters.items()
            if value is not None and not is_lazy(value) and value.requires_grad
        ]
        shards = self.shards()
        versions = 0 if shards else sum([value._version for _, _, value in found if not value.is_inference()])
        if self._seen == (step, versions) and (step or self._forwards < LOOK_EVERY):
            return None
        is_first, self._seen, self._forwards = self._seen is None, (step, versions), 0
        own: list[tuple[NamedModule, Tensor]] = [
            (named, value) for named, name, value in found if (id(named.module), name) not in shards
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
        suspects: dict[int, NamedModule] = {}
        elsewhere: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        small: dict[torch.dtype, list[tuple[NamedModule, Tensor]]] = defaultdict(list)
        cells: list[Cell] = []
        for named, value in found:
            values = value if type(value) in (Tensor, nn.Parameter) else local(value)
            if not _can_be_summed(values):
                cells.append(self._recorder.cell(values))
            elif not values.is_cpu:
                elsewhere[values.device, values.dtype].append(values)
            elif values.numel() <= SMALL:
                small[values.dtype].append((named, values))
            elif _is_bad(values):
                suspects[named.number] = named
        for members in small.values():
            suspects.update((named.number, named) for named in _bad_among(members))
        cells += [self._recorder.cell(_largest(group)) for group in elsewhere.values()]
        modules = {named.number: named for named, _ in found}
        return Look(is_first, batch, list(modules.values()), list(suspects.values()), cells)


def _bad_among(members: list[tuple[NamedModule, Tensor]]) -> Iterator[NamedModule]:
    """The modules of those of the small parameters, all of one dtype, that are bad."""
    for start in range(0, len(members), JOINED // SMALL):
        joined = members[start : start + JOINED // SMALL]
        if _is_bad(_flatten_dense_tensors([values for _, values in joined])):
            yield from (named for named, values in joined if _is_bad(values))


def _has_bad_weight(frame: PendingFrame) -> bool:
    weights = zip(frame.spec.readings[: frame.weights], frame.cells, strict=False)
    return any(row.kind is Kind.PARAMETER and cell.is_bad for row, cell in weights)


def _can_be_summed(values: Tensor) -> bool:
    is_plain = type(values) in (Tensor, nn.Parameter) and values.layout is torch.strided and not values.is_nested
    try:
        is_there = not values.is_meta and (not values.numel() or values.untyped_storage().nbytes() > 0)
    except NotImplementedError:  # within a transformation of torch.func it has no memory
        return False
    return is_plain and is_there and values.dtype.itemsize > 1


def _is_bad(values: Tensor) -> bool:
    is_finite = math.isfinite(abs(values.sum().item())) or bool(values.isfinite().all())
    return not is_finite


def _largest(group: list[Tensor]) -> Tensor:
    """The largest values of tensors of one device and dtype; nan for a tensor with a nan."""
    group = [values for values in group if values.numel()]
    try:
        norms: Sequence[Tensor] = torch._foreach_norm(group, math.inf)
    except (RuntimeError, NotImplementedError):  # not each version of torch, nor each device, has it
        norms = [torch.linalg.vector_norm(values, math.inf) for values in group]
    return torch.stack(list(norms))
