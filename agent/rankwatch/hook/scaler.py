"""Observes dynamic loss scaling. Where it is in use, an inf gradient is normal: so the scaler finds the scale."""

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
    """Observes every ``torch.amp.GradScaler`` of the process, from its first ``scale`` on.

    Args:
        scaled: called with the scale, a tensor, when a loss is scaled: a scaler is in use.
        updated: called with the scale, a tensor, when a scaler has updated it.
    """

    def __init__(self, scaled: Callable[[Tensor], None], updated: Callable[[Tensor], None]) -> None:
        self.scaled = scaled
        self.updated = updated
        _wrap()
        _listeners.add(self)

    def remove(self) -> None:
        _listeners.discard(self)


class LossScale:
    """The loss scale in use, and whether a non-finite gradient may be its effect.

    It may, until the scale has shrunk ``max_scale_shrinks`` times in a row: then the scale is not the cause.
    """

    def __init__(self, config: Config) -> None:
        self.scale = 0.0
        """As last read; 0: no scaler was seen."""
        self.shrinks = 0
        self._most = config.max_scale_shrinks
        self._read = config.loss_scale
        self._in_use = config.loss_scale is not None
        self._coming: deque[tuple[Tensor, torch.cuda.Event | None]] = deque(maxlen=64)
        self._watch = ScalerWatch(self._scaled, self._updated) if config.gradients else None

    def absorbs(self) -> bool:
        """Whether the scaler is expected to deal with a non-finite gradient that came now."""
        self.poll()
        return self._in_use and self.shrinks < self._most

    def poll(self) -> None:
        """Reads the scales whose copies have arrived. Waits for none."""
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
            self._updated(scale)  # the first shrinking is relative to this one

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
            self.shrinks = 0  # an update without a change: the optimizer step was done
        self.scale = scale


def _wrap() -> None:
    """Wraps methods of the scaler classes. The wrappers stay; without a listener they cost next to nothing."""
    sharded = sys.modules.get("torch.distributed.fsdp.sharded_grad_scaler")
    for scaler in (torch.amp.GradScaler, getattr(sharded, "ShardedGradScaler", None)):
        for name, notify in (("scale", _on_scale), ("update", _on_update)):
            own = vars(scaler).get(name) if scaler is not None else None
            if own is not None and not hasattr(own, "_rankwatch"):
                setattr(scaler, name, _observed(own, notify))


def _observed(original: Callable[..., Any], notify: Callable[[Any], None]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if self.is_enabled():
            notify(self)
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
