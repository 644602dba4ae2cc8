"""The record -> text, JSON, pages and tables."""
