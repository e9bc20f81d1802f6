"""Reads figures of merit from a job's log while the program runs; needs only Python 3.6's standard library."""
