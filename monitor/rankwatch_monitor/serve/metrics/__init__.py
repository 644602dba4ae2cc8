"""The collector's metrics for Prometheus."""
