"""Models that torch.compile compiles: what their graphs hand over, and what they are given and return."""
