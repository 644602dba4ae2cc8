"""Where the model calls us: forward, backward, the optimizer, compiled graphs."""
