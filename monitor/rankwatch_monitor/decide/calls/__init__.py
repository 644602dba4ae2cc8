"""The collectives that ranks call: whether the members of each group call the same."""
