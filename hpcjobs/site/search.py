"""Lists where site files are looked for: folders in order, each of one layer."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from hpcjobs.data import data_folder
from hpcjobs.errors import ConfigError, nearest, reason_of
from hpcjobs.files import config_dir

Layer = Literal["project", "user", "centre", "example", "gallery"]
"""Whose site file it is; hpcjobs ships examples, and the gallery of public systems, to be extended or copied."""
SHIPPED: tuple[Layer, ...] = ("example", "gallery")
FOLDER = "site_configs"


class SiteEntry(NamedTuple):
    """A site file on the search path; ``shadowed`` when an earlier folder has one of the same name."""

    name: str
    path: Path
    shadowed: bool
    layer: Layer


def search_path() -> tuple[Path, ...]:
    """Folders searched for ``NAME.yaml``, first match wins: here, the user's, the centre's, those shipped."""
    return tuple(folder for folder, _ in _layers())


def _layers() -> list[tuple[Path, Layer]]:
    """The folders with their layers; a path in HPCJOBS_SITE_PATH or XDG_CONFIG_DIRS that is not absolute is ignored.

    No variable hides /etc/xdg, the folder of the centre's policies. HPCJOBS_USER_SITES names the folders that a
    laptop has sent: its user's files come before the files of this host.
    """
    sent = [Path(text) for text in os.environ.get("HPCJOBS_USER_SITES", "").split(os.pathsep)]
    named = os.environ.get("HPCJOBS_SITE_PATH", "").split(os.pathsep)
    system = [*os.environ.get("XDG_CONFIG_DIRS", "").split(os.pathsep), "/etc/xdg"]
    centre = [Path(text) for text in named] + [Path(text) / "hpcjobs" / FOLDER for text in system if text]
    layers: list[tuple[Path, Layer]] = [
        (Path.cwd() / FOLDER, "project"),
        *((folder, "user") for folder in sent if folder.is_absolute()),
        (config_dir() / FOLDER, "user"),
        *((folder, "centre") for folder in centre if folder.is_absolute()),
        (data_folder("site_configs"), "example"),
        (gallery_folder(), "gallery"),
    ]
    return layers


def gallery_folder() -> Path:
    """Site files of public systems, written from their public documentation."""
    return data_folder("site_configs") / "gallery"


def list_sites() -> list[SiteEntry]:
    """Every site file on the search path, in search order."""
    seen: set[str] = set()
    entries = []
    for path, layer in _site_files():
        entries.append(SiteEntry(path.stem, path, path.stem in seen, layer))
        seen.add(path.stem)
    return entries


def site_files(layer: Layer) -> list[Path]:
    """The site files of one layer, in search order."""
    return [path for path, its_layer in _site_files() if its_layer == layer]


def _site_files() -> Iterator[tuple[Path, Layer]]:
    for folder, layer in _folders().items():
        yield from ((path, layer) for path in sorted(folder.glob("*.yaml")))


def _folders() -> dict[Path, Layer]:
    """The folders with links resolved, each once at its first place, with the last of its layers.

    So a checkout of hpcjobs does not count as a project, and the centre's folder stays the centre's for a user in it.
    """
    return {Path(os.path.realpath(folder)): layer for folder, layer in _layers()}


def list_centre_files() -> list[Path]:
    """The files of the centre's folders, shadowed ones too.

    Raises ConfigError: a folder is there and cannot be read: a policy in it would not hold.
    """
    for folder, layer in _layers():
        if layer != "centre":
            continue
        try:
            os.scandir(folder).close()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise ConfigError(
                f"the centre's folder {folder} cannot be read: {reason_of(error)}",
                hint="its policies hold for every user: those who run the cluster make it readable (chmod -R a+rX)",
            ) from error
    return site_files("centre")


def layer_of(path: Path) -> Layer | None:
    """Return the layer of a site file; None: the path was given by the user and is in no folder of site files.

    A folder ``site_configs`` that is not the user's, the centre's or shipped belongs to some project.
    """
    folder = Path(os.path.realpath(path.parent))
    return _folders().get(folder) or ("project" if folder.name == FOLDER else None)


def find_file(name: str) -> Path:
    """The file of the site ``name``, or the file at that path (anything with a ``/`` or ``.yaml``).

    Raises ConfigError: no such file.
    """
    if "/" in name or name.endswith((".yaml", ".yml")):
        path = Path(name).expanduser().absolute()
        if not os.path.isfile(path):
            what = "is a folder, not a file" if path.is_dir() else "does not exist"
            raise ConfigError(f"site file {path} {what}")
        return path
    if (file := _first_file(name, search_path())) is not None:
        return file
    known = {entry.name for entry in list_sites()}
    raise ConfigError(f"no site {name!r}; looked in{_one_a_line(search_path())}", hint=nearest(name, known))


def find_parent(name: str, child: Path) -> Path:
    """The file that ``extends: NAME`` of the file ``child`` means: in its folder, then in the layers below.

    Never in a layer above: a project changes no site of the user's or the centre's. A file of the same name
    as ``child`` is the next one that it shadows.

    Raises ConfigError: no such file.
    """
    folders = search_path()
    own = Path(os.path.realpath(child.parent))
    at = next((at for at, folder in enumerate(folders) if Path(os.path.realpath(folder)) == own), None)
    below = [child.parent, *folders[1:]] if at is None else list(folders[at:])
    if (file := _first_file(name, below, other_than=child)) is not None:
        return file
    known = {path.stem for folder in below for path in folder.glob("*.yaml")} - {child.stem}
    raise ConfigError(f"extends: no site {name!r}; looked in{_one_a_line(below)}", hint=nearest(name, known))


def _one_a_line(folders: Iterable[Path]) -> str:
    """The folders for a message, each once."""
    return "".join(f"\n  {folder}" for folder in dict.fromkeys(folders))


def _first_file(name: str, folders: Iterable[Path], *, other_than: Path | None = None) -> Path | None:
    for folder in folders:
        path = folder / f"{name}.yaml"
        if os.path.isfile(path) and not (other_than is not None and path.samefile(other_than)):
            return path
    return None
