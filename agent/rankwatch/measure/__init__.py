"""Tensor -> numbers: the extremes of each tensor, on its device, row by row."""
