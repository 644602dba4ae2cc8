"""Notices, the warnings before anything trips: underflow, gradients that become zero, outputs near overflow, bad buffers."""

from __future__ import annotations

import enum
import math
import sys
from dataclasses import dataclass
from typing import Annotated

from ..bounded import BoundedDict
from ..figures import figure
from .fields import BatchNumber, Dtype, number
from .frame import DTYPE_MAX, DTYPE_TINY

ZEROS = " zeros"
"""Label suffix: the reading is the share of exact zeros in a parameter's gradient."""


class NoticeKind(enum.IntEnum):
    """What was noticed."""

    UNDERFLOW = 0
    """All values are below the smallest normal number of their dtype, and not all are zero."""
    ZEROS = 1
    """A growing share of a gradient's elements is exactly zero."""
    HEADROOM = 2
    """The abs max approaches its dtype's max."""
    BUFFER = 3
    """A buffer that was finite is inf or nan, and stays so: running statistics, say."""
    JUMP = 4
    """The loss, or an input of the root, is far above its range of the last batches."""
    NEVER_CHANGED = 5
    """A trainable parameter has a gradient, and no optimizer step has changed it."""
    UNTIED = 6
    """Two parameters that were one tensor are two now, with different values."""
    HARMLESS_LOSS = 7
    """A loss, or what the model measures, was inf or nan, and the gradients of its step were finite: the training went on."""
    NO_STEP = 8
    """Backwards come, no optimizer steps, and no weight changes."""
    STOPPED = 9
    """Optimizers step, and no weight changes."""
    NOTHING_TO_LEARN = 10
    """The loss and all gradients are exactly 0, batch after batch."""
    GROWN = 11
    """An output in bfloat16 is thousands of times what it was at first, and few of its digits are left."""
    SKIPPED = 12
    """A forward of this rank with gradients had no backward, as all before had. The collector tells it of single ranks."""
    ALONE = 13
    """torchrun has started several ranks, and this one has no way to talk to the others."""
    PROBE = 14
    """A forward before any training was not finite, and no data went in: it was not judged."""
    SKIPPED_STEP = 15
    """A gradient of this rank was inf or nan, and no optimizer step followed, as one had followed upon all before."""
    TRIAL = 16
    """A forward was not finite with weights that no optimizer wrote, and that were taken back: a line search's, say."""
    NO_GRADIENT = 17
    """A trained parameter never had a gradient: what its module returns is detached before it is used."""


NEVER_FINITE = "it never was finite: nobody has initialised it (torch.empty, to_empty), or a checkpoint has it so"
"""Why a BUFFER is bad that was so from the first look on."""

UNWRITTEN = "nobody has written it since "
NEVER_WRITTEN = (
    UNWRITTEN + "to_empty() or torch.empty(), so it holds what was in memory, which is another thing on each rank"
)
"""Why a BUFFER is bad whose numbers say nothing."""

STANDSTILL = frozenset(
    {NoticeKind.NO_STEP, NoticeKind.STOPPED, NoticeKind.NOTHING_TO_LEARN, NoticeKind.SKIPPED, NoticeKind.ALONE}
)
"""The training runs, and learns nothing: on this rank, or at all."""


