"""``rankwatch top``: a live view of a run, on a terminal or as lines."""
