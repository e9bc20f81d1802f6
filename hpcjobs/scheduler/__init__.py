"""The schedulers that run jobs: Slurm, and the queue of one machine without Slurm."""
