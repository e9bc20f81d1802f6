"""hpcjobs: submit, survive and understand distributed training on Slurm.

The public names are loaded when they are first used: importing this package imports nothing else.

    >>> import hpcjobs
    >>> job = hpcjobs.submit(hpcjobs.plan(["ddp", "--workload", "mnist"], site="local", ntasks_per_node=2))
    >>> job.wait()
    0
"""

from importlib import import_module

__version__ = "0.1.0"

TYPE_CHECKING = False  # for type checkers it is True; typing would take two thirds of the time that a launch needs
if TYPE_CHECKING:
    from hpcjobs.job.models import JobSpec
    from hpcjobs.job.plan import plan
    from hpcjobs.jobstats.dataframe import accounting
    from hpcjobs.run.submit import JobHandle, find, submit
    from hpcjobs.scaling.handle import find_study, scale
    from hpcjobs.site.library import load_site
    from hpcjobs.site.resources import Resources
    from hpcjobs.sweeps.cells import from_csv, grid, sample, zip_
    from hpcjobs.sweeps.executor import executor
    from hpcjobs.sweeps.sweep import find_sweep, sweep

_WHERE = {
    "JobHandle": "hpcjobs.run.submit",
    "JobSpec": "hpcjobs.job.models",
    "Resources": "hpcjobs.site.resources",
    "accounting": "hpcjobs.jobstats.dataframe",
    "executor": "hpcjobs.sweeps.executor",
    "find": "hpcjobs.run.submit",
    "find_study": "hpcjobs.scaling.handle",
    "find_sweep": "hpcjobs.sweeps.sweep",
    "from_csv": "hpcjobs.sweeps.cells",
    "grid": "hpcjobs.sweeps.cells",
    "load_site": "hpcjobs.site.library",
    "plan": "hpcjobs.job.plan",
    "sample": "hpcjobs.sweeps.cells",
    "scale": "hpcjobs.scaling.handle",
    "submit": "hpcjobs.run.submit",
    "sweep": "hpcjobs.sweeps.sweep",
    "zip_": "hpcjobs.sweeps.cells",
}
__all__ = [
    "JobHandle",
    "JobSpec",
    "Resources",
    "__version__",
    "accounting",
    "executor",
    "find",
    "find_study",
    "find_sweep",
    "from_csv",
    "grid",
    "load_site",
    "plan",
    "sample",
    "scale",
    "submit",
    "sweep",
    "zip_",
]


def __getattr__(name: str) -> object:
    if name not in _WHERE:
        raise AttributeError(f"module 'hpcjobs' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return __all__
