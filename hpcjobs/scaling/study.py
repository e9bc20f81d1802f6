"""A scaling study: one program at several sizes, each measured several times.

``NAME.study.json`` holds the request, and the folder of the sweep with the runs as cells. Its ``points`` are a
copy for people and scripts, as the last call of ``hpcjobs scale`` left them; reports read the folder (`run_list`).
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Literal

import msgspec

from hpcjobs.errors import ConfigError, reason_of
from hpcjobs.files import read_regular, write_beside
from hpcjobs.site.models import Frozen

SUFFIX = ".study.json"
Mode = Literal["strong", "weak"]


class Size(Frozen, frozen=True, order=True):
    """How large a run is."""

    nodes: int
    ntasks_per_node: int

    @property
    def ranks(self) -> int:
        return self.nodes * self.ntasks_per_node

    def __str__(self) -> str:
        return f"{self.nodes}x{self.ntasks_per_node}"


class StudyRun(Frozen, frozen=True):
    """One run of a study."""

    size: Size
    repeat: int
    """From 1."""
    job_id: str | None
    """Array task that measures it; None: not submitted yet."""
    run_dir: str
    """Folder that the run writes to."""
    job_dir: str | None = None
    """Run folder of the array; None: not submitted yet."""
    series: str = ""
    """Values of the axes: ``launcher=srun, cpus_per_task=2``; empty: the study has none."""


class Study(Frozen, frozen=True):
    """The request of a study: program, sizes, repeats, site."""

    name: str
    site: str
    mode: Mode
    """strong: the same work on more ranks. weak: more work on more ranks."""
    program: tuple[str, ...]
    sizes: tuple[Size, ...]
    repeats: int
    options: dict[str, str | int | bool | None] = {}
    """sbatch options of every run."""
    launcher: str | None = None
    """None: the site's."""
    env: dict[str, str] = {}
    """Environment variables of every run."""
    sbatch: tuple[str, ...] = ()
    """Options that reach sbatch unread: ``name=value`` or ``name``."""
    srun: tuple[str, ...] = ()
    """Options that reach the tasks' srun unread."""
    metric: tuple[str, ...] = ()
    """Figures of merit in the log, as for ``--metric``; the first one is compared."""
    axes: dict[str, tuple[str, ...]] = {}
    """Axes in addition to the sizes: name -> values; each combination is a series."""
    one_at_a_time: bool = False
    folder: str | None = None
    """Folder of the sweep; None: not submitted yet."""
    points: tuple[StudyRun, ...] = ()
    schema: Literal["hpcjobs.study/1"] = "hpcjobs.study/1"

    @property
    def series(self) -> dict[str, dict[str, str]]:
        """Each series by its name: the value of each axis; one without name for a study without axes."""
        points = [dict(zip(self.axes, values, strict=True)) for values in itertools.product(*self.axes.values())]
        return {", ".join(f"{name}={value}" for name, value in point.items()): point for point in points}

    def extends(self, other: Study) -> bool:
        """Whether the runs of both can be compared: they differ in sizes and repeats alone."""
        fields = ("name", "site", "mode", "program", "options", "launcher", "env", "sbatch", "srun", "metric", "axes")
        return all(getattr(self, field) == getattr(other, field) for field in fields)


def path_of(name: str) -> Path:
    """``NAME`` or ``NAME.study.json``, in the current folder or anywhere."""
    return Path(name if name.endswith(SUFFIX) else name + SUFFIX)


def read(path: Path) -> Study:
    """The study in the file.

    Raises ConfigError: the file is missing, or is not a study.
    """
    try:
        return msgspec.json.decode(read_regular(path), type=Study)
    except FileNotFoundError as error:
        raise ConfigError(f"no study {path}", hint=f"hpcjobs scale --name NAME writes NAME{SUFFIX}") from error
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is no study: {reason_of(error)}") from error


def write(path: Path, study: Study) -> None:
    """Write the file in one step: a reader sees the old study or the new one."""
    write_beside(path, msgspec.json.format(msgspec.json.encode(study), indent=1), mode=0o644)
