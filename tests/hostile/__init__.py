"""Trainings that go wrong in a known way: the truth that a verdict is compared with."""
