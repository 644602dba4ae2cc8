"""Counts of the collector for Prometheus."""
