"""Stopping on request, being started again, and ending a run that stands still."""
