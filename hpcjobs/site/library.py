"""Sites by name, the site of a command that names none (by the project file, too), and the user's own settings."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from hpcjobs.errors import ConfigError, HpcJobsWarning
from hpcjobs.files import config_dir, leads_elsewhere
from hpcjobs.scheduler_kind import CLUSTER, find_kind
from hpcjobs.site.checks import Frozen
from hpcjobs.site.machine import (
    EVERY_CLUSTER,
    apply_overlay,
    cluster_name,
    current_sandbox,
    named_clusters,
    slurm_is_here,
)
from hpcjobs.site.models import OF_THE_LOADER, AppliedPolicy, Policy, Site
from hpcjobs.site.partition import describe_nodes
from hpcjobs.site.resources import option_of
from hpcjobs.site.search import SHIPPED, Layer, SiteEntry, find_file, layer_of, list_centre_files, list_sites
from hpcjobs.site.trust import is_trusted, list_untrusted, refusal
from hpcjobs.site.yaml_file import (
    YamlFile,
    convert_tree,
    merge_trees,
    read_chain,
    read_file,
    read_yaml,
    where_of,
    words_of_switches,
)

PROJECT_FILE = "hpcjobs.yaml"


def find_project(folder: Path | None = None) -> Path | None:
    """The project file of ``folder`` [here]: in it, or in a parent up to the root of its repository; None: none."""
    here = (folder or Path.cwd()).absolute()
    parents = [here, *here.parents]
    root = next((number for number, parent in enumerate(parents) if os.path.exists(parent / ".git")), 0)
    for parent in parents[: root + 1]:
        if os.path.isfile(path := parent / PROJECT_FILE):
            return path
        if os.path.isfile(other := parent / "hpcjobs.yml"):
            warnings.warn(f"{other} is not read: a project file is named {PROJECT_FILE}", HpcJobsWarning, stacklevel=2)
    return None


def is_ours(path: Path) -> bool:
    """Whether a project file belongs to the user or the system, or is trusted."""
    if path.stat().st_uid in (0, os.getuid()) and not leads_elsewhere(path):
        return True
    with suppress(ConfigError):  # another user's invalid file stops no command
        return is_trusted(path, read_file(path).text)
    return False


def read_site_name(path: Path) -> str | None:
    """The site that a project file names; None where it names none, or where it is another user's and not trusted.

    Raises ConfigError: the file is no YAML, or ``site`` is not a name.
    """
    tree = read_file(path).tree if is_ours(path) else {}
    name = tree.get("site") if isinstance(tree, dict) else None
    if name is None:
        return None
    try:
        return check_site_name(name)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error


def project_jobs(folder: Path) -> list[str]:
    """Names of the jobs of the folder's project file; none where it has none, or cannot be used."""
    try:
        path = find_project(folder)
        tree = read_file(path).tree if path is not None and is_ours(path) else {}
    except (ConfigError, OSError):
        return []
    jobs = tree.get("jobs") if isinstance(tree, dict) else None
    return [name for name in jobs if isinstance(name, str)] if isinstance(jobs, dict) else []


def check_site_name(name: object) -> str:
    """``name``, if it names a site and not a file. Raises ValueError: it is a path, or no text."""
    if not isinstance(name, str):
        raise ValueError(f"site {name!r} is no text")
    if "/" in name or name.endswith((".yaml", ".yml")):
        raise ValueError(f"site {name!r} is a path; a project file names a site")
    return name


class _Section(Frozen, frozen=True):
    """The section of a centre's file with its policy."""

    policy: Policy
    cluster: str | None = None


