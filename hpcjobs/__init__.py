"""hpcjobs: submit, survive and understand distributed training on Slurm.

The public names are loaded when they are first used: importing this package imports nothing else.

    >>> import hpcjobs
    >>> job = hpcjobs.submit(hpcjobs.plan(["ddp", "--workload", "mnist"], site="local", ntasks_per_node=2))
    >>> job.wait()
    0
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from hpcjobs.job.plan import plan
    from hpcjobs.run.handle import JobHandle, find
    from hpcjobs.run.submit import submit
    from hpcjobs.site.library import load_site

_WHERE = {
    "JobHandle": "hpcjobs.run.handle",
    "find": "hpcjobs.run.handle",
    "load_site": "hpcjobs.site.library",
    "plan": "hpcjobs.job.plan",
    "submit": "hpcjobs.run.submit",
}
__all__ = ["JobHandle", "__version__", "find", "load_site", "plan", "submit"]


def __getattr__(name: str) -> object:
    if name not in _WHERE:
        raise AttributeError(f"module 'hpcjobs' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)
