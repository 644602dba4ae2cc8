"""The record of a run for other programs: what is kept, batch after batch, so that memory does not grow with the record."""
