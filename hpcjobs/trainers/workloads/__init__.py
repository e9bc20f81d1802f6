"""Workloads: one function from Config to Workload each. A user's own is named `package.module:function`."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from hpcjobs.runtime.exits import UsageError
from hpcjobs.trainers.config import Config, find_function

if TYPE_CHECKING:
    from hpcjobs.trainers.workloads.base import Workload

SHIPPED = ("lm", "matmul", "mnist", "resnet50")


def check_workload_name(name: str) -> None:
    """Raise `UsageError` for a name that is neither a shipped workload's nor ``package.module:function``."""
    if ":" not in name and name not in SHIPPED:
        raise UsageError(
            f"--workload {name}: there are {', '.join(SHIPPED)}", hint="your own is written package.module:function"
        )


def load_workload(config: Config, flags: Any = None) -> Workload:
    """Return the workload that `--workload` names, made with `flags`, the dataclass of its flags."""
    from hpcjobs.trainers.workloads.base import Workload  # loads torch

    name = config.workload
    check_workload_name(name)
    if ":" not in name:
        name = f"{__name__}.{name}:{name}"
    build = find_function(name)
    try:
        workload = build(config, **({} if flags is None else asdict(flags)))
    except TypeError as error:
        missing = re.match(r"Workload\.__init__\(\) (missing|got an unexpected) .*", str(error))
        if missing is None:
            raise
        raise UsageError(
            f"--workload {config.workload}: {error}", hint="docs/own_workload.md lists the fields"
        ) from error
    if not isinstance(workload, Workload):
        raise UsageError(
            f"--workload {config.workload} returned a {type(workload).__name__}, not a Workload",
            hint="return hpcjobs.trainers.workloads.base.Workload(build_model=…, loss=…, train=…)",
        )
    return workload if workload.name else replace(workload, name=name.partition(":")[2])
