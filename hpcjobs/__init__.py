"""hpcjobs: submit, survive and understand distributed training on Slurm."""

__version__ = "0.1.0"
