"""Drills: a fault for real, on the user's own site, and whether the run outlived it."""
