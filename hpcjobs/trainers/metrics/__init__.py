"""What a run measures and records."""
