"""The parts of the soak: each has rounds of random faults under a seed, and invariants that every round keeps."""
