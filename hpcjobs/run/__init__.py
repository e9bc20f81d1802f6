"""Submits jobs, records them in run folders, and finds, watches and changes them."""
