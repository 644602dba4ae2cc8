"""Lightning 2: ``Trainer(..., callbacks=[RankwatchCallback()])``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

try:
    import lightning.pytorch as pl
except ImportError:
    import pytorch_lightning as pl

from ..watcher import Watch
from .watching import watch_anew


class RankwatchCallback(pl.Callback):  # type: ignore[misc]
    """Watches the LightningModule while ``fit`` trains it; an overflow raises TrainingAborted in each rank's ``fit``.

    A batch is one ``training_step``, counted over epochs and from the beginning of the training, also of one that was
    resumed; the optimizer step is ``trainer.global_step``. Names are as in the LightningModule.

    Args:
        options: as of ``rankwatch.watch``, but for ``first_batch``, which is the Trainer's.
    """

    def __init__(self, **options: Any) -> None:
        self.watch: Watch | None = None
        """The watch of the training that is running, or ran last."""
        self._options = options
        self._direct: dict[str, Callable[..., Any]] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        ours = [callback for callback in trainer.callbacks if isinstance(callback, RankwatchCallback)]
        if ours[0] is not self:  # the script has one of its own, beside that of zero code
            return
        self._close(pl_module)
        first_batch = trainer.fit_loop.total_batch_idx + 1
        self.watch = watch_anew(trainer.strategy.model, first_batch=first_batch, **self._options)
        if trainer.strategy.model is pl_module:
            for name in ("training_step", "validation_step"):
                self._direct[name] = _through_forward(pl_module, name)

    def on_train_batch_start(self, trainer: pl.Trainer, *more: Any) -> None:
        if self.watch is not None:
            self.watch.optimizer_step = trainer.global_step

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._close(pl_module)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._restore(pl_module)  # how the process ends is told where the exception ends it

    def _close(self, pl_module: pl.LightningModule) -> None:
        self._restore(pl_module)
        if self.watch is not None:
            self.watch.close()
            self.watch = None

    def _restore(self, pl_module: pl.LightningModule) -> None:
        for name, step in self._direct.items():
            _restore(pl_module, name, step)
        self._direct.clear()


def _through_forward(module: nn.Module, name: str) -> Callable[..., Any]:
    """Has a step of a module run as its forward, as the strategies that wrap it have it. Returns the step as it was."""
    before: Callable[..., Any] = getattr(module, name)
    function: Callable[..., Any] = getattr(type(module), name, before)
    if getattr(before, "__func__", None) is not function:
        redirected = functools.wraps(before)(lambda *args, **kwargs: _as_forward(module, before, args, kwargs))
        setattr(module, name, redirected)
        return before

    @functools.wraps(function)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _as_forward(self, MethodType(function, self), args, kwargs)

    setattr(module, name, MethodType(method, module))  # it goes with a copy or a pickle of the module
    return before


def _as_forward(module: nn.Module, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    forward = module.forward

    def inner(*args: Any, **kwargs: Any) -> Any:
        _restore(module, "forward", forward)  # the step may call it
        return step(*args, **kwargs)

    module.forward = inner
    try:
        return module(*args, **kwargs)
    finally:
        _restore(module, "forward", forward)


def _restore(module: nn.Module, name: str, method: Callable[..., Any]) -> None:
    """Gives a module a method back: as an attribute of its own only where it is not its class's."""
    if getattr(method, "__func__", None) is getattr(type(module), name, None):
        module.__dict__.pop(name, None)
    else:
        setattr(module, name, method)
