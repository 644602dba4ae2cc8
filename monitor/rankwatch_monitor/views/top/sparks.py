"""How the last batches went: the loss and the pace in one line, or the loss and the norm of the gradients in several. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...record.numbers.losses import LOSS
from ...record.numbers.recent import Means, Recent

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

GAP, BESIDE = "  ", " " * 3

NORM = "gradient norm"

LEAST_CHART, LEAST_ROWS, MOST_ROWS = 24, 3, 9
"""Characters and lines of bars without which a chart says little, and lines of one with its name, at most."""


def curves(recent: Recent, width: int, *, is_stalled: bool = False) -> str:
    """The line: of each curve its last number and the bars, and of the loss its range if there is room; empty without a curve.

    Of losses that take turns there are as many as there is room for.
    """
    losses = [(name, [loss for _, loss in means]) for name, means in losses_of(recent) if len(means) > 1]
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


def charts(recent: Recent, width: int, rows: int) -> list[str]:
    """The losses and the norm of the gradients, side by side: a line of names, and below it bars of ``rows`` lines less one.

    As many as there is room for; empty without any.
    """
    found = [
        (name, [mean for _, mean in means]) for name, means in (*losses_of(recent), (NORM, recent.norms)) if len(means) > 1
    ]
    found = found[: max(1, (width + len(BESIDE)) // (LEAST_CHART + len(BESIDE)))]
    if not found or rows < 1 + LEAST_ROWS:
        return []
    each = (width - len(BESIDE) * (len(found) - 1)) // len(found)
    columns = []
    for name, values in found:
        label = next(
            (one for one in (_label(name, values, ROOM_FOR_RANGE), _label(name, values, 0)) if len(one) <= each), name[:each]
        )
        bars, low = _scaled(means_of(values, each))
        columns.append([label.ljust(each), *_tall(bars, low, min(rows, MOST_ROWS) - 1, each)])
    return [BESIDE.join(line).rstrip() for line in zip(*columns, strict=True)]


def losses_of(recent: Recent) -> Sequence[tuple[str, Means]]:
    return recent.in_turns or ((LOSS, recent.losses),)


def _tall(values: Sequence[float], low: float, rows: int, width: int) -> list[str]:
    """Bars that grow over several lines, the top line first. Few values have wide bars."""
    high = max(filter(math.isfinite, values), default=low)
    wide = max(1, width // len(values))
    steps = len(BARS) * rows - 1
    levels = [1 + int(_share(value, low, high) * steps) if math.isfinite(value) else 0 for value in values]
    lines = []
    for below in (row * len(BARS) for row in reversed(range(rows))):
        cells = (
            NOT_FINITE if not level and not below else (" " + BARS)[min(len(BARS), max(0, level - below))]
            for level in levels
        )
        lines.append("".join(cell * wide for cell in cells).ljust(width))
    return lines


def _loss_curve(losses: Sequence[float]) -> str:
    return spark(*_scaled(losses))


def _scaled(losses: Sequence[float]) -> tuple[Sequence[float], float]:
    """What is drawn for these, and the lowest of that."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    if low > 0 and high > WIDE * low:
        return [math.log2(loss) if math.isfinite(loss) else loss for loss in losses], math.log2(low)
    return losses, low


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
    return BARS[min(len(BARS) - 1, int(_share(value, low, high) * len(BARS)))]


def _share(value: float, low: float, high: float) -> float:
    return min(1.0, max(0.0, (value - low) / (high - low))) if high > low else 0.0
