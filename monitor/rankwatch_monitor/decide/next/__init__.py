"""What to do once a run is over: which machine is suspected, and whether the job starts again."""
