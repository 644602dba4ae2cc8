"""The table with all its trainings."""

from __future__ import annotations

from . import averaging, data, data_parallel, loops, own, sharded, tensors, weights, wrapped
from .case import ANY, CASES, STEPS, Case

__all__ = [
    "ANY",
    "CASES",
    "STEPS",
    "Case",
    "averaging",
    "data",
    "data_parallel",
    "loops",
    "own",
    "sharded",
    "tensors",
    "weights",
    "wrapped",
]
