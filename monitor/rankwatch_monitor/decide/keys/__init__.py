"""The keys that a collector admits, and what each of them may cause."""
