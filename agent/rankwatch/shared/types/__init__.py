"""Data types: frames, trips, notices, fingerprints, messages, options. Standard library only."""
