"""A trip: a frame that broke the policy, with the evidence of its cause; and the causes that it can have."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, NamedTuple, TypeAlias

from ..str_enum import StrEnum
from .fields import MAX_CLOSEUP, MAX_RING, MAX_ROWS, AnyFloat, BatchNumber, Items, Shape, integer, number
from .frame import BEGINNING, Frame, Moment, Position, Reading

MAX_RERUN = 30.0
"""Seconds within which the gradient guard runs a batch again. No rank waits in a collective meanwhile, unless its own is
slower."""

OVERWRITTEN = "was overwritten between its forward and its backward"
"""Why it is not known where a gradient came from: in ``Trip.unfound``."""

MAX_RATES = 64
"""Groups of parameters whose learning rate is sent."""

_Readings: TypeAlias = Annotated[tuple[Reading, ...], Items(MAX_RING)]


class Cause(StrEnum):
    """Why a frame tripped."""

    OVERFLOW = "overflow"
    """Inputs and weights were finite, and their product, sum or exp was beyond the dtype."""
    INVALID = "invalid"
    """Inputs and weights were finite, and an operator made nan of them: 0/0, the root of a negative number."""
    WEIGHT = "weight"
    """A parameter or buffer of the module, or of one around or below it, was non-finite before this forward."""
    DATA = "data"
    """An input of the root module was non-finite."""
    UPSTREAM = "upstream"
    """The frame's input was non-finite, and no watched module computed it: it arose between modules."""
    GRADIENT = "gradient"
    """The forward was finite, a gradient is not: it arose in the backward."""
    SINGULAR = "singular"
    """Inputs and weights were finite, and an operator had no finite value there: 1/0, log 0, 0 to a negative power."""
    REDUCTION = "reduction"
    """Each rank's part was finite, and the collective that reduced them made an inf."""
    DIVERGENCE = "divergence"
    """The loss left its range on all ranks alike, batches before: no single rank is the culprit."""
    UNEXPLAINED = "unexplained"
    """Inputs and weights were finite, their products cannot reach the dtype's end, and a repeated forward was finite."""


class Change(StrEnum):
    """What changed a weight between the batch in which it was last seen finite and the one in which it was bad."""

    UNKNOWN = "unknown"
    OPTIMIZER = "optimizer"
    """The step of its optimizer, which was given finite gradients."""
    IGNORED = "ignored"
    """The step of its optimizer, which a scaler had told that the gradients were not finite."""
    OTHER = "other"
    """No optimizer has stepped meanwhile: other code."""
    CONVERSION = "conversion"
    """It has another dtype now."""
    HANDED = "handed"
    """It is no parameter: the training has computed it, and handed it to this forward (``functional_call``)."""


class UpdateFact(NamedTuple):
    """What is known of the change: the row of its sentence and advice, and what these are about."""

    row: str
    name: str = ""
    value: str = ""
    where: str = ""


@dataclass(frozen=True, slots=True)
class BadWeight:
    """A parameter or buffer that was not finite when a frame tripped.

    ``finite_in`` is the last batch in which it was seen finite; -1: none. ``is_here`` tells whether its bad values are in
    this rank's own shard, or it has none. ``change`` is what made it bad, with ``facts``.
    """

    module: str
    module_class: str
    reading: Reading
    finite_in: BatchNumber
    is_here: bool = True
    change: Change = Change.UNKNOWN
    facts: Annotated[tuple[UpdateFact, ...], Items(8)] = ()


class GrownWeight(NamedTuple):
    """The largest parameter: its abs max ``before`` the last optimizer steps, in ``batch``, and ``now``.

    ``largest`` is that of all parameters before these steps.
    """

    module: str
    module_class: str
    label: str
    before: AnyFloat
    now: AnyFloat
    batch: BatchNumber
    largest: AnyFloat


class Source(NamedTuple):
    """A line of the user's code: the innermost one outside of torch. ``text`` is the line itself; empty if it cannot be read."""

    file: str
    line: int
    function: str
    text: str


LOSS = "the loss"
"""The ``module`` of an operator that the loss is made of, which no module of the model has called."""


@dataclass(frozen=True, slots=True)
class Operator:
    """The operator that made the bad numbers, in a repeated forward or backward of the culprit's module.

    Its inputs were finite, but for a mask of -inf or the like. ``name`` is torch's, such as ``aten.exp.default``.
    ``operands`` are what went into its first bad element, one number for each input; empty if it does not work element by
    element. ``shapes`` are those of the inputs, () for a number. ``source`` is the line that called it. In a backward,
    ``node`` is autograd's name of the function that ran, such as ``SqrtBackward0``, and ``source`` the line of its forward.
    ``module`` is the module in which it ran, if that is not the culprit. ``detail``: what was wrong with its arguments.
    """

    name: str
    inputs: _Readings
    output: Reading
    operands: tuple[float, ...] = ()
    shapes: Annotated[tuple[Shape, ...], Items(MAX_RING)] = ()
    source: Source | None = None
    node: str = ""
    module: str = ""
    detail: str = ""

    @property
    def title(self) -> str:
        """``aten.exp`` of ``aten.exp.default``."""
        return ".".join(self.name.split(".")[:2])


