"""What comes in: who may come in, whose message is next, and what waits. ``control.py`` is the other side of the door."""
