"""How many batches are measured in full, by what that costs."""
