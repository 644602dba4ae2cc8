"""``rankwatch replay``: runs the forward in a capsule again, in a fresh process, and says what recurs where."""
