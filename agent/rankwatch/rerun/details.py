"""What was wrong with the arguments of an operator, where readings do not show it: the lengths of an alignment, say."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor

from .arguments import name_of


def detail_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """Empty: nothing is known to be wrong."""
    if not name_of(func).strip("_").endswith("ctc_loss"):
        return ""
    given = dict(zip([row.name for row in func._schema.arguments], args, strict=False)) | kwargs
    return _misaligned(given["targets"], _numbers(given["input_lengths"]), _numbers(given["target_lengths"]))


def _misaligned(targets: Any, frames: list[int], labels: list[int]) -> str:
    """The first row that has no alignment: each label needs a frame, and two equal ones in a row a frame between them."""
    if not isinstance(targets, Tensor):
        return ""
    start = 0
    for row, (length, count) in enumerate(zip(frames, labels, strict=True)):
        own = (targets[row, :count] if targets.ndim == 2 else targets[start : start + count]).tolist()
        start += count
        repeats = sum(one == other for one, other in pairwise(own))
        if length < count + repeats:
            more = f", of which {repeats} repeat the one before and need a frame more" if length >= count else ""
            return f"no alignment: row {row} has {length} frames for {count} labels{more}"
    return ""


def _numbers(lengths: Any) -> list[int]:
    return [int(one) for one in (lengths.tolist() if isinstance(lengths, Tensor) else lengths)]
