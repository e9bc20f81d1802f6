"""Hydra's launcher of hpcjobs: ``python train.py -m lr=0.1,0.01 hydra/launcher=hpcjobs hydra.launcher.site=tu-hpc``.

The jobs of a multirun are the cells of a sweep (`hpcjobs.sweep`): one array, with the site's software and limits. Hydra
waits for them and gets what the task function returned.
"""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Sequence
from dataclasses import field, make_dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, configure_log, filter_overrides, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from hpcjobs.site.resources import Resources
from hpcjobs.sweeps.executor import NAMES, rename

log = logging.getLogger(__name__)

_OF_THE_SWEEP = ("site", "name", "max_parallel", "pack", "pack_parallel")
_OF_THE_JOB = ("launcher", "env", "chdir", "retries", "signal_before", "sbatch", "srun", "snapshot")
_FIELDS = dict.fromkeys((*_OF_THE_SWEEP, *_OF_THE_JOB, *Resources.__struct_fields__, *NAMES))
"""``hydra.launcher.NAME``: what `hpcjobs.sweep` takes, options of sbatch, with underscores, and submitit's names."""
_TARGET = f"{__name__}.HpcjobsLauncher"
HpcjobsLauncherConf = make_dataclass(
    "HpcjobsLauncherConf",
    [("_target_", str, _TARGET), *((name, Any, field(default=None)) for name in _FIELDS)],
)
ConfigStore.instance().store(group="hydra/launcher", name="hpcjobs", node=HpcjobsLauncherConf, provider="hpcjobs")


class HpcjobsLauncher(Launcher):
    """Submits the jobs of a multirun as one sweep, and waits for them."""

    def __init__(self, **options: Any) -> None:
        self.options = rename({name: _plain(value) for name, value in options.items() if value is not None})
        if "array_parallelism" in self.options:
            self.options["max_parallel"] = self.options.pop("array_parallelism")
        self.config: DictConfig | None = None
        self.task_function: TaskFunction | None = None
        self.hydra_context: HydraContext | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config, self.hydra_context, self.task_function = config, hydra_context, task_function

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        import hpcjobs

        assert self.config is not None
        assert self.hydra_context is not None
        assert self.task_function is not None
        setup_globals()
        configure_log(self.config.hydra.hydra_logging, self.config.hydra.verbose)
        Path(str(self.config.hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
        task = HydraTask(self.hydra_context, self.task_function, self.config, Singleton.get_state())
        points = [
            {"overrides": list(overrides), "number": initial_job_idx + number}
            for number, overrides in enumerate(job_overrides)
        ]
        options = {"name": f"{self.config.hydra.job.name}-{time.strftime('%Y%m%d-%H%M%S')}-{initial_job_idx}"}
        sweep = hpcjobs.sweep(task, points, made_by="hydra", **{**options, **self.options})
        sweep.submit()
        log.info(f"hpcjobs: {len(points)} jobs, sweep {sweep.definition.name} in {sweep.path}")
        for point in points:
            log.info(f"\t#{point['number']} : {' '.join(filter_overrides(point['overrides']))}")
        sweep.wait()
        cells = sweep.definition.cells
        return [
            _result(sweep.folder.cell_dir(cell.id), point["overrides"])
            for cell, point in zip(cells, points, strict=True)
        ]


class HydraTask:
    """One job of the multirun, on its node: a function of its overrides and its number."""

    def __init__(
        self, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig, singletons: Any
    ) -> None:
        self.hydra_context, self.task_function = hydra_context, task_function
        self.config, self.singletons = config, singletons

    def __call__(self, overrides: list[str], number: int) -> JobReturn:
        Singleton.set_state(self.singletons)
        setup_globals()
        config = self.hydra_context.config_loader.load_sweep_config(self.config, overrides)
        with open_dict(config):
            config.hydra.job.id = number
            config.hydra.job.num = number
        done = run_job(
            hydra_context=self.hydra_context,
            task_function=self.task_function,
            config=config,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
        )
        if done.status is not JobStatus.COMPLETED:
            done.return_value  # noqa: B018 # raises what the function raised, so that the job fails
        # Without the types of plugins, whose modules Hydra loads again in each process.
        done.cfg, done.hydra_cfg = _untyped(done.cfg), _untyped(done.hydra_cfg)
        return done


def _untyped(config: DictConfig | None) -> DictConfig | None:
    return None if config is None else OmegaConf.create(OmegaConf.to_container(config))


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _result(folder: Path, overrides: list[str]) -> JobReturn:
    """What the job returned; a job that ended otherwise is a failure with the end of its traceback."""
    file = folder / "result.pkl"
    if file.is_file():
        result: JobReturn = pickle.loads(file.read_bytes())
        return result
    error = folder / "error.txt"
    reason = error.read_text(encoding="utf-8").strip() if error.is_file() else "it left no result"
    failed = JobReturn(overrides=overrides, status=JobStatus.FAILED)
    failed.return_value = RuntimeError(f"{' '.join(overrides)} in {folder}: {reason}")
    return failed
