"""Explains why a job failed or waits, and finds placements of a program with their start and cost."""
