"""Trainings of several ranks: such that go wrong in a known way, and healthy ones, of which nothing may be said."""

from trainings.case import cases
from trainings.truths import Alike, Fate

from . import culprits, numbers  # noqa: F401  they fill the table

HEALTHY, HOSTILE = cases(Alike), cases(Fate)
