"""The collector: sockets, clocks, signals and files around the decisions. Its rooms meet in ``collector.py``."""