@dataclass(frozen=True, slots=True)
class Notice:
    """A notice about one reading of one rank. A later notice of the same (kind, module, label) replaces the earlier one.

    ``value`` is the abs max in batch ``batch``; for ZEROS, the share of zeros (0 to 1); for BUFFER, the last finite abs max
    that was measured; for NEVER_CHANGED, UNTIED and NO_GRADIENT, the optimizer step; for HARMLESS_LOSS, NO_STEP, SKIPPED,
    SKIPPED_STEP and TRIAL, how many there were; for ALONE, the ranks; for STOPPED, the step after which no weight has changed.
    ``since`` is the batch of the first such notice; for NEVER_CHANGED, that of the first look. ``growth`` is in doublings per
    batch; for ZEROS, share per batch; for JUMP and GROWN, the doublings above the largest number of the batches before, or of
    the first looks. ``why`` says why for NO_STEP, STOPPED, PROBE, HARMLESS_LOSS, SKIPPED_STEP, TRIAL and NO_GRADIENT; an older
    agent has the reason of the first two in ``label``.
    """

    kind: NoticeKind
    module: str
    module_class: str
    label: str
    dtype: Dtype
    since: BatchNumber
    batch: BatchNumber
    value: Annotated[float, number(0.0, sys.float_info.max)]
    growth: Annotated[float, number(-sys.float_info.max, sys.float_info.max)]
    why: str = ""

    def check_parts(self) -> None:
        if self.kind is NoticeKind.ZEROS and self.value > 1:
            raise ValueError("expected a number from 0 to 1")

    @property
    def key(self) -> tuple[NoticeKind, str, str]:
        return self.kind, self.module, self.label

    @property
    def group(self) -> tuple[NoticeKind, str, str, str]:
        """The notices of several ranks that are told in one line: those that stand still for one reason."""
        return *self.key, self.why if self.kind in STANDSTILL else ""

    @property
    def batches_left(self) -> float:
        """For HEADROOM: the number of batches until the abs max reaches its dtype's max, if it grows on as it does now."""
        if self.growth <= 0 or self.value <= 0 or self.dtype not in DTYPE_MAX:
            return math.inf
        return max(0.0, math.log2(DTYPE_MAX[self.dtype] / self.value) / self.growth)

    @property
    def urgency(self) -> tuple[bool, float]:
        """Sort key for views: what stands still first; then HEADROOM, the fewest batches left first; then the others, the oldest
        first."""
        if self.kind in STANDSTILL:
            return False, -1.0
        return (False, self.batches_left) if self.kind is NoticeKind.HEADROOM else (True, float(self.since))


_ODD = {
    NoticeKind.HEADROOM: "an output came next to overflow",
    NoticeKind.GROWN: "an output has grown",
    NoticeKind.BUFFER: "a buffer went bad",
    NoticeKind.JUMP: "an input jumped",
    NoticeKind.HARMLESS_LOSS: "a loss was not finite",
    NoticeKind.SKIPPED_STEP: "a step was skipped",
}
"""What may lead to an overflow, so that all batches are worth a look for a while."""

AGAIN = 100
"""Batches after which the same is news again: what is next to overflow for good is noticed again and again."""


def is_of_loss(notice: Notice) -> bool:
    """Whether what was harmless is a loss, as far as names tell; else a measure, say, that the model returns beside it."""
    names = f"{notice.module_class} {notice.label}".lower()
    return (not notice.module and "output[" not in names) or "loss" in names or "criterion" in names


def describe_oddity(notice: Notice) -> str:
    """In a few words, of a kind that may be odd."""
    is_loss = notice.kind is NoticeKind.JUMP and notice.label.startswith("loss")
    return "the loss left its range" if is_loss else _ODD[notice.kind]


class Oddities:
    """Which notices of a rank are news of something odd."""

    def __init__(self) -> None:
        self._last = BoundedDict[tuple[NoticeKind, str, str], int](1024)

    def is_news(self, notice: Notice) -> bool:
        if notice.kind not in _ODD:
            return False
        before = self._last.get(notice.key)
        self._last[notice.key] = notice.batch
        return before is None or notice.batch > before + AGAIN


