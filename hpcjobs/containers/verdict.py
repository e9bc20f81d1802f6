"""Checks whether an image fits a site before a job is queued; each problem comes with a fix."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

import hpcjobs
from hpcjobs.containers.images import Image, ImageFacts, ImageManifest, expand_path, read_manifest, sha256
from hpcjobs.containers.look import PACKAGE, as_numbers, hint_for, inside, least_driver, look, output_tail, program_here
from hpcjobs.errors import CommandMissingError, HpcJobsError
from hpcjobs.processes.programs import Runner, run
from hpcjobs.site.models import Site
from hpcjobs.slurm_commands import cluster_env, list_mpi_types

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

    Raises:
        CommandMissingError: no runtime on this machine.
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
    imports = "import hpcjobs.runtime.dist, hpcjobs.trainers.commandline.config"
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
