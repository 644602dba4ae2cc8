"""The collector: sockets, clocks, signals and files around the decisions."""
