"""Slurm through its own commands."""
