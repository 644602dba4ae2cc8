"""What happens to the batches of a model, and who is told of it.

A step of a training, as the parts of a detector are told of it:

    ForwardComes   RootBegan | DirectCall   ForwardBegan   OutputsCame   RootReturned | RootRaised   RootLeft
    BackwardBegins   BackwardReached   BackwardEnded
    StepBegins   UpdateBegins   StepDone

A part of the detector that has something to do at such an event is an ``Observer``. It names its events in ``events``, and is
told of each by ``on``. ``lifecycle`` decides by these events what a forward is, and when its frames are judged and sent.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:  # the life of a batch is decided, and tested, without torch
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from ..rerun.forward import RootEntry
    from ..shared.types.tuning import Tuning
    from .batch import BatchInProgress, BatchOrigin, BatchPart


class Steps(NamedTuple):
    """Optimizer steps: how many are ``done``, and the ``number`` of the next one, where the training counts its own."""

    done: int
    number: int


# --- forwards ---------------------------------------------------------------------------------------------------------


class ForwardComes(NamedTuple):
    """A forward is about to begin: the backward of the last batch, or batches, is over. ``waits``: for all numbers."""

    steps: Steps
    waits: bool = False


class TuningCame(NamedTuple):
    """Options change, from the forward on that is about to begin."""

    tuning: Tuning


class RootBegan(NamedTuple):
    """A forward of the root begins. ``origin`` is None without gradients."""

    origin: BatchOrigin | None
    steps: Steps
    is_rehearsal: bool = False


class DirectCall(NamedTuple):
    """A call of a module with gradients begins a batch: see ``Life.begins_by_calls``."""

    origin: BatchOrigin
    steps: Steps


class ForwardBegan(NamedTuple):
    """A forward begins, and the batch has what its root was given, if it was called."""

    batch: BatchInProgress


class GraphBegan(NamedTuple):
    """The graph of a compiled root begins. ``is_given``: what the root was given was seen."""

    is_given: bool


class OutputsCame(NamedTuple):
    """A root, or a module that is called by itself, returns with gradients. ``entry`` is the root's forward as it began."""

    part: BatchPart
    entry: RootEntry | None
    output: Any


class RootReturned(NamedTuple):
    """The forward has returned; frames belong to the batch until ``RootLeft``."""


class RootLeft(NamedTuple):
    """The forward is over, however it ended."""


class RootRaised(NamedTuple):
    """The forward has raised. ``is_judged``: the frames that ran are judged; ``runs_again``: also those of a rerun."""

    is_judged: bool
    runs_again: bool


class RootsOver(NamedTuple):
    """No forward of the root runs any more, however the outermost one ended."""


class Interrupted(NamedTuple):
    """A forward has ended anywhere, perhaps within a hook of ours, and without a call of its last hook."""


class PartIsFull(NamedTuple):
    """The part of a batch has as many frames as may wait: see ``Life.passed``."""

    batch: BatchInProgress
    steps: Steps


class Wrapped(NamedTuple):
    """``torch.compile`` wraps a module."""

    wrapper: nn.Module
    module: nn.Module


# --- the backward and the optimizer -----------------------------------------------------------------------------------


class BackwardBegins(NamedTuple):
    """A backward begins with these losses; it may be another model's.

    ``is_own``: in the thread that called the model. ``versions`` shows what a backward adds to: of the gradient of each parameter
    its ``id`` and version, or None without a gradient. It is None in another thread, and where no loss is known.
    """

    losses: list[Tensor]
    is_own: bool
    versions: list[tuple[int, int] | None] | None


class BackwardReached(NamedTuple):
    """A backward has reached what the forward of ``part`` returned. ``task`` is the backward's number.

    ``is_new``: the batch was a candidate before. Once the effects are done, ``Life.begin_backward`` follows.
    """

    part: BatchPart
    task: int
    steps: Steps
    is_new: bool = False


class BackwardEnded(NamedTuple):
    """``is_taken``: the backward has returned, and the detector is on. ``is_own``: in the thread that called the model."""

    is_taken: bool
    is_own: bool


class ScalerStepped(NamedTuple):
    """A scaler has done or skipped a step of the optimizer, whose gradients are still there."""

    optimizer: Optimizer
    scaler: Any


class ScaleSpent(NamedTuple):
    """A scaler has done or skipped a step of the optimizer, and its scale is not the cause of gradients that are not finite."""

    scale: Any
    optimizer: Optimizer


class StepBegins(NamedTuple):
    """An optimizer of the model is about to step. A closure may compute the gradients first: see ``UpdateBegins``."""

    steps: Steps
    optimizer: Any = None


class UpdateBegins(NamedTuple):
    """An optimizer of the model is about to change the weights, by the gradients that are there now."""

    optimizer: Optimizer


class StepDone(NamedTuple):
    """An optimizer of the model has stepped, in the batch of this number."""

    optimizer: Optimizer
    batch: int


class OtherStepBegins(NamedTuple):
    """An optimizer is about to step that has no parameter of the model."""

    optimizer: Optimizer


class OtherStepDone(NamedTuple):
    """An optimizer has stepped that has no parameter of the model."""

    optimizer: Optimizer


# --- who is told ------------------------------------------------------------------------------------------------------


class Observer(Protocol):
    """A part of the detector that is told of ``events``. An error in ``on`` switches the detector off; a trip may be raised."""

    @property
    def events(self) -> tuple[type, ...]: ...
    def on(self, event: Any) -> None: ...


class Feed:
    """Tells observers of events, in the order in which they subscribed."""

    def __init__(self) -> None:
        self._told: defaultdict[type, list[Observer]] = defaultdict(list)

    def subscribe(self, *observers: Observer) -> None:
        for observer in observers:
            for kind in observer.events:
                self._told[kind].append(observer)

    def tell(self, event: Any) -> None:
        for observer in self._told[type(event)]:
            observer.on(event)
