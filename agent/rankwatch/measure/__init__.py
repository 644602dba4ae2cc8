"""Tensor -> numbers: abs min and abs max of each tensor, measured on its device."""
