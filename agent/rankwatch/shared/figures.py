"""Numbers as people write them: ``69,700``, not ``6.97e+04``. Frames and tables have columns, and other forms."""

from __future__ import annotations

import math

from .types.frame import DTYPE_MAX

LONGEST = 1e6
"""From here on, the zeros are not counted at a glance: ``3.4e38``."""

SHORTEST = 1e-3


def figure(value: float) -> str:
    """Three digits of it, as many as a reader compares."""
    if not math.isfinite(value) or value == 0:
        return f"{value + 0.0:g}"
    short = float(f"{value:.3g}")
    if 1000 <= abs(short) < LONGEST:
        return f"{short:,.0f}"
    if SHORTEST <= abs(short) < LONGEST:
        return f"{short:g}"
    digits, _, exponent = f"{value:.2e}".partition("e")  # rounded, the largest float64 is none
    return f"{digits.rstrip('0').rstrip('.')}e{int(exponent)}"


def end_of(dtype: str) -> str:
    """The largest number of a dtype of DTYPE_MAX: all of its digits where there are few."""
    end = DTYPE_MAX[dtype]
    return f"{end:,.0f}" if end < LONGEST else figure(end)
