"""The path of the bad value: the frames whose outputs went, one into the next, into the culprit. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rankwatch.shared.types.frame import MEASURED, Frame, Kind, Reading

_INTO = frozenset({Kind.INPUT, Kind.GRAD_OUTPUT})
_OUT = frozenset({Kind.OUTPUT, Kind.GRAD_INPUT})


def path_to(frames: Sequence[Frame]) -> list[int]:
    """Indices of the frames that lead to the last one, and of the last one itself, in the order in which they ran.

    A module's input is usually the output of an earlier frame, with exactly the same abs min and abs max. If several inputs
    have such a frame, the one with the largest abs max is followed, because that one overflows.
    """
    path = [len(frames) - 1] if frames else []
    while path:
        inputs = [r for r in frames[path[0]].readings if r.kind in _INTO and r.state in MEASURED]
        for wanted in sorted(inputs, key=lambda reading: -_size(reading)):
            before = next((index for index in reversed(range(path[0])) if _makes(frames[index], wanted)), None)
            if before is not None:
                break
        else:
            break
        path.insert(0, before)
    return path


def _size(reading: Reading) -> float:
    return reading.abs_max if reading.abs_max == reading.abs_max else float("inf")


def _makes(frame: Frame, wanted: Reading) -> bool:
    return any(
        made.kind in _OUT and repr((made.abs_min, made.abs_max)) == repr((wanted.abs_min, wanted.abs_max))
        for made in frame.readings
    )
