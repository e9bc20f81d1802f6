"""The runs of a study, as the folder of its sweep lists them."""

from __future__ import annotations

from pathlib import Path

from hpcjobs.errors import ConfigError
from hpcjobs.scaling.study import Study, StudyRun
from hpcjobs.scaling.study_sweep import key
from hpcjobs.sweeps.folder import SweepFolder


def list_runs(study: Study) -> list[StudyRun]:
    """Every run, in the order of submission, without a question to the scheduler.

    Raises:
        ConfigError: their folder is not there.
    """
    if study.folder is None:
        return []
    if not (Path(study.folder) / "sweep.json").exists():
        raise ConfigError(
            f"the runs of study {study.name} are not in {study.folder}: it has no sweep.json",
            hint="the same hpcjobs scale command measures them again",
        )
    folder = SweepFolder(Path(study.folder))
    tasks: dict[str, tuple[str, str]] = {}
    for chunk in folder.chunks():
        if (entry := folder.entry(chunk)) is not None:
            tasks |= {cell: (f"{entry.job_id}_{line}", entry.run_dir) for line, cell in enumerate(chunk.cells)}
    runs = []
    for cell in folder.definition.cells:
        size, repeat = key(cell)
        job_id, job_dir = tasks.get(cell.id, (None, None))
        runs.append(
            StudyRun(size=size, repeat=repeat, job_id=job_id, run_dir=str(folder.cell_dir(cell.id)), job_dir=job_dir)
        )
    return runs
