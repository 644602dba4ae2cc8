"""Buffers that are in no checkpoint and that nobody writes, such as a table of angles: ranks that hold one model have the same.

One that was never initialised holds what was in memory: other numbers on each rank. A cache of a rank's own is written or
replaced by the forward. So a buffer counts once the first forward has left it as it was, and only as the training begins: see
``Constant``. What DDP broadcasts is written, and is equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from weakref import ref

import torch
from torch import Tensor, nn

from ..measure.modules import NamedModule
from ..shared.types.fingerprint import NO_GATHER, OF_BUFFERS, RankMesh
from .fsdp_units import Found

LOOKS = 2
"""Fingerprints that have a buffer, after the first one. A code that writes to ``x.data`` later is not seen to do so."""

MOST_NUMBERS = 1 << 22
"""In all buffers of a model that are compared. They are read LOOKS times."""


def constants_in(modules: Iterable[NamedModule], inputs: RankMesh) -> Iterator[Found]:
    """The rows of such buffers, each once. Ranks whose ``inputs`` must differ hold one model, as far as anybody knows."""
    replicated = tuple(not is_same for is_same in inputs.replicated)
    mesh = replace(inputs, replicated=replicated, gathers=NO_GATHER, source=OF_BUFFERS, is_declared=False)
    seen, left = set[int](), MOST_NUMBERS
    for named in modules:
        for name in sorted(named.module._non_persistent_buffers_set):
            value = named.module._buffers.get(name)
            if value is None or id(value) in seen or not _is_unwritten(value) or value.numel() > left:
                continue
            seen.add(id(value))
            left -= value.numel()
            own = Constant(named.module, name)
            yield Found(value.dtype, value.numel(), False, mesh, None, own, name=named.label(name))


class Constant:
    """How the numbers of a buffer are distributed, in LOOKS calls; None as the buffer is seen first, and once it was written."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module = ref(module)
        self._name = name
        self._begun: tuple[int, Tensor] | None = None
        self._left = LOOKS

    def __call__(self) -> Tensor | None:
        module = self._module()
        value = None if module is None else module._buffers.get(self._name)
        if value is None or not self._left or not _is_unwritten(value):
            return None
        found = _distribution(value)
        if self._begun is None:
            self._begun = id(value), found
            return None
        is_same = self._begun[0] == id(value) and torch.equal(self._begun[1], found)
        self._left = self._left - 1 if is_same else 0
        return found if is_same else None


def _is_unwritten(value: Tensor) -> bool:
    """Of integers, one may well say which rank it is."""
    is_plain = type(value) is Tensor and not value.is_meta and value.layout is torch.strided and value.numel() > 0
    is_number = value.is_floating_point() or value.is_complex()
    return is_plain and is_number and not value.is_inference() and not value._version


def _distribution(value: Tensor) -> Tensor:
    """Four numbers in bfloat16: hosts of two kinds may compute a cosine that differs in its last bits."""
    numbers = (torch.view_as_real(value.resolve_conj()) if value.is_complex() else value).detach().float()
    return torch.stack([numbers.min(), numbers.max(), numbers.mean(), numbers.square().mean()]).to(torch.bfloat16)
