"""What a rank notices that is not a trip: underflow, gradients that turn to zeros, and modules on their way to overflow."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from .frame import DTYPE_MAX, DTYPE_TINY

ZEROS = " zeros"
"""The end of a label whose reading is the share of exact zeros in a parameter's gradient."""


class NoticeKind(enum.IntEnum):
    """What was noticed."""

    UNDERFLOW = 0
    """Values are there, but all of them lie under the smallest normal number of their dtype."""
    ZEROS = 1
    """A growing share of a gradient's elements is exactly zero."""
    HEADROOM = 2
    """The abs max nears its dtype's max, and grows."""


@dataclass(frozen=True, slots=True)
class Notice:
    """One reading that was noticed, on one rank; a later notice of the same (kind, module, label) replaces the earlier.

    ``value`` is the abs max, or for ZEROS the share of zeros (0 to 1), in batch ``batch``; ``since`` is the batch in which
    it was first noticed. ``growth`` is in doublings per batch (for ZEROS: share per batch).
    """

    kind: NoticeKind
    module: str
    module_class: str
    label: str
    dtype: str
    since: int
    batch: int
    value: float
    growth: float

    @property
    def key(self) -> tuple[NoticeKind, str, str]:
        return self.kind, self.module, self.label

    @property
    def batches_left(self) -> float:
        """For HEADROOM: after how many more batches the abs max reaches its dtype's max at the present growth."""
        if self.growth <= 0 or self.value <= 0 or self.dtype not in DTYPE_MAX:
            return math.inf
        return max(0.0, math.log2(DTYPE_MAX[self.dtype] / self.value) / self.growth)

    @property
    def urgency(self) -> tuple[bool, float]:
        """The order in which notices are shown: what nears overflow, the nearest first, then the others as they began."""
        return (False, self.batches_left) if self.kind is NoticeKind.HEADROOM else (True, float(self.since))


def describe_notice(notice: Notice) -> str:
    """A notice in one line, without its rank."""
    where = f"{notice.module or '(root)'} ({notice.module_class}), {notice.label}"
    if notice.kind is NoticeKind.UNDERFLOW:
        tiny = DTYPE_TINY.get(notice.dtype, 0.0)
        return (
            f"underflow: {where}: abs max {notice.value:.2e} in batch {notice.batch} is under {tiny:.2e}, "
            f"the smallest normal {notice.dtype}; first in batch {notice.since}"
        )
    if notice.kind is NoticeKind.ZEROS:
        return (
            f"underflow: {where}: {notice.value:.0%} of the elements are zero in batch {notice.batch}, "
            f"a share that grows since batch {notice.since}"
        )
    share = notice.value / DTYPE_MAX.get(notice.dtype, math.inf)
    near = f"abs max {notice.value:.2e} in batch {notice.batch} is {_percent(share)} of {notice.dtype}'s largest number"
    return f"next to overflow: {where}: {near} and {_pace(notice)}"


def _percent(share: float) -> str:
    return "less than 1%" if share < 0.01 else f"{share:.0%}"


def _pace(notice: Notice) -> str:
    left = notice.batches_left
    if not math.isfinite(left):
        return "does not grow"
    factor = 2 ** min(notice.growth, 1000.0)
    return f"grows by x{factor:.3g} a batch: about {left:.0f} batch{'es are' if round(left) != 1 else ' is'} left"
