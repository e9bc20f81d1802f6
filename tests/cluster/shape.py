"""The tests' sandbox: tu-hpc in four hosts, where signals go as on most clusters if the machine can do it."""

from hpcjobs.sandbox import Shape, cgroups

SHAPE = Shape(like="tu-hpc", nodes=4, proctrack="cgroup" if cgroups.available() else None)
