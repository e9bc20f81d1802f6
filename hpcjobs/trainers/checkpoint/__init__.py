"""Checkpoints: their format on disk, the writer, and the state they hold."""
