"""The first trip: the election of the earliest one over all ranks, and the verdict."""
