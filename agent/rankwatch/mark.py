"""``detect_overflow``: tensors that a user points at, inside or outside of a watched forward."""

from __future__ import annotations

import logging
import sys

from torch import Tensor

from .judge.settler import BadReading
from .measure.extremes import count_non_finite
from .registry import open_watches
from .shared.config import is_disabled

log = logging.getLogger(__name__)


def detect_overflow(var: Tensor, ctx: str) -> bool:
    """Says whether ``var`` holds an inf or nan, and prints which as ``<ctx> has infs``; usable anywhere.

    Inside a watched forward the tensor also becomes a frame labelled ``ctx``: it shows in traces and reports, and when it is
    not finite it trips, under every policy but ``off``, at the next module's hook. With ``RANKWATCH_MODE=disabled`` it is not
    looked at, and said to be finite.

    Args:
        var: a tensor of any shape, dtype and device; one of another dtype than a float's is finite. Waits for its device.
        ctx: what it is called in the line and in reports, such as ``"after layer_norm"``.

    Returns:
        True if it holds an inf or a nan.
    """
    if is_disabled():
        return False
    counts = count_non_finite(var)
    emit(describe_bad_reading(BadReading(ctx, counts.nans, counts.infs)))
    for watch in open_watches():
        watch.mark(var, ctx)
    return bool(counts.nans or counts.infs)


def describe_bad_reading(bad: BadReading) -> str:
    """What the Hugging Face detector prints of a tensor that is not finite; nothing of one that is."""
    found = (("nans", bad.nans), ("infs", bad.infs))
    return "".join(f"{bad.label} has {what}\n" for what, count in found if count)


def emit(text: str) -> None:
    """Prints in one write, so that the texts of several ranks do not mix.

    A stdout that is closed, or whose disk is full, is told and does not matter: what is found is found all the same.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except (OSError, ValueError) as error:
        log.error("rankwatch: cannot print to stdout: %s", error)
