"""The hooks: forward, backward, the optimizer, compiled graphs."""
