"""``detect_overflow``: tensors that the user marks, inside or outside of a watched forward."""

from __future__ import annotations

import logging
import sys

from torch import Tensor

from ..judge.reporter import BadReading
from ..measure.extremes import count_non_finite
from ..rerun.careful import running_again
from ..shared.printable import printable
from ..shared.types.config import is_disabled
from .registry import open_watches

log = logging.getLogger(__name__)


def detect_overflow(var: Tensor, ctx: str) -> bool:
    """Returns whether ``var`` has an inf or nan, and prints ``<ctx> has infs`` or ``<ctx> has nans`` if so.

    It can be called anywhere. Inside a watched forward, the tensor also becomes a frame with the label ``ctx``, in traces
    and reports; if it is not finite, it trips at the next module's hook (except with policy ``off``). With
    ``RANKWATCH_MODE=disabled`` the tensor is not read, and the result is False.

    Args:
        var: a tensor of any shape, dtype and device; tensors of integers are always finite. Waits for its device.
        ctx: the tensor's name in the line and in reports, such as ``"after layer_norm"``.

    Returns:
        True if ``var`` has an inf or a nan.
    """
    if is_disabled():
        return False
    counts = count_non_finite(var)
    if running_again() is None:
        emit(describe_bad_reading(BadReading(ctx, counts.nans, counts.infs)))
    for watch in open_watches():
        watch.mark(var, ctx)
    return bool(counts.nans or counts.infs)


def describe_bad_reading(bad: BadReading) -> str:
    """The lines that the Hugging Face detector prints for a non-finite tensor; empty for a finite one."""
    found = (("nans", bad.nans), ("infs", bad.infs))
    return "".join(f"{printable(bad.label)} has {what}\n" for what, count in found if count)


def emit(text: str) -> None:
    """Prints in one write, so that the texts of several ranks do not mix.

    If stdout is closed or its disk is full, this is logged, and the trip still counts.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except (OSError, ValueError, AttributeError) as error:  # None, where the process was started without a stdout
        log.error("rankwatch: cannot print to stdout: %s", error)
