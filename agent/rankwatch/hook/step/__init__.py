"""Optimizer steps: the gradients that they are about to use, their norm, and the loss scale."""
