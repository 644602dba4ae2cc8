"""Observes dynamic loss scaling. Where it is in use, an inf gradient is normal: so the scaler finds the scale."""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from ...judge.batch import LossScaling
from ...judge.events import Feed, ForwardComes, ScalerStepped, ScaleSpent
from ...judge.lifecycle import Life
from ...measure.tape import to_host
from ...shared.types.config import Config
from ...touch.patched import patch
from ..fails_open import FailsOpen

HIGH = 2.0**16
"""Torch's default scale. A scale that shrinks from above it is still being searched for: that tells nothing."""

_listeners: weakref.WeakSet[LossScales] = weakref.WeakSet()


class Scaled(NamedTuple):
    """Where a scaled loss came from. ``loss`` has no autograd history."""

    scaler: weakref.ref[Any]
    loss: Tensor


_scaled = WeakTensorKeyDictionary()
"""A ``Scaled`` for each scaled loss that still exists."""


class Scale:
    """The scale of one scaler. ``value``: as last read, 0 before. ``shrinks``: how often in a row it has become smaller
    than ``HIGH``.

    ``since`` is the batch of the first of all shrinks in this row; -1: none.
    """

    def __init__(self, read: Callable[[], float] | None = None) -> None:
        self.value = 0.0
        self.shrinks = 0
        self.since = -1
        self._read = read
        self._coming: deque[tuple[Tensor, torch.cuda.Event | None, int]] = deque(maxlen=64)

    def poll(self, batch: int) -> None:
        """Reads what has arrived. Waits for nothing."""
        if self._read is not None:
            self._saw(float(self._read()), batch)
        while self._coming and (self._coming[0][1] is None or self._coming[0][1].query()):
            value, _, of = self._coming.popleft()
            self._saw(float(value), of)

    def update(self, value: Tensor, batch: int) -> None:
        values = value.detach()
        copy, event = to_host(values) if values.is_cuda else (values.to("cpu", copy=True), None)
        self._coming.append((copy, event, batch))

    def _saw(self, value: float, batch: int) -> None:
        if self.value and value < self.value:
            self.shrinks += value < HIGH
            self.since = batch if self.since < 0 else self.since
        elif value > self.value or self._read is None:  # an update without a change: the optimizer step was done
            self.shrinks, self.since = 0, -1
        self.value = value


class Unscaled(NamedTuple):
    """A loss without its scale. ``is_exact``: it was seen before it was scaled, so that an inf is no effect of the scale."""

    loss: Tensor
    scale: Scale | None
    is_exact: bool


class LossScales:
    """The loss scales in use, and whether a non-finite gradient may be the effect of one.

    It may, until that scale has shrunk ``max_scale_shrinks`` times in a row: then the scale is not the cause.

    Args:
        life: the batches, of which one ran its backward last.
        feed: tells ``ScalerStepped``; and ``ScaleSpent`` when a scaler whose scale is not the cause, and scales up no more, has
            done or skipped an optimizer's step.
        doors: catch errors of ours.
    """

    events = (ForwardComes,)

    def __init__(self, config: Config, life: Life, feed: Feed, doors: FailsOpen) -> None:
        self._most = config.max_scale_shrinks
        self._life = life
        self._tell = doors.guarded(feed.tell)
        self._option = Scale(config.loss_scale) if config.loss_scale is not None else None
        self._scales: weakref.WeakKeyDictionary[Any, Scale] = weakref.WeakKeyDictionary()
        self._last = self._option
        self._scaled_last: Scale | None = None
        _wrap()
        _listeners.add(self)

    def on(self, event: ForwardComes) -> None:
        self.poll()

    def poll(self) -> None:
        """Reads the scales whose copies have arrived. Waits for none."""
        batch = self._life.of_backward.position.batch
        if self._option is not None:
            self._option.poll(batch)
        for scale in self._scales.values():
            scale.poll(batch)

    def last(self) -> Scale | None:
        """The scale that was used last; None: none was."""
        self.poll()
        return self._last

    def scaling(self, scale: Scale | None) -> LossScaling:
        """What a backward of a loss with this scale needs to know of it."""
        if scale is None:
            return LossScaling()
        return LossScaling(scale.value, scale.shrinks < self._most, scale.since)

    def unscale(self, handed: Tensor) -> Unscaled:
        """The loss behind what was handed to a backward, which may be scaled."""
        self.poll()
        known: Scaled | None = _scaled.get(handed)
        scaler = known.scaler() if known is not None else None
        if known is not None and scaler is not None and scaler in self._scales:
            return Unscaled(known.loss, self._scales[scaler], is_exact=True)
        scale = self._option or self._scaled_last
        if scale is None or not scale.value:
            return Unscaled(handed.detach(), None, is_exact=True)
        return Unscaled(
            handed.detach().to(torch.promote_types(handed.dtype, torch.float32)) / scale.value, scale, is_exact=False
        )

    def forget_scaled(self) -> None:
        """A backward has ended: the next one's loss may have no scale."""
        self._scaled_last = None

    def remove(self) -> None:
        _listeners.discard(self)

    # --- of every torch.amp.GradScaler of the process, from its first ``scale`` on ---------------------------------------

    def scaled(self, scaler: Any) -> None:
        """The scaler has scaled a loss."""
        if scaler not in self._scales:
            self._scales[scaler] = Scale()
            self.updated(scaler)  # the first shrinking is relative to this one
        self._last = self._scaled_last = self._scales[scaler]

    def updated(self, scaler: Any) -> None:
        """The scaler has updated its scale."""
        if scaler in self._scales:
            self._scales[scaler].update(scaler._scale, self._life.of_backward.position.batch)

    def stepped(self, scaler: Any, optimizer: Optimizer) -> None:
        """The scaler has done or skipped the optimizer's step."""
        scale = self._scales.get(scaler)
        if scale is not None:
            self.poll()
            self._tell(ScalerStepped(optimizer, scaler))
            # Gradients that overflow without any scale, and not merely a loss that is summed and needs a low one.
            if scale.shrinks >= self._most and scale.value <= 1.0:
                self._tell(ScaleSpent(scale, optimizer))


def _wrap() -> None:
    """Wraps methods of the scaler classes."""
    sharded = sys.modules.get("torch.distributed.fsdp.sharded_grad_scaler")
    for scaler in (torch.amp.GradScaler, getattr(sharded, "ShardedGradScaler", None)):
        for name, notify in (("scale", _on_scale), ("step", _on_step), ("update", _on_update)):
            patch(scaler, name, partial(_observed, notify))


def _observed(notify: Callable[..., None], original: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if _listeners and self.is_enabled() and isinstance(getattr(self, "_scale", None), Tensor):
            notify(self, result, *args, **kwargs)
        return result

    return method


def _on_scale(scaler: Any, scaled: Any, outputs: Any) -> None:
    for after, before in zip(_tensors(scaled), _tensors(outputs)):  # noqa: B905  alike, or not known
        _scaled[after] = Scaled(weakref.ref(scaler), before.detach())
    for listener in tuple(_listeners):
        listener.scaled(scaler)


def _on_step(scaler: Any, result: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
    for listener in tuple(_listeners):
        listener.stepped(scaler, optimizer)


def _on_update(scaler: Any, *_: Any, **__: Any) -> None:
    for listener in tuple(_listeners):
        listener.updated(scaler)


def _tensors(outputs: Any) -> Iterator[Tensor]:
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, (list, tuple)):
        for output in outputs:
            yield from _tensors(output)
