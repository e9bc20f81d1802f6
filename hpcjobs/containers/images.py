"""Finds images by name or path with the record of their build, and recipes (``.def``) that they are built from."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import struct
from collections.abc import Iterator, Mapping
from glob import glob
from itertools import islice
from pathlib import Path
from string import Template
from typing import NamedTuple

import msgspec

from hpcjobs.data import data_folder
from hpcjobs.errors import ConfigError, RequestError, nearest, reason_of
from hpcjobs.files import read_regular
from hpcjobs.site.checks import Frozen, Moment
from hpcjobs.site.models import Containers, Site
from hpcjobs.site.trust import is_project_folder, is_trusted, refusal_of_file, was_trusted

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

    Raises ConfigError: no SIF file, shorter than its header states, or without a root file system at its place.
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

    Raises RequestError: a variable is not set here.
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

    Raises RequestError: the site runs no images, or has none of this name. ConfigError: its file is missing,
    unreadable, no image, or not whole.
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
            hint=f"hpcjobs container build {_recipe_of(name)} --site {shlex.quote(site.name)}"
            f" builds one from a recipe; {nearest(name, images)}",
        )
    return _at(name, images[name], site.containers)


def read_manifest(image: Path) -> ImageManifest | None:
    """The manifest of ``image``; None without one, or if it belongs to another build.

    Raises ConfigError: the record cannot be read.
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


def _recipe_of(name: str) -> str:
    """The recipe of image ``name`` as a word of a command; RECIPE where there is none, or it would be an option."""
    return shlex.quote(name) if name in recipes() and not name.startswith("-") else "RECIPE"


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
            f"container {name}: there is no file {path}", hint=f"hpcjobs container build {_recipe_of(name)}"
        ) from error
    except OSError as error:
        raise ConfigError(f"container {name}: {path} cannot be read: {error.strerror}") from error


RECIPE_SUFFIX = ".def"
_SECTION = re.compile(r"%(\w+)(?:\s+(from)\b)?")
_RECIPE_HEADER = re.compile(r"(?i)\s*(bootstrap|from)\s*:\s*(\S+)")
_VARIABLE = re.compile(r"\{\{\s*(\w+)\s*\}\}")
_REMOTE = frozenset(("docker", "library", "shub", "oras", "docker-daemon"))
"""Kinds of ``Bootstrap:`` that do not read ``From:`` as a local file."""


class Recipe(NamedTuple):
    """The content of a recipe file."""

    name: str
    path: Path
    text: str
    arguments: dict[str, str]
    """Name -> default, of its ``%arguments``."""
    about: str
    """The comment at its head."""

    @property
    def files(self) -> list[Path]:
        """Absolute paths of the local files that ``From:`` and ``%files`` take in, with the arguments' defaults.

        Raises ConfigError: there are too many.
        """
        return _list_files(self, self.arguments)


_MOST_FILES = 10_000


def recipe_folders() -> tuple[Path, ...]:
    """Folders searched for ``NAME.def``, first match wins: here, and shipped."""
    return (Path.cwd() / "containers", data_folder("containers"))


def recipes() -> dict[str, Path]:
    """Every recipe by its name."""
    by_name: dict[str, Path] = {}
    for folder in recipe_folders():
        for path in sorted(folder.glob(f"*{RECIPE_SUFFIX}")):
            by_name.setdefault(path.stem, path)
    return by_name


def project_recipes() -> tuple[Path, ...]:
    """The recipes of the current folder, which a command that names them builds only where they are trusted."""
    folder, *others = recipe_folders()
    return tuple(sorted(folder.glob(f"*{RECIPE_SUFFIX}"))) if is_project_folder(folder, *others) else ()


def find_recipe(name: str) -> Recipe:
    """The recipe called ``name``, or in the file ``name``, to be built.

    A file that is named by its path need not be trusted.

    Raises RequestError: no such recipe. ConfigError: it cannot be read, or belongs to a project and is not trusted.
    """
    recipe = read_recipe(name)
    if _is_path(name) or recipe.path not in project_recipes():
        return recipe
    # What it takes in may be without an end, and is read only where some content was trusted.
    if was_trusted(recipe.path) and is_trusted(recipe.path, recipe_content(recipe)):
        return recipe
    raise refusal_of_file("recipe", recipe.path)


def recipe_content(recipe: Recipe) -> str:
    """The content of a recipe that is trusted: its text, and the images and files that it takes in."""
    files = (f"\0{path}\0{_sum_file(recipe, path) if path.is_file() else ''}" for path in recipe.files)
    return recipe.text + "".join(files)


def _sum_file(recipe: Recipe, path: Path) -> str:
    try:
        return sha256(path)
    except OSError as error:
        raise ConfigError(f"recipe {recipe.path}: {path} cannot be read: {reason_of(error)}") from error


def _is_path(name: str) -> bool:
    return "/" in name or name.endswith(RECIPE_SUFFIX)


