"""Inspects an image by running a few lines of Python in it, and checks whether it fits a site before jobs queue."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

import hpcjobs
from hpcjobs.containers.images import Image, ImageFacts, ImageManifest, expand_path, read_manifest, sha256
from hpcjobs.errors import CommandMissingError, HpcJobsError
from hpcjobs.files import cache_dir
from hpcjobs.processes.programs import Result, Runner, run
from hpcjobs.site.models import Site
from hpcjobs.slurm_commands import cluster_env, list_mpi_types

_LEAST = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}


def least_driver(cuda: str) -> str | None:
    """``12.4`` -> ``525.60.13``; None: a version that is not known here."""
    major = cuda.split(".")[0]
    return _LEAST.get(int(major)) if major.isdigit() else None


def as_numbers(version: str) -> tuple[int, ...]:
    """``525.60.13`` -> (525, 60, 13), to compare by."""
    return tuple(int(part) for part in version.split(".") if part.isdigit())


_PROBE = Path(__file__).with_name("probe.py")
_TAIL_LINES = 8
INSTALLED = "apptainer/bin/apptainer"
"""Path of containers/install_apptainer.sh's Apptainer, below the cache folder of the machine or the user."""
PACKAGE = "/opt/hpcjobs"
"""Folder in an image that is on PYTHONPATH; this package is bound below it."""


def program_here(site: Site) -> str:
    """The runtime's program on this machine: the site's, then one in PATH, then the one that our script installed."""
    runtime = "apptainer" if site.containers.runtime in ("pyxis", "none") else site.containers.runtime
    if site.containers.program is not None or shutil.which(runtime):
        return site.containers.program or runtime
    caches = (Path("/var/cache/hpcjobs"), cache_dir())
    installed = [path for cache in caches if os.access(path := cache / INSTALLED, os.X_OK)]
    return str(installed[0]) if installed else runtime


def program_there(site: Site) -> str:
    """The runtime's program for a job: by name on nodes that are not this machine."""
    here = not site.kind.has_nodes or site.rehearsal
    return program_here(site) if here else site.containers.program or site.containers.runtime


def inside(
    site: Site, image: str, arguments: list[str], *, binds: tuple[str, ...] = (), runner: Runner = run
) -> Result:
    """Run ``arguments`` in ``image`` with ``binds`` and the site's binds that exist here, without home and environment.

    Raises CommandMissingError: the runtime is not on this machine.
    """
    of_site = [expand_path(bind, site, "containers.binds") for bind in site.containers.binds]
    here = [bind for bind in of_site if os.path.exists(bind.split(":")[0])]
    seen = [arg for bind in (*here, *binds) for arg in ("--bind", bind)]
    try:
        return runner(
            [program_here(site), "--quiet", "exec", "--no-home", "--cleanenv", "--pwd", "/", *seen, image, *arguments]
        )
    except CommandMissingError as error:
        raise CommandMissingError(
            f"{program_here(site)}: not found here",
            hint="module load it, or set containers.program in the site file; or look on a node: --submit",
        ) from error


def look(site: Site, image: str, *, runner: Runner = run) -> ImageFacts:
    """The versions of the software in ``image``.

    Raises HpcJobsError: it does not start, or has no Python; with the last lines that were printed.
    """
    python = site.containers.python
    done = inside(site, image, [python, "-c", _PROBE.read_text(encoding="utf-8")], runner=runner)
    if done.code != 0:
        raise HpcJobsError(f"image {image}: {output_tail(done)}", hint=hint_for(done, site))
    return msgspec.json.decode(done.out.strip().splitlines()[-1], type=ImageFacts)


def output_tail(done: Result) -> str:
    """The last lines of a run that failed."""
    lines = (done.err.strip() or done.out.strip() or f"exit code {done.code}").splitlines()
    return "\n  ".join(lines[-_TAIL_LINES:])


