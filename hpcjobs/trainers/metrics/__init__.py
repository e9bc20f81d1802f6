"""The measurements of a run, the files that record them, and the cost of collectives without a model."""
