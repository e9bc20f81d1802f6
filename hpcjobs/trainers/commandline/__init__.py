"""The command line of every trainer: its flags, and the way from them to an exit code."""
