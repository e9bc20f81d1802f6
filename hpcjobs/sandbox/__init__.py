"""A real Slurm on this machine, shaped like a site: several hosts, accounting, limits, PMIx and PMI2."""

from hpcjobs.sandbox.layout import Host, Sandbox, Shape, Status
from hpcjobs.sandbox.sandbox import add_users, down, environment, status, up

__all__ = ["Host", "Sandbox", "Shape", "Status", "add_users", "down", "environment", "status", "up"]
