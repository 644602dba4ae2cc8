"""Counts where the ranks' numbers of optimizer steps may come apart: in ``Join``, each rank has batches of its own number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed

from ..touch.patched import patch

_eras = 0


def era() -> int:
    """The number of enabled joins that this process has begun and ended, the same on all ranks between two of them."""
    return _eras


def watch_joins() -> None:
    """Counts them from now on."""
    if not torch.distributed.is_available():
        return
    from torch.distributed.algorithms.join import Join

    for method in ("__enter__", "__exit__"):
        patch(Join, method, _counted)


def _counted(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, *args: Any) -> Any:
        global _eras
        _eras += bool(getattr(self, "_enable", False))
        return original(self, *args)

    return call
