"""Facts -> a run's file, and the file -> what views read."""
