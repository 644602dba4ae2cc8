"""Other processes: the programs that a collector starts, and the ranks of this host, whose ends it sees."""
