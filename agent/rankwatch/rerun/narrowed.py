"""The capsule of a module inside of a forward: the root's may be larger than the disk.

Where the numbers are judged at the end of a batch, the module's own inputs are gone. The root's forward runs once more until it
calls the module: what it gives it then is written, with the random state and autocast of that moment.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ..touch.torch_private import without_modes
from .capsule.capsule import CapsuleWritten
from .careful import Careful
from .engine import Rerun
from .forward import Forward
from .limit import Limit


def keep_inner(forward: Forward, keep: Callable[[Forward, float], CapsuleWritten], until: float) -> CapsuleWritten | None:
    """Writes the capsule of ``forward.inner``, a module; None if it was not called again: then the root's is written."""
    inner, calls = forward.inner, 0
    found: list[CapsuleWritten] = []
    mode = Careful([*forward.module.buffers()], Limit(until))

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == forward.nth:
            with without_modes():
                found.append(keep(Forward(module, args, kwargs, forward.label), until))
            mode.stop("the capsule is written")

    assert isinstance(inner, nn.Module)
    handle = inner.register_forward_pre_hook(enter, with_kwargs=True)
    try:
        Rerun(forward, mode).forward(grad=forward.entry is None or forward.entry.has_gradients)
    finally:
        handle.remove()
    return found[0] if found else None
