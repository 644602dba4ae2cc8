"""One file per output of a run's report, each from the same data."""
