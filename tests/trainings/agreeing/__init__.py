"""Trainings of several ranks in which all is well: replicas are one model, or differ by right. Nothing may be said of them."""