def read_recipe(name: str) -> Recipe:
    """The recipe called ``name``, or in the file ``name`` (anything with a ``/`` or ``.def``).

    Raises RequestError: no recipe of this name. ConfigError: it cannot be read.
    """
    path = Path(name).expanduser().absolute() if _is_path(name) else recipes().get(name)
    if path is None:
        looked = "".join(f"\n  {folder}" for folder in dict.fromkeys(recipe_folders()))
        raise RequestError(f"no recipe {name!r}; looked in{looked}", hint=nearest(name, recipes()))
    try:
        text = read_regular(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"recipe {path}: cannot be read: {reason_of(error)}") from error
    sections = _sections(text)
    arguments = _arguments(path, sections)
    about = " ".join(line.lstrip("# ") for line in text.split("\n\n")[0].splitlines() if line.startswith("#"))
    return Recipe(path.stem, path, text, arguments, about)


def resolve_arguments(recipe: Recipe, given: Mapping[str, str]) -> dict[str, str]:
    """The recipe's arguments with the given ones in place of its defaults.

    Raises RequestError: the recipe has no such argument, or Apptainer's templates cannot hold a value.
    """
    for name, value in given.items():
        if name not in recipe.arguments:
            raise RequestError(f"recipe {recipe.path} has no argument {name!r}", hint=nearest(name, recipe.arguments))
        if any(ord(char) < 32 for char in value) or "{{" in value or "}}" in value:
            raise RequestError(
                f"argument {name}={value!r}: neither control characters nor braces can stand in a recipe"
            )
    return {**recipe.arguments, **given}


def recipe_hash(recipe: Recipe, arguments: Mapping[str, str], base_digest: str | None) -> str:
    """The hash of an image's known inputs: recipe, arguments, files taken in, base.

    Raises ConfigError: a file that the recipe takes in is not there.
    """
    digest = hashlib.sha256(recipe.text.encode())
    for name in sorted(arguments):
        digest.update(f"\0{name}={arguments[name]}".encode())
    base = recipe.path.parent / arguments.get("base", "")  # base_digest covers it
    for path in _list_files(recipe, arguments):
        if "base" in arguments and path.is_relative_to(base):
            continue
        if not path.is_file():
            raise ConfigError(f"recipe {recipe.path}: there is no file {path}")
        digest.update(f"\0{path.name}\0{_sum_file(recipe, path)}".encode())
    digest.update(f"\0{base_digest}".encode())
    return digest.hexdigest()[:16]


def _list_files(recipe: Recipe, arguments: Mapping[str, str]) -> list[Path]:
    """The local files that a build takes in; missing files too. Raises ConfigError: there are too many."""
    files = list(islice(_find_files(recipe.path.parent, recipe.text, arguments), _MOST_FILES))
    if len(files) == _MOST_FILES:
        raise ConfigError(
            f"recipe {recipe.path} takes in {_MOST_FILES:,} files or more, such as {files[-1]}",
            hint="put them into a tar file, or let the recipe fetch them in %post",
        )
    return files


def _find_files(folder: Path, text: str, arguments: Mapping[str, str]) -> Iterator[Path]:
    filled = _VARIABLE.sub(lambda match: arguments.get(match[1], match[0]), text)
    bootstrap = ""
    for line in filled.splitlines():
        if (header := _RECIPE_HEADER.match(line)) is None:
            continue
        if header[1].lower() == "bootstrap":
            bootstrap = header[2].lower()
        elif bootstrap not in _REMOTE:
            image = folder / Path(header[2]).expanduser()
            yield from _files_below(image if image.exists() else folder / header[2].partition(":")[0])  # FILE:TAG
    for line in _sections(filled).get("files", ()):
        try:
            source = shlex.split(line)[0]
        except ValueError:  # a quotation that is not closed
            source = line.split()[0]
        for name in sorted(glob(source, root_dir=folder)) or [source]:
            yield from _files_below(folder / name)


def _files_below(path: Path) -> Iterator[Path]:
    """``path``, or all files in it: links are followed, each folder is visited once."""
    if not path.is_dir():
        yield path
        return
    visited = set()
    for parent, folders, names in os.walk(path, followlinks=True):
        visited.add(os.path.realpath(parent))
        folders[:] = sorted(name for name in folders if os.path.realpath(Path(parent, name)) not in visited)
        yield from (Path(parent, name) for name in sorted(names))


def _sections(text: str) -> dict[str, list[str]]:
    """The lines of each section that hold something."""
    sections: dict[str, list[str]] = {}
    lines: list[str] | None = None
    for line in text.splitlines():
        if match := _SECTION.match(line):
            lines = sections.setdefault(match[1], []) if match[2] is None else None  # of another stage
        elif lines is not None and line.strip() and not line.lstrip().startswith("#"):
            lines.append(line.strip())
    return sections


def _arguments(path: Path, sections: Mapping[str, list[str]]) -> dict[str, str]:
    arguments = {}
    for line in sections.get("arguments", ()):
        name, equals, value = line.partition("=")
        if not equals or not name.isidentifier():
            raise ConfigError(f"recipe {path}: %arguments: {line!r} is not NAME=VALUE")
        arguments[name] = value.strip('"')
    return arguments
