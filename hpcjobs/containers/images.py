"""Finds an image by its name or path, and reads the record of its build."""

from __future__ import annotations

import hashlib
import os
import struct
from pathlib import Path
from string import Template
from typing import NamedTuple

import msgspec

from hpcjobs.errors import ConfigError, RequestError, nearest
from hpcjobs.site.checks import Frozen, Moment
from hpcjobs.site.models import Containers, Site

MAGIC = b"SIF_MAGIC\0"
_HEADER = struct.Struct("<32s10s3s3s16s8q")
"""Launch line, magic, version, architecture, id, made, changed, free and all descriptors, then offset and size of
descriptors and of data."""
_DESCRIPTOR = struct.Struct("<i?IIIqqqqqqq128s384s")
_PARTITION, _SQUASHFS = 0x4004, b"hsqs"
_HEAD_BYTES = 64 << 10
"""Bytes at the beginning that differ between any two builds: the header's id and times, the table of contents."""


def check_whole(path: Path) -> None:
    """Refuse a file that no runtime could start.

    Raises:
        ConfigError: no SIF file, shorter than its header states, or without a root file system at its place.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(_HEADER.size)
        if len(head) < _HEADER.size or head[32:42] != MAGIC:
            raise ConfigError(f"image {path}: no SIF file; it begins with {head[:16]!r}", hint="build or copy it again")
        *_, count, table, table_size, data, data_size = _HEADER.unpack(head)
        if size < max(table + table_size, data + data_size):
            raise ConfigError(
                f"image {path}: cut off: {data + data_size:,} bytes by its own header, {size:,} are there",
                hint="the copy or the build did not come to its end: do it again",
            )
        file.seek(table)
        entries = file.read(min(count, 256) * _DESCRIPTOR.size)
        for entry in _DESCRIPTOR.iter_unpack(entries[: len(entries) // _DESCRIPTOR.size * _DESCRIPTOR.size]):
            kind, used, offset = entry[0], entry[1], entry[5]
            if used and kind == _PARTITION:
                file.seek(offset)
                if file.read(4) == _SQUASHFS:
                    return
    raise ConfigError(f"image {path}: damaged: no squashfs file system is where its table says", hint="build it again")


def fingerprint(path: Path) -> str:
    """Identifier of one build of an image, 16 hex digits, without reading gigabytes.

    Hash of the size and the first 64 KiB: the header with the image's id and times, the table with each part's times.
    The job script computes the same by stat, head and sha256sum.
    """
    with path.open("rb") as file:
        head = f"{os.fstat(file.fileno()).st_size}\n".encode() + file.read(_HEAD_BYTES)
    return hashlib.sha256(head).hexdigest()[:16]


def sha256(path: Path) -> str:
    """The SHA-256 of the whole file, 64 hex digits."""
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


SUFFIX = ".sif"


class ImageFacts(Frozen, frozen=True):
    """Versions of the software in an image; None: not installed."""

    python: str | None = None
    torch: str | None = None
    cuda: str | None = None
    """Version of CUDA that torch was built with."""
    rocm: str | None = None
    horovod: str | None = None
    mpi: str | None = None
    """Family and version: ``openmpi 4.1.4``, ``mpich 4.2.0``."""
    pmi: tuple[str, ...] = ()
    """The types of ``srun --mpi`` that this MPI understands."""
    pmix: str | None = None
    glibc: str | None = None
    packages: dict[str, str] = {}
    """Version by name, of the packages that `probe` looks for."""


class ImageManifest(Frozen, frozen=True):
    """Record of a build: ``NAME.sif.json`` in the folder of the image."""

    schema: int
    name: str
    recipe: str
    """File it was built from."""
    recipe_hash: str
    """Hash of the recipe, its arguments, the files it takes in and the base."""
    arguments: dict[str, str]
    base: str
    base_digest: str | None
    """SHA-256 of a local base, or the digest in the reference to a registry; None: unknown."""
    build_host: str
    built: Moment
    """Seconds since 1970."""
    took_s: float
    runtime: str
    """Version of the runtime that built the image."""
    size: int
    fingerprint: str
    sha256: str
    facts: ImageFacts


class Image(NamedTuple):
    """An image that was requested by name or path."""

    name: str
    path: str
    """Absolute path; with pyxis also a reference that enroot imports."""
    fingerprint: str | None
    """None: no file."""
    facts: ImageFacts | None
    """None: not recorded."""


def expand_path(text: str, site: Site, what: str) -> str:
    """``text`` with ``~`` and ``$VARIABLES`` of this process.

    Raises:
        RequestError: a variable is not set here.
    """
    expanded_text = Template(os.path.expanduser(text)).safe_substitute(os.environ)
    if "$" in expanded_text:
        raise RequestError(f"{what} {text!r} of site {site.name} ({site.path}): variable not set here")
    return expanded_text


def folder_of(site: Site) -> Path:
    """The site's folder of images."""
    return Path(expand_path(site.containers.folder, site, "containers.folder"))


