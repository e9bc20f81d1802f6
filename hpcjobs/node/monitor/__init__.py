"""Samples the load of a node by one job of any program; needs only Python 3.6."""
