"""One rank of a run, one batch of it, and two batches compared."""
