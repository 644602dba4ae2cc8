"""Trainings of one process: healthy ones, and such that go wrong in a known way."""

# ruff: noqa: F401  the modules fill the table

from trainings.case import cases
from trainings.truths import Peace, Trip

from . import (
    backwards,
    engines,
    forwards,
    inputs,
    loops,
    losses,
    measures,
    nets,
    outside,
    precisions,
    still,
    structures,
    trials,
    weights,
)

HEALTHY, HOSTILE = cases(Peace), cases(Trip)
