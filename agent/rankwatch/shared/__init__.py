"""Used by agent and monitor: frames, causes, notices, messages and their codec, options, text. Imports no torch."""
