"""A scaling study: one program at several sizes, and the runs that measure it.

``NAME.study.json`` holds what was asked and which job measures which point. It is written before and after every
submission, so a study that was interrupted anywhere is taken up where it stopped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from hpcjobs.errors import ConfigError
from hpcjobs.files import write_beside
from hpcjobs.site.models import Frozen

SUFFIX = ".study.json"
Mode = Literal["strong", "weak"]


class Size(Frozen, frozen=True, order=True):
    """How large one point is."""

    nodes: int
    ntasks_per_node: int

    @property
    def ranks(self) -> int:
        return self.nodes * self.ntasks_per_node


class Point(Frozen, frozen=True):
    """One run of the study."""

    size: Size
    repeat: int
    """From 1; of a job array, the index of the task."""
    job_id: str | None
    """None: about to be submitted, or the submitter was stopped before it knew."""
    run_dir: str
    """Where the run writes; of an array's task, its part of the job's run folder."""

    @property
    def job_dir(self) -> Path:
        """The run folder of the job, which for an array all its tasks share."""
        of_task = self.job_id is not None and "_" in self.job_id
        return Path(self.run_dir).parent if of_task else Path(self.run_dir)


class Study(Frozen, frozen=True):
    """What was asked, and what was submitted so far."""

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
    one_at_a_time: bool = False
    points: tuple[Point, ...] = ()
    schema: Literal["hpcjobs.study/1"] = "hpcjobs.study/1"

    def asked_the_same(self, other: Study) -> bool:
        """Both ask for the same runs (more sizes or repeats are the same question, taken further)."""
        fields = ("name", "site", "mode", "program", "options", "launcher", "env")
        return all(getattr(self, field) == getattr(other, field) for field in fields)


def path_of(word: str) -> Path:
    """``NAME`` or ``NAME.study.json``, in the current folder or anywhere."""
    return Path(word if word.endswith(SUFFIX) else word + SUFFIX)


def read(path: Path) -> Study:
    """The study in the file.

    Raises:
        ConfigError: there is none, or it is no study.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Study)
    except FileNotFoundError as error:
        raise ConfigError(f"no study {path}", hint=f"hpcjobs scale --name NAME writes NAME{SUFFIX}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is no study: {error}") from error


def write(path: Path, study: Study) -> None:
    """In one step: a reader sees the old study or the whole new one."""
    write_beside(path, msgspec.json.format(msgspec.json.encode(study), indent=1), mode=0o644)
