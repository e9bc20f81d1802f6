"""Each system of the gallery as a sandbox: the slurm.conf that is written, and a job on it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from partition_facts import facts

import hpcjobs
from hpcjobs.sandbox.folder import Folder
from hpcjobs.sandbox.layout import Layout, Shape, read_slurm_conf, resolve_layout
from hpcjobs.sandbox.services import slurm_conf
from hpcjobs.site.library import load_site
from hpcjobs.site.models import Partition, Site
from hpcjobs.site.search import gallery_folder

NAMES = sorted(path.stem for path in gallery_folder().glob("*.yaml"))


def layout_of(name: str) -> Layout:
    return resolve_layout(Shape(like=name), load_site(name))


def as_built(partition: Partition, layout: Layout) -> Partition:
    """``partition`` with what Slurm needs of each node: a number for its memory, and every feature that jobs name."""
    groups = tuple(
        msgspec.structs.replace(
            group,
            mem=(group.mem_bytes or group.cpus << 30) >> 20,
            features=tuple(dict.fromkeys((*(group.features or ()), *layout.features))),
        )
        for group in partition.groups
    )
    default = next((name for name, each in layout.partitions.items() if each.default), next(iter(layout.partitions)))
    return msgspec.structs.replace(
        partition, nodes=groups, node=None, default=partition is layout.partitions[default], qos=partition.qos or None
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_slurm_conf_of_the_sandbox_says_what_the_site_file_says_of_fewer_nodes(name: str, tmp_path: Path) -> None:
    layout = layout_of(name)
    path = tmp_path / "slurm.conf"
    path.write_text(slurm_conf(layout, Folder(tmp_path)), encoding="utf-8")
    written = read_slurm_conf(path).site.partitions
    expected = {key: facts(as_built(partition, layout)) for key, partition in layout.partitions.items()}
    assert {key: facts(partition) for key, partition in written.items()} == expected
    assert len(layout.hosts) <= 8, "a sandbox on a laptop"


@pytest.mark.parametrize("name", NAMES)
def test_a_job_on_the_sandbox_fits_into_every_partition_without_a_word_about_it(name: str, here: Path) -> None:
    site = load_site(name)
    layout = layout_of(name)
    played = msgspec.convert(msgspec.to_builtins(site) | layout.overlay | {"node_local": []}, Site)
    for partition in layout.partitions:
        job = hpcjobs.plan(["true"], site=played, partition=partition).job
        assert job.nodes <= len(layout.members[partition])
        assert job.resources.account in (None, *layout.accounts)
        assert job.resources.qos in (None, *layout.qos)
