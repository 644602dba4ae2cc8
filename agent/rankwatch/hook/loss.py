"""What is handed to ``torch.autograd.backward``: the losses. Every training loop ends there."""

from __future__ import annotations

import functools
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..judge.events import BackwardBegins, BackwardEnded, BackwardReached, OutputsCame
from ..judge.settler import Settler
from ..judge.steps.held import loss_labels
from ..measure.modules import NamedModule
from ..measure.recorder import Recorder
from ..measure.walk import outputs_of
from ..rerun.loss_backward import LossBackward
from ..rerun.loss_graph import LossOrigin, Outputs, origin_after_backward, origin_of_loss
from ..shared.types.tuning import Check
from ..touch.parts import modules_in
from ..touch.patched import patch, remove_our_frame
from ..touch.torch_private import never_compile
from ..touch.unseen import quietly
from . import backward
from .batches import Batches
from .hooks import Hooks
from .running import is_capturing
from .step.scaler import LossScales
from .turns import LossTurns

MAX_LOOKS = 16
"""Bad losses whose graph is looked at in ``AGAIN`` batches. A training that goes on with them is not slowed down for ever."""

AGAIN = 100

_watches: weakref.WeakValueDictionary[int, BackwardWatch] = weakref.WeakValueDictionary()


class BackwardListener(Protocol):
    """See ``BackwardWatch``."""

    @property
    def backward_begins(self) -> Callable[[Any, Any], None]: ...
    @property
    def backward_ends(self) -> Callable[[bool], None]: ...


class BackwardWatch:
    """Sees every backward of the process, except one that is a part of a running backward, as in reentrant checkpointing.

    Args:
        listener: ``backward_begins`` is called before the backward, with what ``torch.autograd.backward`` was given, see
            ``losses_of``; ``backward_ends`` after it, with whether it returned: if not, it raised.
    """

    def __init__(self, listener: BackwardListener) -> None:
        self.listener = listener
        patch(torch.autograd, "backward", _observed)
        _watches[id(self)] = self

    def remove(self) -> None:
        _watches.pop(id(self), None)


class Losses:
    """The losses of one model: of the backwards that reach what it returned, or a parameter of it.

    Args:
        settler: where it judges each frame at once, the number of a loss on a device is waited for.
    """

    events = (OutputsCame, BackwardBegins, BackwardReached, BackwardEnded)

    def __init__(
        self, batches: Batches, scales: LossScales, recorder: Recorder, hooks: Hooks, settler: Settler, turns: LossTurns
    ) -> None:
        self._turns = turns
        self._batches = batches
        self._scales = scales
        self._recorder = recorder
        self._hooks = hooks
        self._handed: list[Tensor] = []  # to the backward that runs, while it has not reached the model
        self._thread = 0
        """The thread of the backward that runs."""
        self._before: list[tuple[int, int] | None] | None = None
        """Of each parameter, what shows that a backward adds to its gradient; None: another thread's backward runs."""
        self._settler = settler
        self._outputs = Outputs()
        self._origin: LossOrigin | None = None
        """Where the first bad one of the losses came from."""
        self._backward: LossBackward | None = None
        """Of the backward that runs, while it has not reached the model."""
        self._watched: LossBackward | None = None
        self._looks = 0
        self._looks_since = -AGAIN

    def on(self, event: OutputsCame | BackwardBegins | BackwardReached | BackwardEnded) -> None:
        match event:
            case OutputsCame():
                self._outputs.add(outputs_of(event.output))
                event.part.loss_labels = loss_labels(event.output)
            case BackwardBegins():
                self._begin(event)
            case BackwardReached():
                self.take()
            case BackwardEnded(is_taken):
                self._end(is_taken)

    def _begin(self, event: BackwardBegins) -> None:
        here = threading.get_ident()
        if event.is_own or self._thread in (0, here):
            self._thread = here
            self._handed = event.losses
            self._before = event.versions
            self._origin = self._look(event.losses)
            self._watch_backward(event.losses)

    def _look(self, losses: list[Tensor]) -> LossOrigin | None:
        """The backward frees what autograd has saved: before it, the graph of a bad loss tells where it came from."""
        plain = [loss for loss in losses if type(loss) is Tensor and loss.numel() == 1 and not loss.is_meta]
        if not all(loss.device.type == "cpu" or self._settler.check is Check.FRAME for loss in plain):
            return LossOrigin(later=functools.partial(origin_after_backward, weakref.ref(plain[0]), self._outputs))
        try:
            bad = next((loss for loss in plain if not math.isfinite(abs(loss.item()))), None)
        except RuntimeError:  # within a transformation of torch.func, say, it has no number
            return None
        if bad is None:
            return None
        if (batch := self._batches.life.position.batch) >= self._looks_since + AGAIN:
            self._looks_since, self._looks = batch, 0
        self._looks += 1
        if self._looks > MAX_LOOKS:
            return LossOrigin(note=f"its operator is not known: {MAX_LOOKS} losses before were bad, too")
        return origin_of_loss(bad, self._outputs, self._is_model)

    def _watch_backward(self, losses: list[Tensor]) -> None:
        """Of a bad loss the origin is known; else one looks where its gradient becomes inf or nan."""
        if self._watched is not None:
            self._watched.remove()
        self._watched = self._backward = None
        if self._origin is None or self._origin.later is not None:
            self._watched = self._backward = LossBackward(losses, self._outputs, self._is_model)

    def _is_model(self, module: nn.Module) -> bool:
        return any(one is self._hooks.root for one in modules_in(module))

    def take(self) -> None:
        """The backward has reached the model: what was handed to it is a loss of the batch whose backward runs."""
        if not self._handed:
            return
        handed, self._handed = self._handed, []
        batch, root = self._batches.life.of_backward, self._hooks.named(self._hooks.root)
        if root is None or not batch.is_streamed:
            return
        batch.loss_backward, self._backward = self._backward, None
        unscaled = [self._scales.unscale(tensor) for tensor in handed]
        batch.scaling = self._scales.scaling(next((one.scale for one in unscaled if one.scale is not None), None))
        values = [one.loss for one in unscaled]
        whose = self._turns.take(is_bad=self._origin is not None and self._origin.later is None)
        labels = _name(handed, whose.label)
        frame = self._recorder.losses(batch.position, root, list(zip(labels, values, strict=True)), whose.name)
        frame.is_absorbed = batch.scaling.absorbs and not all(one.is_exact for one in unscaled)
        self._batches.add_loss(frame, values, self._origin)

    def _end(self, is_taken: bool) -> None:
        """If the backward has reached the model, and no hook told so, its losses are taken.

        The output of a compiled root, say, has no hook. The parameters' gradients tell. A frozen model has none, nor need
        its output lead to them: there, the first backward after its forward is taken.
        """
        if self._thread != threading.get_ident():
            return
        self._thread = 0
        if self._watched is not None:
            self._watched.remove()
            self._watched = None
        is_open = bool(self._handed) and is_taken and self._before is not None
        has_come = is_open and versions_of(self._hooks.own) != self._before
        self._batches.life.use.has_trained |= has_come
        if is_open and (has_come or self._awaits_frozen()):
            if self._batches.life.candidate_part is not None:
                self._batches.reach(self._batches.life.candidate_part)
            self.take()
        self._handed = []
        self._scales.forget_scaled()

    def _awaits_frozen(self) -> bool:
        parameters = (value for named in self._hooks.modules for value in named.module._parameters.values())
        return self._batches.life.awaits_backward and not any(
            value is not None and value.requires_grad for value in parameters
        )


