"""The measurements of a run, and the files that record them."""
