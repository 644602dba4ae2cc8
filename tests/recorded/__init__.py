"""What the ranks of ``agreeing`` and ``desynced`` sent, as files, and what must be said of it. ``replicas`` writes the files."""
