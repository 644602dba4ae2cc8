"""Counts where the ranks' numbers of optimizer steps may come apart: in ``Join``, each rank has batches of its own number."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch.distributed

log = logging.getLogger(__name__)

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
        _replace(Join, method)


def _replace(cls: Any, method: str) -> None:
    own = getattr(cls, method, None)
    if own is None or hasattr(own, "_rankwatch"):
        return
    counted: Any = _counted(own)
    counted._rankwatch = True
    setattr(cls, method, counted)


def _counted(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(self: Any, *args: Any) -> Any:
        global _eras
        _eras += bool(getattr(self, "_enable", False))
        return original(self, *args)

    return call
