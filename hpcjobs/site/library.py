"""Where site files are found, and the user's own settings."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from hpcjobs.data import shipped
from hpcjobs.errors import ConfigError, nearest
from hpcjobs.files import config_dir
from hpcjobs.site import rehearsal
from hpcjobs.site.cluster_name import cluster_name
from hpcjobs.site.login_node import slurm_is_here
from hpcjobs.site.models import Frozen, Site
from hpcjobs.site.yaml_file import read_yaml

Layer = Literal["project", "user", "centre", "example"]
"""Whose site file it is; examples are those that hpcjobs ships."""


class UserConfig(Frozen, frozen=True):
    """``~/.config/hpcjobs/config.yaml``."""

    site: str | None = None
    """Site used when neither ``--site`` nor HPCJOBS_SITE says one."""


class SiteEntry(NamedTuple):
    """A site file on the search path; ``shadowed`` when an earlier folder has one of the same name."""

    name: str
    path: Path
    shadowed: bool
    layer: Layer


def search_path() -> tuple[Path, ...]:
    """Folders searched for ``NAME.yaml``, first match wins: here, the user's, the centre's, shipped."""
    return tuple(folder for folder, _ in _layers())


def _layers() -> list[tuple[Path, Layer]]:
    """The folders with their layers; a path in HPCJOBS_SITE_PATH or XDG_CONFIG_DIRS that is not absolute is ignored."""
    named = os.environ.get("HPCJOBS_SITE_PATH", "").split(os.pathsep)
    system = (os.environ.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(os.pathsep)
    centre = [Path(text) for text in named] + [Path(text) / "hpcjobs" / "site_configs" for text in system]
    return [
        (Path.cwd() / "site_configs", "project"),
        (config_dir() / "site_configs", "user"),
        *((folder, "centre") for folder in centre if folder.is_absolute()),
        (shipped("site_configs"), "example"),
    ]


def list_sites() -> list[SiteEntry]:
    """Every site file on the search path, in search order."""
    seen: set[str] = set()
    entries = []
    for path, layer in _site_files():
        entries.append(SiteEntry(path.stem, path, path.stem in seen, layer))
        seen.add(path.stem)
    return entries


def _site_files() -> Iterator[tuple[Path, Layer]]:
    folders: dict[Path, Layer] = {}
    for folder, layer in _layers():
        folders.setdefault(folder.resolve(), layer)
    folders |= {folder: "example" for folder in folders if folder == shipped("site_configs").resolve()}
    for folder, layer in folders.items():
        yield from ((path, layer) for path in sorted(folder.glob("*.yaml")))


def default_site() -> str:
    """The site of a command that names none: see `find_default_site`.

    Raises:
        ConfigError: this is a login node, and nobody says of which site: a training has no place here.
    """
    if (name := find_default_site()) is not None:
        return name
    cluster = cluster_name(os.environ.get("SLURM_CONF"))
    where = f"the Slurm cluster {cluster}" if cluster else "a Slurm cluster"
    raise ConfigError(
        f"this machine belongs to {where}, and no site is named",
        hint=f"say --site NAME, set HPCJOBS_SITE, write `site: NAME` to {config_dir() / 'config.yaml'}, "
        f"or `cluster: {cluster or 'NAME'}` (Slurm's ClusterName) to the site's file; "
        "`hpcjobs sites` lists the sites, --site local runs on this machine itself",
    )


def find_default_site() -> str | None:
    """HPCJOBS_SITE, else the user's config; else ``local``, or on a machine with a Slurm the site it must be.

    That is the sandbox's while SLURM_CONF names the sandbox. Of the Slurm sites that the user has files for it is the
    one whose `cluster` is this machine's, else the only one that states no `cluster`; None: there is none, or several.
    """
    if name := os.environ.get("HPCJOBS_SITE"):
        return _existing(name, "HPCJOBS_SITE")
    config = config_dir() / "config.yaml"
    if config.is_file() and (name := read_yaml(config, UserConfig).site):
        return _existing(name, str(config))
    if not slurm_is_here():
        return "local"
    if os.environ.get("SLURM_CONF") and (sandbox := rehearsal.current()) is not None:
        return sandbox.site
    own = [
        entry for entry in list_sites() if not entry.shadowed and entry.path.parent != shipped("site_configs").resolve()
    ]
    sites = {str(entry.path): read_yaml(entry.path, Site) for entry in own}
    stated = {path: site.cluster for path, site in sites.items() if site.scheduler == "slurm"}
    here = cluster_name(os.environ.get("SLURM_CONF")) if any(stated.values()) else None
    matching = [path for path, cluster in stated.items() if cluster is not None and cluster.lower() == here]
    candidates = matching or [path for path, cluster in stated.items() if cluster is None]
    return candidates[0] if len(candidates) == 1 else None


def _existing(name: str, where: str) -> str:
    """``name``, which was read at ``where``, if there is such a site."""
    try:
        _path_of(name)
    except ConfigError as error:
        raise ConfigError(f"{error.message} (named by {where})", hint=error.hint) from error
    return name


def load_site(name: str) -> Site:
    """The site called ``name``, or the site file at that path (anything with a ``/`` or ``.yaml``).

    While a sandbox shaped like the site is up, the site is the rehearsal of it: the same partitions
    and limits, run by the sandbox's Slurm with this machine's software.

    Raises:
        ConfigError: no such site, or its file is wrong.
    """
    path = _path_of(name)
    site = read_yaml(path, Site)
    if site.name not in ("", path.stem) or site.path or site.rehearsal:
        raise ConfigError(f"{path}: the file's stem is the site's name; leave name, path and rehearsal out")
    site = msgspec.structs.replace(site, name=path.stem, path=str(path))
    return rehearsal.apply_overlay(site)


def _path_of(name: str) -> Path:
    if "/" in name or name.endswith((".yaml", ".yml")):
        path = Path(name).expanduser().absolute()
        if not os.path.isfile(path):
            what = "is a folder, not a file" if path.is_dir() else "does not exist"
            raise ConfigError(f"site file {path} {what}")
        return path
    for folder in search_path():
        path = folder / f"{name}.yaml"
        if os.path.isfile(path):
            return path
    known = {entry.name for entry in list_sites()}
    looked = ", ".join(str(folder) for folder in search_path())
    raise ConfigError(f"no site {name!r} in {looked}", hint=nearest(name, known))
