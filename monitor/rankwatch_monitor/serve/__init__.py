"""Sockets, clocks, signals and files round the decisions."""
