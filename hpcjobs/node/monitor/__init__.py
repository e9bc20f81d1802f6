"""Samples of what a node does for one job of any program: beside its processes, with a Python 3.6 and nothing else."""
