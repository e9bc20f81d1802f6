"""Callbacks of training frameworks, by which their runs have the metrics and the fault tolerance of a job."""
