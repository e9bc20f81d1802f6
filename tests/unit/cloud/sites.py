"""Site files for the tests: the shipped cloud sites, in any size and kind, complete enough to be built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from site_folders import user_folder

from hpcjobs.cloud import section
from hpcjobs.data import data_folder
from hpcjobs.site.library import load_site
from hpcjobs.site.models import Site

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIG9uZSBrZXkgdGhhdCBub2JvZHkgaGFzIGF0IGFsbA you@laptop"
PROVIDERS = tuple(section.PROVIDERS)
SHIPPED = {"gcp": "gcp-t4", "nebius": "nebius-h100"}
PROJECT = {"gcp": "my-project", "nebius": "project-e00aaaa"}
NO_GPU = {"gcp": "n1-standard-8", "nebius": "cpu-d3/16vcpu-64gb"}


def tree(provider: str) -> dict[str, Any]:
    """The shipped site of ``provider``, with project, key and network said."""
    text = (data_folder("site_configs") / f"{SHIPPED[provider]}.yaml").read_text(encoding="utf-8")
    result: dict[str, Any] = yaml.safe_load(text)
    cloud = result["cloud"]
    cloud["project"] = PROJECT[provider]
    cloud["ssh"] = {"keys": [KEY]}
    cloud.setdefault("network", {})["ssh_from"] = ["203.0.113.0/24"]
    return result


def sized(provider: str, *, nodes: int, gpus: bool = True, capacity: str = "ordinary") -> dict[str, Any]:
    """The same with ``nodes`` nodes, with or without GPUs, of ordinary, spot or reserved capacity."""
    site = tree(provider)
    cloud, (partition,) = site["cloud"], site["partitions"].values()
    cloud["nodes"]["max"] = partition["nodes"] = nodes
    if not gpus:
        del cloud["gpu"]
        cloud["network"].pop("fabric", None)
        cloud["machine"] = NO_GPU[provider]
        machine = section.PROVIDERS[provider].find_machine(NO_GPU[provider])
        assert machine is not None
        partition["node"], partition["defaults"] = {"cpus": machine.cpus, "mem": "28G"}, {}
    if capacity == "spot":
        cloud["spot"] = True
    if capacity == "reserved":
        cloud["reservation"] = "our-nodes"
    return site


def saved(site: dict[str, Any], name: str = "rented", folder: Path | None = None) -> Site:
    """``site`` written to a file of ``folder``, by default the user's, and loaded from there."""
    path = (user_folder() if folder is None else folder) / f"{name}.yaml"
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(yaml.safe_dump(site, sort_keys=False), encoding="utf-8")
    return load_site(str(path))
