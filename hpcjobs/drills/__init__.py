"""Drills: each causes a real fault in a job on the user's own site and checks whether the run survives it."""
