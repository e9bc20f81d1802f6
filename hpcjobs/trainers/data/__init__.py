"""The training data: which rank reads which samples, and where the data lies."""
