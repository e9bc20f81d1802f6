"""Resolves the image of a job's program, and the folders of the machine that are visible in it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

import hpcjobs
from hpcjobs.containers.images import Image, expand_path, find
from hpcjobs.containers.look import PACKAGE, least_driver, program_there
from hpcjobs.errors import RequestError
from hpcjobs.job.models import Bind, Inside
from hpcjobs.site.models import Site

NONE = "none"
_LAUNCHERS = {"pyxis": ("srun", "torchrun")}
_NOT = {"horovodrun": "it starts its tasks by ssh, out of the image"}


class ImageRequest(NamedTuple):
    """The requested image, and where the request was read."""

    name: str
    source: str
    stage: bool


def resolve_container(
    request: ImageRequest, site: Site, *, launcher: str, gpus: bool, folders: tuple[Path, ...]
) -> Inside:
    """Return the image with all visible folders; ``folders`` (run and code) keep their own paths.

    Raises:
        RequestError: no such image here, a launcher that cannot start it, a path that no bind can say.
        ConfigError: the image's file is missing or broken.
    """
    containers = site.containers
    image = find(request.name, site, source=request.source)
    if any(ord(char) < 32 for char in image.path):
        raise RequestError(
            f"container {request.name!r} ({request.source}): no path of an image holds control characters"
        )
    _check_launcher(launcher, site)
    if request.stage and (not site.kind.has_nodes or containers.runtime == "pyxis"):
        why = "has pyxis, which keeps its own copies" if site.kind.has_nodes else "is one machine"
        raise RequestError(f"--stage-image: site {site.name} ({site.path}) {why}", hint="leave it out")
    gpu = containers.gpu or ("nv" if gpus else "none")
    return Inside(
        runtime=containers.runtime,
        program=program_there(site),
        name=image.name,
        image=image.path,
        fingerprint=image.fingerprint,
        binds=_binds(site, folders),
        gpu=None if gpu == "none" else gpu,
        clean_env=containers.clean_env,
        home=containers.home,
        args=containers.args,
        stage=containers.stage if request.stage else None,
        scratch=_on_the_node(site.scratch) if site.scratch else None,
        driver=_driver(image, gpu=gpu),
        package_folder=PACKAGE,
    )


def _check_launcher(launcher: str, site: Site) -> None:
    runtime = site.containers.runtime
    allowed = _LAUNCHERS.get(runtime)
    if launcher in _NOT:
        raise RequestError(f"launcher {launcher} and a container: {_NOT[launcher]}", hint="use --launcher horovod-gloo")
    if allowed is not None and launcher not in allowed:
        raise RequestError(
            f"launcher {launcher} and a container: {runtime} of site {site.name} ({site.path}) works by srun alone",
            hint=f"use --launcher {' or '.join(allowed)}",
        )


def _binds(site: Site, folders: tuple[Path, ...]) -> tuple[Bind, ...]:
    binds = [Bind(str(Path(hpcjobs.__file__).resolve().parent), f"{PACKAGE}/hpcjobs", "ro")]
    for text in site.containers.binds:
        source, _, rest = expand_path(text, site, "containers.binds").partition(":")
        target, _, mode = rest.partition(":")
        binds.append(Bind(source, target or source, mode or "rw"))
    outermost = [one for one in folders if not any(one != other and one.is_relative_to(other) for other in folders)]
    binds += [Bind(str(folder), str(folder), "rw") for folder in dict.fromkeys(outermost)]
    if odd := [path for bind in binds for path in (bind.source, bind.target) if re.search(r"[:,\x00-\x1f]", path)]:
        raise RequestError(
            f"{odd[0]!r}: a path with a colon, a comma or a control character cannot be seen in an image"
        )
    return tuple(binds)


def _on_the_node(text: str) -> str:
    """Quote ``text`` for a shell, except plain ``$VARIABLES``."""
    parts = re.split(r"(\$\w+|\$\{\w+\})", text)
    return "".join(
        f'"{part}"' if number % 2 else (shlex.quote(part) if part else "") for number, part in enumerate(parts)
    )


def _driver(image: Image, *, gpu: str) -> str | None:
    """The oldest NVIDIA driver that the CUDA of this image works with."""
    cuda = image.facts.cuda if image.facts else None
    return least_driver(cuda) if cuda and gpu == "nv" else None
