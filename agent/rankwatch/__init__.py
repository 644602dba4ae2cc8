"""rankwatch: finds the first inf/nan of a distributed PyTorch training and its cause, and stops every rank.

Importing this package imports neither torch nor zmq: each name below is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .drop_in import DebugUnderflowOverflow
    from .entry import unwatch, watch
    from .errors import (
        BatchLimitReached,
        ConnectionFileError,
        OverflowDetected,
        ProtocolError,
        RankwatchError,
        TrainingAborted,
        UsageError,
    )
    from .mark import detect_overflow
    from .tell.holds import hold
    from .watcher import Watch

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
    "DebugUnderflowOverflow": ".drop_in",
    "Watch": ".watcher",
    "detect_overflow": ".mark",
    "hold": ".tell.holds",
    "unwatch": ".entry",
    "watch": ".entry",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME.get(name, ".errors"), __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
