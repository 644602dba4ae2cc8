"""rankwatch: finds the first inf/nan of a distributed PyTorch training and its cause, and stops every rank.

Importing this package imports neither torch nor zmq: each name below is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api.detect_overflow import detect_overflow
    from .api.drop_in import DebugUnderflowOverflow
    from .api.watch import unwatch, watch
    from .api.watch_object import Watch
    from .errors import (
        BatchLimitReached,
        ConnectionFileError,
        OverflowDetected,
        ProtocolError,
        RankwatchError,
        TrainingAborted,
        UsageError,
    )
    from .tell.holds import hold

__version__ = "0.1.0"

__all__ = [
    "BatchLimitReached",
    "ConnectionFileError",
    "DebugUnderflowOverflow",
    "OverflowDetected",
    "ProtocolError",
    "RankwatchError",
    "TrainingAborted",
    "UsageError",
    "Watch",
    "detect_overflow",
    "hold",
    "unwatch",
    "watch",
]

_HOME = {
    "DebugUnderflowOverflow": ".api.drop_in",
    "Watch": ".api.watch_object",
    "detect_overflow": ".api.detect_overflow",
    "hold": ".tell.holds",
    "unwatch": ".api.watch",
    "watch": ".api.watch",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME.get(name, ".errors"), __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
