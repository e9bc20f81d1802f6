"""The tests' sandbox: tu-hpc in four hosts, where signals go as on most clusters if the machine can do it."""

from hpcjobs.sandbox import Shape, network

SHAPE = Shape(like="tu-hpc", nodes=4, proctrack="cgroup" if network.freezer_available() else None)
