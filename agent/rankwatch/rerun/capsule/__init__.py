"""Writes a capsule: the files from which a bad forward or backward can be run again elsewhere."""
