"""The ``containers:`` section of a site: what runs images, which there are, and what of the machine they see."""

from __future__ import annotations

import re
from typing import Literal

from hpcjobs.site.frozen import Frozen

Runtime = Literal["apptainer", "singularity", "pyxis", "none"]

_REFUSED = ("--writable", "-w")
"""An image is shared: one job that writes into it changes what all others run."""


class Containers(Frozen, frozen=True):
    """How a job's program runs inside an image here."""

    runtime: Runtime = "none"
    """What runs images on the nodes."""
    program: str | None = None
    """The runtime's program, where it is not in the PATH of the nodes."""
    images: dict[str, str] = {}
    """Name -> file. With pyxis also what enroot imports (``nvcr.io#nvidia/pytorch:24.12-py3``)."""
    folder: str = "~/.cache/hpcjobs/images"
    """Where ``container build`` puts ``NAME.sif``; an image in it is known by its name."""
    build_folder: str | None = None
    """Where images are built: some gigabytes; ``None``: the system's temporary folder."""
    default: str | None = None
    """The image of jobs that name none; ``--container none`` runs such a job without."""
    binds: tuple[str, ...] = ()
    """``SOURCE``, ``SOURCE:TARGET`` or ``SOURCE:TARGET:ro``: data, shared software. Folders of run and code are bound
    anyway."""
    gpu: Literal["nv", "rocm", "none"] | None = None
    """How GPUs get in; ``None``: ``nv`` where the job asks for GPUs."""
    clean_env: bool = False
    """Let in only what the job, its launcher and the scheduler set."""
    home: bool = False
    """Let the user's home folder in."""
    python: str = "python3"
    """Python in the images."""
    stage: str = "/tmp"
    """Folder local to each node, for the copy that ``--stage-image`` makes."""
    args: tuple[str, ...] = ()
    """Further options of the runtime's ``exec``; with pyxis of ``srun``."""

    def __post_init__(self) -> None:
        for name in (*self.images, *filter(None, (self.default,))):
            if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name, re.ASCII) or name == "none":
                raise ValueError(f"images {name!r}: a name of letters, digits, '_', '.', '-', and not none")
        for bind in self.binds:
            check_bind(bind)
        for arg in self.args:
            if any(ord(char) < 32 for char in arg):
                raise ValueError(f"args {arg!r}: no option holds control characters")
            if arg in _REFUSED or arg.startswith("--writable="):
                raise ValueError(f"args {arg!r}: an image is shared and stays as it is; --writable-tmpfs is allowed")


def check_bind(bind: str) -> None:
    """Refuse what no ``--bind`` can say (ValueError)."""
    source, _, rest = bind.partition(":")
    target, _, mode = rest.partition(":")
    if not source or mode not in ("", "ro", "rw") or "," in bind or any(ord(char) < 32 for char in bind):
        raise ValueError(f"binds {bind!r}: write SOURCE, SOURCE:TARGET or SOURCE:TARGET:ro, without commas")
    if target and not target.startswith("/"):
        raise ValueError(f"binds {bind!r}: {target!r} must be an absolute path in the image")