def describe_notice(notice: Notice) -> str:
    """A notice in one line, without its rank."""
    where = f"{notice.module or '(root)'} ({notice.module_class}), {notice.label or notice.why}"
    if notice.kind is NoticeKind.UNDERFLOW:
        tiny = DTYPE_TINY.get(notice.dtype, 0.0)
        return (
            f"underflow: {where}: abs max {figure(notice.value)} in batch {notice.batch} is under {figure(tiny)}, "
            f"the smallest normal {notice.dtype}; first in batch {notice.since}"
        )
    if notice.kind is NoticeKind.ZEROS:
        return (
            f"underflow: {where}: {notice.value:.0%} of the elements are zero in batch {notice.batch}, "
            f"a share that grows since batch {notice.since}"
        )
    if notice.kind is NoticeKind.BUFFER:
        if notice.why.startswith(UNWRITTEN):
            return f"a bad buffer: {where}: {notice.why}"
        before = notice.why or f"when it was last measured finite, its abs max was {figure(notice.value)}"
        return f"a bad buffer: {where}: inf or nan since batch {notice.since}; {before}"
    if notice.kind is NoticeKind.JUMP:
        factor = 2 ** min(notice.growth, 1000.0)
        return (
            f"a jump: {where}: abs max {figure(notice.value)} in batch {notice.batch} is x{figure(factor)} "
            "the largest of the batches before"
        )
    if notice.kind is NoticeKind.GROWN:
        factor = 2 ** min(notice.growth, 1000.0)
        return (
            f"grown: {where}: abs max {figure(notice.value)} in batch {notice.batch} is x{figure(factor)} "
            f"the largest of its first batches, and {notice.dtype} has 8 bits for it"
        )
    if notice.kind is NoticeKind.NEVER_CHANGED:
        return (
            f"never changed: {where}: it has a gradient, and no optimizer step up to step {notice.value:.0f} has changed it"
        )
    if notice.kind is NoticeKind.NO_GRADIENT:
        return (
            f"no gradient: {where}: in {notice.value:.0f} steps {notice.why}, by detach(), .data or NumPy; if that is meant, "
            "keep it out of the optimizer"
        )
    if notice.kind is NoticeKind.UNTIED:
        return (
            f"untied: {where}: it was one tensor with another parameter, and has other values since step {notice.value:.0f}"
        )
    if notice.kind is NoticeKind.HARMLESS_LOSS:
        often = f" ({notice.value:.0f} such losses since batch {notice.since})" if notice.value > 1 else ""
        return (
            f"{'a harmless loss' if is_of_loss(notice) else 'harmless'}: {where}: in batch {notice.batch} {notice.why}; "
            f"all gradients of its optimizer step were finite, and the training went on{often}"
        )
    if notice.kind is NoticeKind.PROBE:
        return (
            f"before a training: {where}: {notice.why} in batch {notice.batch}: no backward had come, and no optimizer had a "
            "parameter of the model, so nothing was stopped; if it was no trial, such as a count of operations, look at the data"
        )
    if notice.kind is NoticeKind.SKIPPED_STEP:
        often = f" ({notice.value:.0f} such steps since batch {notice.since})" if notice.value > 1 else ""
        return (
            f"a skipped step: {where}: in batch {notice.batch} {notice.why}, and no optimizer step followed: the weights are as "
            f"before{often}"
        )
    if notice.kind is NoticeKind.TRIAL:
        often = f" ({notice.value:.0f} such trials since batch {notice.since})" if notice.value > 1 else ""
        return (
            f"a trial: {where}: {notice.why} in or after batch {notice.batch}, with weights that code other than an optimizer "
            f"wrote and took back, such as a step size that a line search rejects: the training went on without them{often}"
        )
    if notice.kind is NoticeKind.NO_STEP:
        return f"stands still: {notice.value:.0f} backwards since batch {notice.since}, no optimizer step: {where}"
    if notice.kind is NoticeKind.ALONE:
        return (
            f"each trains alone: {where}: torchrun started {notice.value:.0f} ranks, and by batch {notice.batch} this one has no "
            "process group: no gradient is averaged, and with the same data all do the same work"
        )
    if notice.kind is NoticeKind.SKIPPED:
        times = "it had no backward" if notice.value == 1 else f"{notice.value:.0f} batches since had no backward"
        return (
            f"skipped: {where}: batch {notice.since} was trained on other ranks, and {times} here: code that skips a bad loss on "
            "one rank leaves the others in a collective, or a batch apart"
        )
    if notice.kind is NoticeKind.STOPPED:
        return f"stands still: no weight has changed since step {notice.value:.0f} (batch {notice.since}): {where}"
    if notice.kind is NoticeKind.NOTHING_TO_LEARN:
        return (
            f"nothing to learn: {where}: exactly 0, and so were all gradients, in each batch since batch {notice.since}: "
            "one class alone, labels that are all ignored, or outputs that were detached?"
        )
    share = notice.value / DTYPE_MAX.get(notice.dtype, math.inf)
    near = f"abs max {figure(notice.value)} in batch {notice.batch} is {_percent(share)} of {notice.dtype}'s largest number"
    return f"next to overflow: {where}: {near} and {_pace(notice)}"


def _percent(share: float) -> str:
    return "less than 1%" if share < 0.01 else f"{share:.0%}"


def _pace(notice: Notice) -> str:
    left = notice.batches_left
    if not math.isfinite(left):
        return "does not grow"
    plural = "es are" if round(left) != 1 else " is"
    when = f"about {left:.0f} batch{plural} left" if round(left) else "the next batch may overflow"
    return f"grows by x{figure(2 ** min(notice.growth, 1000.0))} a batch: {when}"
