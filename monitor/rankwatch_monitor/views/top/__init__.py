"""``rankwatch top``: a run while it goes on, on a terminal or as lines."""
