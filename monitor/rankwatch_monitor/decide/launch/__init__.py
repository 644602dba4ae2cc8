"""The launches of a job: which run each process is of."""
