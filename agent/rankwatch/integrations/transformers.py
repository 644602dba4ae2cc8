"""The Trainer of Hugging Face transformers: ``Trainer(..., callbacks=[RankwatchCallback()])``."""

from __future__ import annotations

import logging
import math
import sys
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.debug_utils import DebugOption
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_utils import has_length

from ..api.drop_in import remove_their_detector
from ..errors import TrainingAborted
from ..touch.stack import outwards
from .watching import WatchingCallback

log = logging.getLogger(__name__)


class RankwatchCallback(WatchingCallback, TrainerCallback):  # type: ignore[misc]
    """Watches the model from the beginning to the end of ``train()``, and stops the training by the Trainer's own control.

    A batch is a micro-batch of the Trainer, counted from the beginning of the training, even after a resume. The optimizer
    step is the Trainer's global step. On an overflow every rank ends its step without changing the weights, saves and
    evaluates nothing more, runs each callback's ``on_train_end``, and then ``train()`` raises TrainingAborted. With ``--debug
    underflow_overflow`` this callback replaces the Trainer's own detector and takes over its policy, ``strict``.

    Args:
        options: as of ``rankwatch.watch``, except ``stop`` and ``first_batch``, which this callback and the Trainer set.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
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
        self._close_watch()
        self._error = None
        policy = {}
        if DebugOption.UNDERFLOW_OVERFLOW in args.debug:
            remove_their_detector(model)
            policy = {} if "policy" in self._options else {"policy": "strict"}
        if args.logging_nan_inf_filter and state.is_world_process_zero:
            log.warning(
                "rankwatch: the Trainer leaves inf and nan out of the loss it logs; logging_nan_inf_filter=False shows them"
            )
        first_batch = _micro_batches(args, state, train_dataloader)
        self._open_watch(model, first_batch=first_batch, stop=self._stop, **policy)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        self._begin_step(state.global_step)

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
            self._close_watch()
            return
        handler = _handler()
        if handler is None:
            raise self._error
        handler.callbacks.append(_Last(self._error, handler))  # appended while the list is iterated, so it runs last

    def _stop(self, error: TrainingAborted) -> None:
        self._error = error


class _Last(TrainerCallback):  # type: ignore[misc]
    """Raises after the other callbacks' ``on_train_end``: the code after ``train()`` must not run as if all were well."""

    def __init__(self, error: TrainingAborted, handler: CallbackHandler) -> None:
        self._error = error
        self._handler = handler

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        self._handler.callbacks.remove(self)
        raise self._error


def _handler() -> CallbackHandler | None:
    """The Trainer's list of callbacks. It is not passed to a callback, so it is looked up among the callers."""
    callers = (frame.f_locals.get("self") for frame in outwards(sys._getframe(1)))
    return next((caller for caller in callers if isinstance(caller, CallbackHandler)), None)


def _micro_batches(args: TrainingArguments, state: TrainerState, loader: Any) -> int:
    """The micro-batches before a resumed training: the last step of each epoch may have fewer than the others."""
    each = args.gradient_accumulation_steps
    if not has_length(loader):
        return int(state.global_step * each)
    epochs, steps = divmod(state.global_step, max(1, math.ceil(len(loader) / each)))
    return int(epochs * len(loader) + steps * each)
