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

from ..touch.patched import OURS
from .watching import WatchingCallback


class RankwatchCallback(WatchingCallback, pl.Callback):  # type: ignore[misc]
    """Watches the LightningModule while ``fit`` trains it; an overflow raises TrainingAborted in each rank's ``fit``.

    A batch is one ``training_step``, counted over all epochs from the beginning of the training, even after a resume; where the
    module optimizes by hand, one of its backwards, which are not to be within a forward. The optimizer step is
    ``trainer.global_step``. Names are relative to the LightningModule.

    Args:
        options: as of ``rankwatch.watch``, except ``first_batch``, which the Trainer sets.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._steps: dict[str, Callable[..., Any]] = {}
        """The module's own methods, by name, while they are redirected through its forward."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        ours = [callback for callback in trainer.callbacks if isinstance(callback, RankwatchCallback)]
        if ours[0] is not self:  # the script added a callback, and so did the entry point: one of them watches
            return
        self._close(pl_module)
        self._open_watch(trainer.strategy.model, first_batch=trainer.fit_loop.total_batch_idx + 1)
        if trainer.strategy.model is pl_module and pl_module.automatic_optimization:
            for name in ("training_step", "validation_step"):
                self._steps[name] = _through_forward(pl_module, name)

    def on_train_batch_start(self, trainer: pl.Trainer, *more: Any) -> None:
        self._begin_step(trainer.global_step)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._close(pl_module)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._restore(pl_module)  # the watch stays open: where the exception ends the process, it reports how
        if self.watch is not None:
            self.watch.look_back(exception)  # now, as the strategy moves the model to the host next

    def _close(self, pl_module: pl.LightningModule) -> None:
        self._restore(pl_module)
        self._close_watch()
        self.watch = None

    def _restore(self, pl_module: pl.LightningModule) -> None:
        for name, step in self._steps.items():
            _put_back(pl_module, name, step)
        self._steps.clear()


def _through_forward(module: nn.Module, name: str) -> Callable[..., Any]:
    """Makes a step of the module run inside its forward, where the hooks are. Returns the original step.

    Strategies that wrap the module, such as DDP's, do the same.
    """
    before: Callable[..., Any] = getattr(module, name)
    function: Callable[..., Any] = getattr(type(module), name, before)
    if getattr(before, "__func__", None) is not function:
        redirected = functools.wraps(before)(lambda *args, **kwargs: _as_forward(module, before, args, kwargs))
        setattr(module, name, redirected)
        return before

    @functools.wraps(function)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _as_forward(self, MethodType(function, self), args, kwargs)

    setattr(method, OURS, True)  # no copy or pickle of the module has it
    setattr(module, name, MethodType(method, module))
    return before


def _as_forward(module: nn.Module, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    forward = module.forward

    def inner(*args: Any, **kwargs: Any) -> Any:
        _put_back(module, "forward", forward)  # the step may call it
        return step(*args, **kwargs)

    module.forward = inner
    try:
        return module(*args, **kwargs)
    finally:
        _put_back(module, "forward", forward)


def _put_back(module: nn.Module, name: str, method: Callable[..., Any]) -> None:
    """Restores a method of the module: an attribute of the instance only where it is not the method of its class."""
    if getattr(method, "__func__", None) is getattr(type(module), name, None):
        module.__dict__.pop(name, None)
    else:
        setattr(module, name, method)
