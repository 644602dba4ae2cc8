"""Trainings, and what is true of each: one table, which the tests of verdicts, of peace and of replicas go through."""