def hint_for(done: Result, site: Site) -> str | None:
    """The fix for a common error at the start of an image; None for other errors."""
    text = done.err
    for sign, hint in (
        ("executable file not found", f"the image has no {site.containers.python}: set containers.python"),
        ("squashfuse", "an ordinary user needs squashfuse on this machine, or Apptainer's setuid installation"),
        (
            "user namespace",
            "this machine lets no ordinary user make namespaces: ask for kernel.unprivileged_userns_clone=1",
        ),
        ("magic number", "the file is damaged: build or copy it again"),
        ("unsquash", "the file is damaged: build or copy it again"),
        ("mount source", "a folder that is to be bound is not on this machine"),
    ):
        if sign in text:
            return hint
    return None


Level = Literal["error", "warning", "good"]
_TRAINERS_NEED = ("numpy",)


class ImageFinding(msgspec.Struct, frozen=True):
    """Result of one check; an ``error`` would end a job."""

    level: Level
    about: str
    text: str
    fix: str | None = None


class ImageVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """Result of ``hpcjobs container check``."""

    image: str
    site: str
    facts: ImageFacts | None
    findings: tuple[ImageFinding, ...]

    @property
    def failed(self) -> bool:
        return any(finding.level == "error" for finding in self.findings)


def check(image: Image, site: Site, *, runner: Runner = run) -> ImageVerdict:
    """Start ``image`` here, inspect it, and compare it with ``site`` and this machine.

    Raises CommandMissingError: no runtime on this machine.
    """
    facts, findings = _inside(image, site, runner)
    return ImageVerdict(
        image=image.path, site=site.name, facts=facts, findings=(*_file(image), *findings, *_binds(site))
    )


def _inside(image: Image, site: Site, runner: Runner) -> tuple[ImageFacts | None, list[ImageFinding]]:
    """Facts about the image and their findings; only one finding if it does not start."""
    try:
        facts = look(site, image.path, runner=runner)
    except CommandMissingError:
        raise
    except HpcJobsError as error:
        return None, [ImageFinding("error", "start", error.message, error.hint)]
    starts = ImageFinding("good", "start", f"starts under {program_here(site)}, Python {facts.python}")
    fits = [*_package(image, site, runner), *_mpi(facts, site, runner), *_cuda(facts, runner)]
    return facts, [starts, *_python(facts), *fits]


def _file(image: Image) -> Iterator[ImageFinding]:
    path = Path(image.path)
    manifest: ImageManifest | None = read_manifest(path) if path.is_file() else None
    if manifest is None:
        yield ImageFinding(
            "warning", "file", "no record of how it was built", "hpcjobs container build makes one that has"
        )
    elif sha256(path) != manifest.sha256:
        yield ImageFinding(
            "error", "file", "damaged: its bytes are not those that were built", "build or copy it again"
        )
    else:
        yield ImageFinding("good", "file", f"as built on {manifest.build_host}, sha256 {manifest.sha256[:16]}...")


def _python(facts: ImageFacts) -> Iterator[ImageFinding]:
    if facts.python is not None and as_numbers(facts.python) < (3, 10):
        yield ImageFinding(
            "error", "python", f"Python {facts.python}", "hpcjobs needs 3.10 or later: another base image"
        )
    if facts.torch is None:
        yield ImageFinding("warning", "torch", "no torch: the trainers cannot run in it", "build the recipe pytorch")
    elif lacking := [name for name in _TRAINERS_NEED if name not in facts.packages]:
        names = " ".join(lacking)
        yield ImageFinding("error", "torch", f"the trainers need {names} too", f"pip install {names} in its recipe")
    else:
        yield ImageFinding("good", "torch", f"torch {facts.torch}")


