"""The gate of a change: which slow tests it runs, and what becomes of a test that fails."""
