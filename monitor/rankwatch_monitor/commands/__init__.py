"""One file for each command: ``HELP``, ``add_options(parser)`` and ``main(arguments)``, which returns the exit code."""
