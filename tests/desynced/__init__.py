"""Trainings whose ranks are no longer one model, with a loss that still falls: the truth that a report is compared with."""

from . import alone, learned, modes, replicated, sharded  # they fill the table
from .case import CASES

__all__ = ["CASES", "alone", "learned", "modes", "replicated", "sharded"]
