"""Explains why a job failed or waits, and where a program can run, when and at what cost."""
