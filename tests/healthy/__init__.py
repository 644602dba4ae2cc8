"""Trainings in which all is well, though some of it looks bad: a detector must say nothing."""
