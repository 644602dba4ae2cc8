"""One file for each command: ``add_options(parser)`` and ``main(arguments)``, which returns the exit code."""
