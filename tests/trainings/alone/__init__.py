"""Trainings of one process: healthy ones, and such that go wrong in a known way."""

from trainings.case import cases
from trainings.truths import Peace, Trip

from . import backwards, engines, forwards, inputs, loops, losses, nets, outside, precisions, still, structures, weights  # noqa: F401  they fill the table

HEALTHY, HOSTILE = cases(Peace), cases(Trip)
