"""How many batches the ranks of a run measure in full, by their budget."""
