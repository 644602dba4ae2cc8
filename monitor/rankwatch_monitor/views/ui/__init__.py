"""The page that shows runs, from their records: ``grids`` and ``pages`` say what is shown, ``server`` serves it."""