def find_policies(site: Site, files: Sequence[YamlFile]) -> tuple[AppliedPolicy, ...]:
    """Return the policies for ``site``, read from ``files``: of the centre's files among them, and of its name.

    Also policies of the `cluster` that the site states or Slurm's commands reach. So a user's file without any relation
    to the centre's comes under its policy too, and one that extends a file of another cluster escapes no policy.

    Raises ConfigError: a policy is wrong, or in a file that is not the centre's.
    """
    for file in files:
        if isinstance(file.tree, dict) and "policy" in file.tree and layer_of(file.path) != "centre":
            raise ConfigError(
                f"{where_of(file, ('policy',))}: policy: only a file of the centre has one",
                hint="the centre's folders are those of HPCJOBS_SITE_PATH and XDG_CONFIG_DIRS (/etc/xdg)",
            )
    if not (centre := list_centre_files()):
        return ()
    chain = {file.path.resolve() for file in files}
    clusters: list[str] = []
    if site.scheduler == "slurm":
        reached = find_clusters(site.sbatch, None if site.untrusted else site.slurm_conf)
        clusters = [*reached, *([site.cluster] if site.cluster else ())]
    return policies_of_job(site.name, clusters, paths={str(path) for path in centre if path.resolve() in chain})


def find_clusters(sbatch: Iterable[str], slurm_conf: str | None) -> frozenset[str]:
    """The clusters, in small letters, that may get a job with the options ``sbatch``: it runs on one of them.

    Clusters of the options, or SLURM_CLUSTERS, or the cluster of ``slurm_conf`` or of Slurm's own configuration.
    """
    values = [value for name, value in map(option_of, sbatch) if name == "clusters" and value]
    named = {cluster.strip() for value in values for cluster in value.split(",")} or named_clusters()
    reached = named or {cluster_name(slurm_conf or os.environ.get("SLURM_CONF")) or ""}
    return frozenset(cluster.lower() for cluster in reached if cluster)


def _is_named(cluster: str, names: Collection[str]) -> bool:
    return cluster.lower() in names or (EVERY_CLUSTER in names and cluster != "")


def policies_of_job(site: str, clusters: Iterable[str], *, paths: Collection[str] = ()) -> tuple[AppliedPolicy, ...]:
    """The policies for a job that ``site`` was submitted by, to the cluster that has one of these names.

    Also policies of the files ``paths``, which applied before.

    Raises ConfigError: a policy is wrong.
    """
    names = {cluster.lower() for cluster in clusters}
    return tuple(
        policy
        for path in list_centre_files()
        for cluster, policy in _policies(path)
        if path.stem == site or str(path) in paths or _is_named(cluster, names)
    )


def _policies(path: Path) -> Iterator[tuple[str, AppliedPolicy]]:
    """The policy of the centre's file ``path``, if it has one, with the cluster that it holds for."""
    files = read_chain(path)
    tree = merge_trees(files)
    if not isinstance(files[0].tree, dict) or "policy" not in files[0].tree:
        return
    stated = {key: tree[key] for key in _Section.__struct_fields__ if key in tree}
    section = convert_tree(stated | {"policy": files[0].tree["policy"]}, _Section, files)
    if section.cluster is None and find_kind(str(tree.get("scheduler", CLUSTER))).has_nodes:
        raise ConfigError(
            f"{where_of(files[0], ('policy',))}: policy: the file names no cluster (Slurm's ClusterName), by which "
            "jobs of other site files come under the policy",
        )
    yield section.cluster or "", AppliedPolicy(path=str(path), policy=section.policy)


class UserConfig(Frozen, frozen=True):
    """``~/.config/hpcjobs/config.yaml``."""

    site: str | None = None
    """Site used when neither ``--site``, HPCJOBS_SITE nor a project file says one."""


_PREFERENCE: tuple[Layer, ...] = ("user", "centre", "project")
"""Whose site is chosen where none is named: a cloned repository's comes last."""


def default_site() -> str:
    """The site of a command that names none: see `find_default_site`.

    Raises ConfigError: this is a login node of an unknown site: training is not allowed here.
    """
    if (name := find_default_site()) is not None:
        if name == "local" and _read_setting() is None:
            _warn_of_silent_cluster()
        return name
    cluster = cluster_name(os.environ.get("SLURM_CONF"))
    where = f"the Slurm cluster {cluster}" if cluster else "a Slurm cluster"
    if paths := _sites_of_this_machine():
        raise ConfigError(
            f"this machine belongs to {where}, and several site files are for it: {', '.join(paths)}",
            hint=f"use --site NAME, or write `site: NAME` to {config_dir() / 'config.yaml'}",
        )
    raise ConfigError(
        f"this machine belongs to {where}, and no site is named",
        hint="`hpcjobs sites init` writes a site file for this cluster. Where there is one, do one of these:\n"
        "  use --site NAME, or --site local for this machine itself\n"
        "  write `site: NAME` to hpcjobs.yaml in the project's folder, or set HPCJOBS_SITE=NAME\n"
        f"  write `site: NAME` to {config_dir() / 'config.yaml'}\n"
        f"  write `cluster: {cluster or 'NAME'}` (Slurm's ClusterName) to the site's file",
    )


