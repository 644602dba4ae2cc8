"""Finds buffers that nobody has written since ``to_empty`` made them: a table of angles, say, that a checkpoint does not have.

Such a buffer holds what was in memory, which is another thing on each rank. Its numbers may well be finite, so they say nothing:
what is looked at is whether they were ever written. One that is all zeros is not told, as nobody knows whether that is meant.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from ..judge.events import OutputsCame
from ..measure.modules import Modules, class_name
from ..shared.bounded import BoundedDict
from ..shared.types.notice import NEVER_WRITTEN, Notice, NoticeKind
from ..touch.parts import buffers_in
from ..touch.patched import patch

MOST_BYTES = 1 << 22
"""Of a buffer that is looked at: tables of angles are smaller."""

MOST = 4096
"""Buffers that are remembered."""

_made = BoundedDict[int, tuple["ref[Tensor]", int, bytes]](MOST)
"""By ``id``: what ``to_empty`` has made, its version, and a digest of what was in memory."""


class Unwritten:
    """Looks once, as the first batch returns: what a forward writes, it has written by then."""

    events = (OutputsCame,)

    def __init__(self, model: Modules, notify: Callable[[Notice], None]) -> None:
        self._model = model
        self._notify = notify
        self._has_looked = False

    def on(self, event: OutputsCame) -> None:
        if self._has_looked or not _made:
            return
        self._has_looked, batch = True, event.part.batch.position.batch
        for named in self._model.modules:
            for name, value in named.module._buffers.items():
                if value is not None and _is_unwritten(value):
                    about = named.names[0], class_name(named.module), name, str(value.dtype).removeprefix("torch.")
                    self._notify(Notice(NoticeKind.BUFFER, *about, batch, batch, 0.0, 0.0, NEVER_WRITTEN))


def remember_empty() -> None:
    """Wraps ``to_empty``, once for the process."""
    patch(nn.Module, "to_empty", _remembering)


def _remembering(original: Callable[..., Any]) -> Callable[..., Any]:
    def to_empty(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        made = original(self, *args, **kwargs)
        for value in buffers_in(self):
            held = _digest(value)
            if held is not None:
                _made[id(value)] = ref(value, partial(_forget, id(value))), value._version, held
        return made

    return to_empty


def _forget(place: int, _: Any) -> None:
    _made.pop(place, None)


def _is_unwritten(value: Tensor) -> bool:
    found = _made.get(id(value))
    return found is not None and found[0]() is value and found[1] == value._version and found[2] == _digest(value)


def _digest(value: Tensor) -> bytes | None:
    """None: it is too large, has no memory of its own, or is all zeros."""
    if type(value) is not Tensor or value.is_meta or value.layout is not torch.strided or not value.numel():
        return None
    if value.numel() * value.element_size() > MOST_BYTES:
        return None
    held = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return blake2b(held).digest() if any(held) else None
