"""The Trainer of Hugging Face transformers: ``Trainer(..., callbacks=[RankwatchCallback()])``."""

from __future__ import annotations

import logging
import math
import sys
from types import FrameType
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.debug_utils import DebugOption
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_utils import has_length

from ..drop_in import remove_their_detector
from ..errors import TrainingAborted
from ..watcher import Watch
from .watching import watch_anew

log = logging.getLogger(__name__)


class RankwatchCallback(TrainerCallback):  # type: ignore[misc]
    """Watches the model from the beginning of ``train()`` to its end, and stops by the Trainer's own control.

    A batch is a micro-batch of the Trainer, counted from the beginning of the training, also of one that was resumed; the
    optimizer step is its global step. On an overflow every rank's step is finished without touching the weights, nothing is
    saved or evaluated any more, each callback's ``on_train_end`` runs, and then ``train()`` raises TrainingAborted. With
    ``--debug underflow_overflow`` this is in the place of the Trainer's own detector, with its policy, ``strict``.

    Args:
        options: as of ``rankwatch.watch``, but for ``stop`` and ``first_batch``, which are the Trainer's.
    """

    def __init__(self, **options: Any) -> None:
        self.watch: Watch | None = None
        """The watch of the training that is running, or ran last."""
        self._options = options
        self._error: TrainingAborted | None = None

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: nn.Module,
        train_dataloader: Any,
        **more: Any,
    ) -> None:
        self._close()
        self._error = None
        options = self._options
        if DebugOption.UNDERFLOW_OVERFLOW in args.debug:
            remove_their_detector(model)
            options = {"policy": "strict", **options}
        if args.logging_nan_inf_filter and state.is_world_process_zero:
            log.warning(
                "rankwatch: the Trainer leaves inf and nan out of the loss it logs; logging_nan_inf_filter=False shows them"
            )
        first_batch = _micro_batches(args, state, train_dataloader)
        self.watch = watch_anew(model, first_batch=first_batch, stop=self._stop, **options)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        if self.watch is not None:
            self.watch.optimizer_step = state.global_step

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> TrainerControl:
        if self._error is not None:
            control.should_training_stop = True
            control.should_save = control.should_evaluate = False  # either may take longer than the grace
        return control

    on_substep_end = on_epoch_end = on_step_end

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        if self._error is None:
            self._close()
            return
        handler = _handler()
        if handler is None:
            raise self._error
        handler.callbacks.append(_Last(self._error, handler))  # the list is being walked: the others come first

    def _stop(self, error: TrainingAborted) -> None:
        self._error = error

    def _close(self) -> None:
        if self.watch is not None:
            self.watch.close()


class _Last(TrainerCallback):  # type: ignore[misc]
    """Raises once the other callbacks have heard of the end: what follows ``train()`` is not to run as if all were well."""

    def __init__(self, error: TrainingAborted, handler: CallbackHandler) -> None:
        self._error = error
        self._handler = handler

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        self._handler.callbacks.remove(self)
        raise self._error


def _handler() -> CallbackHandler | None:
    """The Trainer's list of callbacks, which tells them nothing of itself: it is among our callers."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not isinstance(frame.f_locals.get("self"), CallbackHandler):
        frame = frame.f_back
    return frame and frame.f_locals["self"]


def _micro_batches(args: TrainingArguments, state: TrainerState, loader: Any) -> int:
    """How many a training has behind it: the last step of an epoch may have had fewer than the others."""
    each = args.gradient_accumulation_steps
    if not has_length(loader):
        return int(state.global_step * each)
    epochs, steps = divmod(state.global_step, max(1, math.ceil(len(loader) / each)))
    return int(epochs * len(loader) + steps * each)