def versions_of(modules: Iterable[NamedModule]) -> list[tuple[int, int] | None]:
    """What changes when a backward adds to a gradient of the model: see ``BackwardBegins``."""
    return [
        None if (gradient := value.grad) is None else (id(gradient), gradient._version)
        for named in modules
        for value in named.module._parameters.values()
        if value is not None
    ]


def _name(losses: list[Tensor], label: str) -> list[str]:
    """The labels of losses: ``loss``; of several ``loss[0]``, ``loss[1]``."""
    if len(losses) == 1:
        return [label]
    return [label.replace("loss", f"loss[{number}]", 1) for number in range(len(losses))]


def _observed(original: Callable[..., Any]) -> Callable[..., Any]:
    def observed(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() or not _watches or backward.is_running() or is_capturing():
            return original(*args, **kwargs)
        watches = list(_watches.values())  # in the order in which the models were watched
        has_returned = False
        try:
            for watch in watches:
                quietly(watch.listener.backward_begins, args, kwargs)
            original(*args, **kwargs)
            has_returned = True
        except BaseException as error:
            remove_our_frame(error)
            raise
        finally:
            for watch in watches:
                quietly(watch.listener.backward_ends, has_returned)

    never_compile(observed)
    return observed


def losses_of(args: Any, kwargs: Any) -> list[Tensor]:
    """The losses among what ``torch.autograd.backward`` was given.

    They are the tensors without a given gradient, and single numbers, whose given gradient is mostly a sign or a scale.
    There are none where all gradients are given, as between the stages of a pipeline.
    """
    return list(_losses(*args, **kwargs))


def _losses(tensors: Any = (), grad_tensors: Any = None, *_: Any, **others: Any) -> Iterator[Tensor]:
    given = others.get("grad_variables") if grad_tensors is None else grad_tensors
    handed = [tensors] if isinstance(tensors, Tensor) else list(tensors) if isinstance(tensors, (list, tuple)) else []
    gradients = list(given) if isinstance(given, (list, tuple)) else [given] * len(handed)
    for tensor, gradient in zip(handed, gradients):  # noqa: B905  torch itself refuses another number
        if isinstance(tensor, Tensor) and (gradient is None or tensor.numel() == 1):
            yield tensor
