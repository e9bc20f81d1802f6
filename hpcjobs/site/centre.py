"""Finds the policies of the centre that hold for a site."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

from hpcjobs.errors import ConfigError
from hpcjobs.site.checks import Frozen
from hpcjobs.site.machine import EVERY_CLUSTER, cluster_name, named_clusters
from hpcjobs.site.models import AppliedPolicy, Policy, Site
from hpcjobs.site.resources import option_of
from hpcjobs.site.search import layer_of, list_centre_files
from hpcjobs.site.yaml_file import YamlFile, convert_tree, merge_trees, read_chain, where_of


class _Section(Frozen, frozen=True):
    """The section of a centre's file with its policy."""

    policy: Policy
    cluster: str | None = None


def find_policies(site: Site, files: Sequence[YamlFile]) -> tuple[AppliedPolicy, ...]:
    """Return the policies for ``site``, read from ``files``: of the centre's files among them, and of its name.

    Also policies of the `cluster` that the site states or Slurm's commands reach. So a user's file without any relation
    to the centre's comes under its policy too, and one that extends a file of another cluster escapes no policy.

    Raises:
        ConfigError: a policy is wrong, or in a file that is not the centre's.
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

    Raises:
        ConfigError: a policy is wrong.
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
    if section.cluster is None and tree.get("scheduler") != "local":
        raise ConfigError(
            f"{where_of(files[0], ('policy',))}: policy: the file names no cluster (Slurm's ClusterName), by which "
            "jobs of other site files come under the policy",
        )
    yield section.cluster or "", AppliedPolicy(path=str(path), policy=section.policy)
