"""The training loop and the run around it."""