def known(site: Site) -> dict[str, str]:
    """Name -> file of every image that the site file names or its folder holds."""
    folder = folder_of(site)
    built = {path.name.removesuffix(SUFFIX): str(path) for path in sorted(folder.glob(f"*{SUFFIX}"))}
    named = {
        name: expand_path(path, site, f"containers.images.{name}") for name, path in site.containers.images.items()
    }
    return built | {name: path if _is_reference(path) else str(folder / path) for name, path in named.items()}


def find(name: str, site: Site, *, source: str) -> Image:
    """The image called ``name``, or at that path (anything with a ``/`` or ``.sif``); ``source``: who asks for it.

    Raises:
        RequestError: the site runs no images, or has none of this name. ConfigError: its file is missing, unreadable,
            no image, or not whole.
    """
    if site.containers.runtime == "none":
        raise RequestError(
            f"container {name!r} ({source}): site {site.name} ({site.path}) says no runtime",
            hint="containers: {runtime: apptainer} in the site file, or singularity, or pyxis",
        )
    if "/" in name or name.endswith((SUFFIX, ".sqsh")):
        return _at(name, str(Path(name).expanduser().absolute()) if not _is_reference(name) else name, site.containers)
    images = known(site)
    if name not in images:
        raise RequestError(
            f"container {name!r} ({source}) is no image of site {site.name} ({site.path}), nor in {folder_of(site)}",
            hint=f"hpcjobs container build {name} --site {site.name} builds one from a recipe; {nearest(name, images)}",
        )
    return _at(name, images[name], site.containers)


def read_manifest(image: Path) -> ImageManifest | None:
    """The manifest of ``image``; None without one, or if it belongs to another build.

    Raises:
        ConfigError: the record cannot be read.
    """
    path = manifest_path(image)
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=ImageManifest)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path}: {error}", hint="delete it: the next build writes it anew") from error
    return manifest if image.is_file() and manifest.fingerprint == fingerprint(image) else None


def manifest_path(image: Path) -> Path:
    return image.with_name(f"{image.name}.json")


def _is_reference(path: str) -> bool:
    """Whether enroot has to fetch it (``nvcr.io#nvidia/pytorch:24.12``, ``docker://...``)."""
    return "#" in path or "://" in path


def _at(name: str, path: str, containers: Containers) -> Image:
    if _is_reference(path):
        if containers.runtime != "pyxis":
            raise RequestError(
                f"container {name}: {path} would be fetched and converted by every task",
                hint="hpcjobs container build makes an image of it once",
            )
        return Image(name, path, None, None)
    file = Path(path)
    try:
        if file.is_dir() and containers.runtime != "pyxis":
            return Image(name, path, None, None)
        if containers.runtime != "pyxis":
            check_whole(file)
        manifest = read_manifest(file)
        return Image(name, path, fingerprint(file), manifest.facts if manifest else None)
    except FileNotFoundError as error:
        raise ConfigError(
            f"container {name}: there is no file {path}", hint=f"hpcjobs container build {name}"
        ) from error
    except OSError as error:
        raise ConfigError(f"container {name}: {path} cannot be read: {error.strerror}") from error
