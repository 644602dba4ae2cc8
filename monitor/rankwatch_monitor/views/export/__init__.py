"""The record of a run for other programs, written batch by batch, so that memory does not grow with the record."""