class LeftOut(NamedTuple):
    """What became of the step of a trip with ``on_bad_step="skip"``.

    ``refused``: why the step could not be left out, so that the run is aborted; empty: it was left out, on all ranks alike.
    ``restored`` are the buffers that the step's forwards had written, and that have their values from before it. ``budget_left``
    is how many steps may still be left out, of ``most`` in the last ``of`` steps.
    """

    refused: str = ""
    restored: Annotated[tuple[str, ...], Items(MAX_RING)] = ()
    budget_left: Annotated[int, integer(0)] = 0
    most: Annotated[int, integer(0)] = 0
    of: Annotated[int, integer(0)] = 0


@dataclass(frozen=True, slots=True)
class Trip:
    """A frame that broke the policy, with the evidence.

    ``frames`` are the last frames, the tripped one last; ``reading`` is an index into its readings. ``root_inputs`` are the
    readings of the root module's inputs in this batch. ``shape`` and ``numel`` are the tensor's; ``nan_count`` and
    ``inf_count`` of its elements are not finite. ``numel`` is 0 if the tensor no longer existed when its reading was judged.
    ``time`` is Unix seconds of the rank's clock; it orders only torchelastic's error files. ``loss_scale`` is the loss scale
    of a gradient's batch (0: none was seen).

    ``weights`` are the bad weights: the culprit's module's, then those of modules below it, around it, and of all others.
    ``harmless`` are the labels of root inputs that were not finite in good batches either, such as a mask of -inf; those of
    the culprit's own inputs follow its name and a colon, as do those of its outputs in which the code writes an inf.
    ``collective`` ran in the culprit's module, such as ``all_reduce``: this rank's part of its sum was finite, the sum was
    inf. ``received`` is one whose sum was nan, so that another rank's part was bad. ``changed`` is the module whose finite
    output was changed in place, unseen by autograd, and then was bad as the culprit or its input. All empty: none.
    ``gradients`` tells whether gradients were watched.
    ``recurs`` tells whether the repeated forward or backward was bad again; None: it was not repeated, or not as it was.
    ``guarded`` tells that the gradient guard found it before an optimizer step, which was not taken. ``unfound``: why it is
    not known where such a gradient came from; empty: this rank ran its batch again, and its own gradient was bad.
    ``closeup_within`` is the seconds within which a CLOSEUP of this trip follows; 0: none does.
    ``outside`` is the call of a module that is no part of the model and is not trained, a VAE's say: the first one in this batch
    that returned what is not finite. None: there was none. ``operator`` is then one of that module.
    ``bad_since`` is the first of the batches in a row whose bad gradients a loss scaler had absorbed before; -1: none.
    ``first_of_step`` is the rank's first batch since the last optimizer step; -1: not told. ``looked_at`` is where the rank was
    as the guard looked at the gradients; BEGINNING: not told. ``rates`` are the learning rates of the optimizers' groups.
    """

    position: Position
    reading: Annotated[int, integer(0, MAX_ROWS)]
    frames: Annotated[tuple[Frame, ...], Items(MAX_RING, least=1, keeps_last=True)]
    root_inputs: _Readings
    optimizer_step: int
    shape: Shape
    numel: int
    nan_count: int
    inf_count: int
    time: float
    loss_scale: Annotated[float, number(0.0, math.inf)] = 0.0
    weights: Annotated[tuple[BadWeight, ...], Items(MAX_RING)] = ()
    operator: Operator | None = None
    harmless: Annotated[tuple[str, ...], Items(MAX_RING)] = ()
    collective: str = ""
    bad_since: BatchNumber = -1
    received: str = ""
    changed: str = ""
    gradients: bool = False
    recurs: bool | None = None
    closeup_within: Annotated[float, number(0.0, MAX_CLOSEUP)] = 0.0
    guarded: bool = False
    unfound: str = ""
    first_of_step: BatchNumber = -1
    looked_at: Moment = BEGINNING
    rates: Annotated[tuple[AnyFloat, ...], Items(MAX_RATES)] = ()
    grown: GrownWeight | None = None
    outside: Frame | None = None
    left_out: LeftOut | None = None
    reach: AnyFloat = -1.0

    def check_parts(self) -> None:
        if self.frame.position != self.position or self.reading >= len(self.frame.spec.readings):
            raise ValueError("the last frame of the ring is not the one that tripped")

    @property
    def has_closeup(self) -> bool:
        return self.closeup_within > 0

    @property
    def frame(self) -> Frame:
        return self.frames[-1]

    @property
    def culprit(self) -> Reading:
        return self.frame.readings[self.reading]

    @property
    def is_from_others(self) -> bool:
        """Whether the bad values came from other ranks: from their parts of a sum, or from their shards of a weight."""
        is_elsewhere = bool(self.weights) and not any(weight.is_here for weight in self.weights)
        return bool(self.collective or self.received) or is_elsewhere
