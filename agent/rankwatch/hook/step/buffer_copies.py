"""The buffers of a model as they were before a step: running statistics, which a forward has written, are put back from them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...measure.extremes import local
from ...measure.modules import Modules

SMALL = 1 << 16
"""Elements of a buffer that is copied in any case: torch's batch_norm writes statistics without a new version. A mask or a table
may be larger, and is not written so."""


class _BufferCopy(NamedTuple):
    """A buffer, its version, and a copy of its values as they were with that version."""

    value: Tensor
    version: int
    copy: Tensor


class BufferCopies:
    """Copies of all buffers of a model. A large one that was not written since its last copy is not copied again."""

    def __init__(self, model: Modules) -> None:
        self._model = model
        self._kept: dict[tuple[int, str], _BufferCopy] = {}

    @torch.no_grad()
    def keep(self, *, trusts_versions: bool) -> None:
        """Copies what was written. ``trusts_versions``: a change shows in a tensor's version; compiled code may not count it."""
        before, self._kept = self._kept, {}
        old: list[Tensor] = []
        new: list[Tensor] = []
        for named in self._model.modules:
            module = named.module
            for name, value in module._buffers.items():
                if value is None or value.is_meta or value.is_inference():
                    continue
                known = before.get((id(module), name))
                if known is None or known.value is not value:
                    known = _BufferCopy(value, value._version, value.detach().clone())
                elif known.version != value._version or not trusts_versions or value.numel() <= SMALL:
                    old.append(known.copy)
                    new.append(value.detach())
                    known = known._replace(version=value._version)
                self._kept[id(module), name] = known
        if old:
            torch._foreach_copy_(old, new)

    @torch.no_grad()
    def put_back(self) -> tuple[str, ...]:
        """Each buffer has the values of its copy. Returns the names of those that had others."""
        names = []
        for named in self._model.modules:
            for name in named.module._buffers:
                kept = self._kept.get((id(named.module), name))
                if kept is not None and self._put_back(named.module, name, kept):
                    names.append(named.label(name))
        return tuple(names)

    def _put_back(self, module: nn.Module, name: str, kept: _BufferCopy) -> bool:
        value = module._buffers[name]
        is_same = value is kept.value and torch.equal(local(value), local(kept.copy))
        if not is_same:
            module._buffers[name] = kept.value
            kept.value.copy_(kept.copy)
            self._kept[id(module), name] = kept._replace(version=kept.value._version)
        return not is_same
