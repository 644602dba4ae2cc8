"""Dynamic loss scaling in use, seen from outside: while it is, an inf gradient is its way of finding the scale."""

from __future__ import annotations

import functools
import sys
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..shared.config import Config

_listeners: weakref.WeakSet[ScalerWatch] = weakref.WeakSet()


class ScalerWatch:
    """Hears of every ``torch.amp.GradScaler`` of the process, from its first ``scale`` on.

    Args:
        scaled: a loss is scaled by this scale, a tensor: a scaler is in use.
        updated: a scaler has set its scale, a tensor, anew.
    """

    def __init__(self, scaled: Callable[[Tensor], None], updated: Callable[[Tensor], None]) -> None:
        self.scaled = scaled
        self.updated = updated
        _wrap()
        _listeners.add(self)

    def remove(self) -> None:
        _listeners.discard(self)


class LossScale:
    """The loss scale in use, and whether it can still be expected to deal with a gradient that is not finite.

    It can, until it has shrunk ``max_scale_shrinks`` times in a row: then it is not the scale that is wrong.
    """

    def __init__(self, config: Config) -> None:
        self.scale = 0.0
        """As last read; 0: none was seen in use."""
        self.shrinks = 0
        self._most = config.max_scale_shrinks
        self._read = config.loss_scale
        self._in_use = config.loss_scale is not None
        self._coming: deque[tuple[Tensor, torch.cuda.Event | None]] = deque(maxlen=64)
        self._watch = ScalerWatch(self._scaled, self._updated) if config.gradients else None

    def absorbs(self) -> bool:
        """Whether a bad gradient that came just now is the scaler's business."""
        self.poll()
        return self._in_use and self.shrinks < self._most

    def poll(self) -> None:
        """Takes what the scaler has come to in the meantime. Waits for nothing."""
        if self._read is not None:
            self._saw(float(self._read()))
        while self._coming and (self._coming[0][1] is None or self._coming[0][1].query()):
            self._saw(float(self._coming.popleft()[0]))

    def close(self) -> None:
        if self._watch is not None:
            self._watch.remove()

    def _scaled(self, scale: Tensor) -> None:
        if not self._in_use:
            self._in_use = True
            self._updated(scale)  # what the first shrinking is measured from

    def _updated(self, scale: Tensor) -> None:
        if scale.device.type == "cuda":
            copy = torch.empty(scale.shape, dtype=scale.dtype, pin_memory=True)
            copy.copy_(scale, non_blocking=True)
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(scale.device))
            self._coming.append((copy, event))
        else:
            self._coming.append((scale.detach().to("cpu", copy=True), None))

    def _saw(self, scale: float) -> None:
        if self.scale and scale != self.scale:
            self.shrinks = self.shrinks + 1 if scale < self.scale else 0
        elif scale == self.scale and self._read is None:
            self.shrinks = 0  # an update that left it alone: the step was taken
        self.scale = scale


def _wrap() -> None:
    """Puts our ears on the classes; they stay, and cost nothing to speak of while nobody listens."""
    sharded = sys.modules.get("torch.distributed.fsdp.sharded_grad_scaler")
    for scaler in (torch.amp.GradScaler, getattr(sharded, "ShardedGradScaler", None)):
        for name, tell in (("scale", _on_scale), ("update", _on_update)):
            own = vars(scaler).get(name) if scaler is not None else None
            if own is not None and not hasattr(own, "_rankwatch"):
                setattr(scaler, name, _heard(own, tell))


def _heard(original: Callable[..., Any], tell: Callable[[Any], None]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if self.is_enabled():
            tell(self)
        return result

    method._rankwatch = True  # type: ignore[attr-defined]
    return method


def _on_scale(scaler: Any) -> None:
    if isinstance(getattr(scaler, "_scale", None), Tensor):
        for listener in tuple(_listeners):
            listener.scaled(scaler._scale)


def _on_update(scaler: Any) -> None:
    if isinstance(getattr(scaler, "_scale", None), Tensor):
        for listener in tuple(_listeners):
            listener.updated(scaler._scale)
