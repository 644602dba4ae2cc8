"""Trainings whose ranks are no longer one model, with a loss that still falls: the truth that a report is compared with."""
