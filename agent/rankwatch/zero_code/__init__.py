"""Watches a script that does not call ``watch``: finds its model as it is first called."""
