"""Trainings of one process that end without a verdict, and how they went."""

# ruff: noqa: F401  the modules fill the table

from trainings.case import cases

from . import badly, policies, well
from .truth import Went

JUDGED = cases(Went)
