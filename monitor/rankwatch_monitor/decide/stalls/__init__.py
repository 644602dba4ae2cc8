"""Ranks that make no progress, and where their threads are."""
