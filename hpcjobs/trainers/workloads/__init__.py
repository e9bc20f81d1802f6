"""Workloads: one function Config -> Workload each. A user's own is named `package.module:function`."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING

from hpcjobs.runtime.exits import UsageError
from hpcjobs.trainers.commandline.config import Config

if TYPE_CHECKING:
    from hpcjobs.trainers.workloads.base import Workload

SHIPPED = ("lm", "matmul", "mnist", "resnet50")


def load_workload(config: Config) -> Workload:
    """The workload that `--workload` names."""
    name = config.workload
    if name in SHIPPED:
        name = f"{__name__}.{name}:{name}"
    module_name, _, function = name.partition(":")
    if not function:
        raise UsageError(
            f"--workload {config.workload}: there are {', '.join(SHIPPED)}",
            hint="your own is written package.module:function",
        )
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        build = getattr(import_module(module_name), function)
    except (ModuleNotFoundError, AttributeError) as error:
        raise UsageError(f"--workload {config.workload}: {error}", hint="package.module:function") from error
    workload: Workload = build(config)
    return workload
