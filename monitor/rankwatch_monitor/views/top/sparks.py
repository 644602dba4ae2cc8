"""The loss and the batch rate of the last batches, as two curves in one line. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...record.numbers.losses import LOSS
from ...record.numbers.recent import Recent

BARS = "▁▂▃▄▅▆▇█"
NOT_FINITE = "!"
IN_ASCII = str.maketrans(BARS, "_,.-~=+#")
"""For a terminal whose encoding has no bars."""

LEAST = 6
"""Characters of the shortest curve that says something."""

ROOM_FOR_RANGE = 72
"""Characters of a line that has the loss's range, too."""

WIDE = 10.0
"""A loss whose largest is more than so many times its least is drawn by its logarithm."""

GAP = "  "


def curves(recent: Recent, width: int, *, is_stalled: bool = False) -> str:
    """The line: of each curve its last number and the bars, and of the loss its range if there is room; empty without a curve.

    Of losses that take turns there are as many as there is room for.
    """
    found = recent.in_turns or ((LOSS, recent.losses),)
    losses = [(name, [loss for _, loss in means]) for name, means in found if len(means) > 1]
    rates = rates_of(recent.ends, len(recent.ends))
    pace = [f"batches/s {0 if is_stalled else rates[-1]:.3g}"] if rates else []
    for shown in (losses[:most] for most in range(len(losses), -1, -1)):
        labels = [_label(name, each, width if len(losses) == 1 else 0) for name, each in shown] + pace
        room = (width - sum(map(len, labels)) - len(GAP) * (len(labels) - 1)) // max(1, len(labels)) - 1
        if room >= LEAST:
            break
    if not labels or room < LEAST:
        return ""
    bars = [_loss_curve(means_of(each, room)) for _, each in shown]
    bars += [spark(rates_of(recent.ends, room), 0.0)] * bool(rates)
    return GAP.join(f"{label} {bar}" for label, bar in zip(labels, bars, strict=True))


def _label(name: str, losses: Sequence[float], width: int) -> str:
    finite = [loss for loss in losses if math.isfinite(loss)]
    has_range = finite and width >= ROOM_FOR_RANGE
    return f"{name} {losses[-1]:.3g}" + (f" ({min(finite):.3g} to {max(finite):.3g})" if has_range else "")


def _loss_curve(losses: Sequence[float]) -> str:
    finite = [loss for loss in losses if math.isfinite(loss)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    if low > 0 and high > WIDE * low:
        return spark([math.log2(loss) if math.isfinite(loss) else loss for loss in losses], math.log2(low))
    return spark(losses, low)


def spark(values: Sequence[float], low: float) -> str:
    """A bar for each value, from ``low`` to the largest one; ``!`` where it is inf or nan."""
    high = max(filter(math.isfinite, values), default=low)
    return "".join(_bar(value, low, high) for value in values)


def means_of(values: Sequence[float], most: int) -> list[float]:
    """The values, or the means of as many neighbours as make ``most`` of them; nan if one of these is not finite."""
    groups = [values[begin:end] for begin, end in _parts(len(values), most)]
    return [sum(group) / len(group) for group in groups]


def rates_of(ends: Sequence[tuple[int, float]], most: int) -> list[float]:
    """Batches per second, over as many neighbours as make ``most`` rates. ``ends``: (batch, when it ended), in order."""
    spans = [(ends[begin], ends[end]) for begin, end in _parts(len(ends) - 1, most)]
    return [(last - first) / (ended - began) for (first, began), (last, ended) in spans if ended > began]


def _parts(count: int, most: int) -> list[tuple[int, int]]:
    """``count`` things in at most ``most`` parts that are nearly of one size: where each begins and ends."""
    parts = min(count, most)
    return [(at * count // parts, (at + 1) * count // parts) for at in range(parts)] if parts > 0 else []


def _bar(value: float, low: float, high: float) -> str:
    if not math.isfinite(value):
        return NOT_FINITE
    share = (value - low) / (high - low) if high > low else 0.0
    return BARS[min(len(BARS) - 1, max(0, int(share * len(BARS))))]
