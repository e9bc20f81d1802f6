"""The plan of a run (steps, batch sizes, learning rate) and one optimizer step."""