def site_or_cluster(name: str | None) -> Site:
    """The site ``name`` [the default site]; on a machine of an unknown site, a site with only the cluster's name.

    For verbs that only read from the scheduler: such a site has no partitions or prices, and cannot submit.

    Raises ConfigError: no such site.
    """
    return site_to_look_at(name) or Site(name=cluster_name(os.environ.get("SLURM_CONF")) or "-")


def site_to_look_at(name: str | None) -> Site | None:
    """The site ``name`` [the default site], for verbs that look at known jobs or end them; None: Slurm's own defaults.

    A default site that cannot be used is a warning: it must not keep the user from running jobs.

    Raises ConfigError: ``name`` is no site.
    """
    if name is not None:
        return load_site(name)
    try:
        default = find_default_site()
        return None if default is None else load_site(default)
    except ConfigError as error:
        warnings.warn(f"no default site: {error.message}", HpcJobsWarning, stacklevel=2)
        return None if slurm_is_here() else load_site("local")


def find_default_site() -> str | None:
    """Return HPCJOBS_SITE, or the project file's site, or the user's configured site, or ``local`` or a Slurm site.

    On a machine with a Slurm that is the sandbox's while SLURM_CONF names the sandbox, if the sandbox is like a site.
    Otherwise it is the Slurm site with this machine's `cluster`, or the only one without a `cluster`, among the
    files of the user, then of the centre, then of the project; None: no such site, or the first of these layers that
    has one has several.
    """
    if setting := _read_setting():
        return setting
    if not slurm_is_here():
        return "local"
    sandbox = current_sandbox() if os.environ.get("SLURM_CONF") else None
    if sandbox is not None and sandbox.site in {entry.name for entry in list_sites()}:
        return sandbox.site
    candidates = _sites_of_this_machine()
    return candidates[0] if len(candidates) == 1 else None


def _read_setting() -> str | None:
    if name := os.environ.get("HPCJOBS_SITE"):
        return _existing(name, "HPCJOBS_SITE")
    if (project := find_project()) is not None and (name := read_site_name(project)):
        return _existing(name, str(project))
    config = config_dir() / "config.yaml"
    if config.is_file() and (name := read_yaml(config, UserConfig).site):
        return _existing(name, str(config))
    return None


def _sites_of_this_machine() -> list[str]:
    """Paths of the site files, of one layer, that have this machine's `cluster`; else of those without a `cluster`."""
    sites = _cluster_sites()
    here = cluster_name(os.environ.get("SLURM_CONF")) if any(site.cluster for _, site in sites) else None
    matching = [entry for entry, site in sites if site.cluster is not None and site.cluster.lower() == here]
    candidates = matching or [entry for entry, site in sites if site.cluster is None]
    by_layer = ([str(entry.path) for entry in candidates if entry.layer == layer] for layer in _PREFERENCE)
    return next(filter(None, by_layer), [])


def _cluster_sites() -> list[tuple[SiteEntry, Site]]:
    entries = [entry for entry in list_sites() if not entry.shadowed and entry.layer not in SHIPPED]
    readable = [(entry, site) for entry in entries if (site := _read_candidate(entry)) is not None]
    return [(entry, site) for entry, site in readable if site.scheduler == "slurm"]


def _warn_of_silent_cluster() -> None:
    """Warn that this may be a login node: without its controller it looks like a workstation with Slurm's packages."""
    if shutil.which("sbatch") is None:
        return
    if paths := [str(entry.path) for entry, _ in _cluster_sites() if entry.layer != "project"]:
        warnings.warn(
            f"Slurm's commands find no cluster now, so that jobs run on this machine itself; is it a login node of "
            f"{paths[0]}? `scontrol ping` asks Slurm again, and --site NAME names the site",
            HpcJobsWarning,
            stacklevel=3,
        )


