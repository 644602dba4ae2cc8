"""What the callbacks share."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

from torch import nn

from ..measure.modules import unwrap
from ..registry import open_watches
from ..watcher import Watch, watch

_made: WeakSet[Watch] = WeakSet()


def watch_anew(model: nn.Module, **options: Any) -> Watch:
    """``watch``, in the place of a callback's that an exception has left on this model: in a notebook one trains again."""
    for earlier in open_watches():
        if earlier in _made and earlier.root is unwrap(model):
            earlier.end()
    made = watch(model, **options)
    _made.add(made)
    return made
