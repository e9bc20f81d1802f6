"""Which rank reads which samples, and where the data lies."""