def _read_candidate(entry: SiteEntry) -> Site | None:
    """The site; None, with a warning, for a file of the current folder that cannot be used: it may be anybody's."""
    try:
        return read_site(entry.path)
    except ConfigError as error:
        if entry.layer != "project":
            raise
        warnings.warn(f"left out: {error.message}", HpcJobsWarning, stacklevel=2)
        return None


def _existing(name: str, where: str) -> str:
    """``name``, which was read at ``where``, if there is such a site."""
    try:
        find_file(name)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.message}", hint=error.hint) from error
    return name


def load_site(name: str, *, allow_untrusted: bool = False) -> Site:
    """The site called ``name``, or the site file at that path (anything with a ``/`` or ``.yaml``).

    While a sandbox shaped like the site is up, the site is the rehearsal of it: the same partitions
    and limits, run by the sandbox's Slurm with this machine's software.

    Args:
        allow_untrusted: accept an untrusted site of a repository, with a warning, for verbs
            that only print it or its effects.

    Raises:
        ConfigError: no such site, its file is wrong, or it is untrusted and sets values that act under the user's name.
    """
    path = find_file(name)
    _warn_of_shadows(path)
    files = read_chain(path)
    site = _convert(files)
    if site.untrusted and not allow_untrusted:
        raise refusal(path, site.untrusted)
    if site.untrusted:
        warnings.warn(f"{refusal(path, site.untrusted).message}\nnothing of it is run", HpcJobsWarning, stacklevel=1)
    site = msgspec.structs.replace(site, policies=find_policies(site, files))
    return apply_overlay(site)


def describe_partition(site: str, partition: str | None) -> str | None:
    """`describe_nodes` of a partition; None where it is not known: without the site file, only its name is."""
    with suppress(ConfigError):
        partitions = load_site(site).partitions
        return describe_nodes(partitions[partition]) if partition in partitions else None
    return None


def known_sites() -> Iterator[Site]:
    """The sites of the user, the centre and the project, this machine, and the site that a sandbox here plays.

    The other shipped files describe clusters; the user may have no account there.
    """
    sandbox = current_sandbox()
    here = {"local"} if sandbox is None else {"local", sandbox.site}
    for entry in list_sites():
        if entry.shadowed or (entry.layer in SHIPPED and entry.name not in here):
            continue
        with suppress(ConfigError):  # `hpcjobs sites` prints the error
            yield load_site(str(entry.path))


def read_site(path: Path) -> Site:
    """Read the site of ``path`` and of the files that it extends, unresolved: for descriptions, not for use.

    Raises ConfigError: a file is wrong or missing.
    """
    return _convert(read_chain(path))


def _convert(files: tuple[YamlFile, ...]) -> Site:
    path = files[0].path
    site = convert_tree(words_of_switches(merge_trees(files)), Site, files)
    if site.name not in ("", path.stem):
        raise ConfigError(f"{path}: name {site.name!r}: the name of the file is the site's name; remove this key")
    if site.scheduler == "slurm" and not site.partitions:
        raise ConfigError(f"{path}:1: a slurm site needs at least one partition")
    if own := [f"{file.path}: {key}" for file in files for key in OF_THE_LOADER[1:] if key in file.tree]:
        raise ConfigError(f"{own[0]}: hpcjobs sets this key itself; remove it")
    return msgspec.structs.replace(
        site,
        name=path.stem,
        path=str(path),
        extended=tuple(str(file.path) for file in files[1:]),
        untrusted=list_untrusted(files),
    )


def _warn_of_shadows(path: Path) -> None:
    """Say that a site file of the current folder takes the place of another: it may come with somebody's repository."""
    if layer_of(path) != "project":
        return
    hidden = [str(entry.path) for entry in list_sites() if entry.name == path.stem and not entry.path.samefile(path)]
    if hidden:
        warnings.warn(f"site {path.stem} is {path}, which shadows {', '.join(hidden)}", HpcJobsWarning, stacklevel=1)
