"""The capsule of a module inside of a forward: the root's may be larger than the disk.

Where the numbers are judged at the end of a batch, the module's own inputs are gone. The root's forward runs once more until it
calls the module: what it gives it then is written, with the random state and autocast of that moment.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import nn

from ..touch.torch_private import without_modes
from .capsule.capsule import CapsuleWritten
from .careful import Careful, Stopped
from .forward import Forward, run_again
from .limit import Limit

log = logging.getLogger(__name__)


def keep_inner(forward: Forward, keep: Callable[[Forward, float], CapsuleWritten], until: float) -> CapsuleWritten | None:
    """Writes the capsule of ``forward.inner``, a module; None if it was not called again."""
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
        run_again(forward, mode, grad=forward.entry is None or forward.entry.has_gradients)
    except (Stopped, Exception) as stop:  # noqa: BLE001  the root's capsule is written in its place
        log.debug("%s: %s", type(inner).__name__, stop)
    finally:
        handle.remove()
    return found[0] if found else None