def _package(image: Image, site: Site, runner: Runner) -> Iterator[ImageFinding]:
    """Whether the image's Python imports the part of hpcjobs that runs on nodes, bound from this machine."""
    source = Path(hpcjobs.__file__).resolve().parent
    arguments = ["env", f"PYTHONPATH={PACKAGE}", site.containers.python, "-c"]
    imports = "import hpcjobs.runtime.dist, hpcjobs.trainers.config"
    done = inside(site, image.path, [*arguments, imports], binds=(f"{source}:{PACKAGE}/hpcjobs:ro",), runner=runner)
    if done.code == 0:
        yield ImageFinding("good", "hpcjobs", f"{source} can be bound and imported")
    else:
        yield ImageFinding("error", "hpcjobs", f"{source}: {output_tail(done)}", hint_for(done, site))


def _mpi(facts: ImageFacts, site: Site, runner: Runner) -> Iterator[ImageFinding]:
    if facts.mpi is None:
        if facts.horovod is not None:
            yield ImageFinding("warning", "mpi", "Horovod without MPI", "--launcher horovod-gloo needs none")
        return
    kind = re.sub(r"_v\d+$", "", site.mpi) if site.mpi else None
    speaks = ", ".join(facts.pmi) or "no type of srun's"
    if kind is None:
        yield ImageFinding("warning", "mpi", f"{facts.mpi} speaks {speaks}; the site does not say its type", "set mpi")
    elif kind not in facts.pmi:
        yield ImageFinding(
            "error", "mpi", f"srun --mpi={site.mpi} of the site does not speak to {facts.mpi}, which speaks {speaks}",
            f"mpi: {facts.pmi[0]} in the site file if the cluster has it" if facts.pmi
            else "build MPI with PMIx (the recipe horovod_cpu does), or --launcher horovod-gloo",
        )  # fmt: skip
    else:
        pmix = f", PMIx {facts.pmix}" if facts.pmix else ""
        yield ImageFinding("good", "mpi", f"{facts.mpi}{pmix} and srun --mpi={site.mpi}")
    if kind is not None and site.kind.runs_steps:
        yield from _check_mpi_type(site, runner)


def _check_mpi_type(site: Site, runner: Runner) -> Iterator[ImageFinding]:
    """Whether this machine's srun has the site's MPI type."""
    try:
        done = runner(["timeout", "20", *list_mpi_types()], env=cluster_env(site.slurm_conf))
    except CommandMissingError:
        return
    arguments = set(re.findall(r"^\s*(?:srun: )?(\w+)\s*$|(pmix_v\d+)", done.out + done.err, re.MULTILINE))
    offered = {name for pair in arguments for name in pair if name}
    if done.code != 0 or not offered:
        yield ImageFinding(
            "warning", "mpi", "no srun answers here: what types it has is not known", "check on a login node"
        )
    elif site.mpi not in offered:
        known = ", ".join(sorted(offered))
        yield ImageFinding("error", "mpi", f"srun here has no type {site.mpi}: it has {known}", "mpi in the site file")


def _cuda(facts: ImageFacts, runner: Runner) -> Iterator[ImageFinding]:
    least = least_driver(facts.cuda) if facts.cuda else None
    if least is None:
        return
    try:
        versions = runner(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]).out.split()
    except CommandMissingError:
        versions = []
    if not versions:
        text = f"CUDA {facts.cuda} needs driver {least} or later; this machine has none"
        yield ImageFinding("warning", "cuda", text, "check on a GPU node; a job looks before it starts")
    elif as_numbers(versions[0]) < as_numbers(least):
        text = f"CUDA {facts.cuda} needs driver {least} or later; this machine has {versions[0]}"
        yield ImageFinding("error", "cuda", text, "an image with an older CUDA, or a newer driver on the nodes")
    else:
        yield ImageFinding("good", "cuda", f"CUDA {facts.cuda} and driver {versions[0]}")


def _binds(site: Site) -> Iterator[ImageFinding]:
    for text in site.containers.binds:
        try:
            source = Path(expand_path(text, site, "containers.binds").split(":")[0])
            missing = not source.exists()
        except PermissionError:
            missing = True
        if missing:
            yield ImageFinding(
                "warning", "binds", f"{source} is not here", "on a node without it a job ends at its start"
            )
        else:
            yield ImageFinding("good", "binds", str(source))
