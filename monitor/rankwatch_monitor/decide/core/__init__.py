"""A run from its first HELLO to its report: who its ranks are, what its decisions rest on, and what is told of it."""
