"""The scheduler Slurm."""
