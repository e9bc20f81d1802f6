"""Stops a run on request, has it started again, and ends a run that makes no progress."""
