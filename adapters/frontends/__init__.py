"""Front ends: the command line."""
