"""Reads figures of merit from a job's log while it grows: beside the program, with a Python 3.6 and nothing else."""
