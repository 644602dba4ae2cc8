"""Numbers of a record: the bytes of digests, envelopes and batches, and what these numbers say. Pure."""
