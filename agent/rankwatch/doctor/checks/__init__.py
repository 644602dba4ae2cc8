"""The checks of the doctor, one a file."""
