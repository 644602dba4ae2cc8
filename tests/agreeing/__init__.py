"""Trainings of several ranks in which all is well: replicas are one model, or differ by right. Nothing may be said of them."""

from . import averaging, data, data_parallel, loops, own, sharded, tensors, weights, wrapped  # they fill the table
from .case import CASES, STEPS

__all__ = [
    "CASES",
    "STEPS",
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
