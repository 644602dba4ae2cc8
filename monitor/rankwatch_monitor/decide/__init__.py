"""Events -> effects: who is lost, stalled or first; pure, the clock passed in."""
