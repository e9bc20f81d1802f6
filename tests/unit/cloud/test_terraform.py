"""What is rendered, read, planned and applied by Terraform itself, against the providers' own schemas."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from sites import PROVIDERS, saved, sized
from stub_provider import serving

from hpcjobs.cloud.check import problems, provider_schema
from hpcjobs.cloud.render import render, write
from hpcjobs.cloud.section import resolve_cluster

if shutil.which("terraform") is None:
    pytest.skip("terraform is not installed", allow_module_level=True)


@pytest.fixture(scope="module")
def stubs() -> Iterator[Mapping[str, str]]:
    """The providers, without a cloud behind them, for all tests of this file."""
    with tempfile.TemporaryDirectory() as folder:  # a socket's path must be short
        schemas = [provider_schema(provider) for provider in PROVIDERS]
        with serving(schemas, Path(folder)) as environment:
            yield environment


# Each size with and without GPUs, each capacity in both; all that there are in make long.
QUICK = {
    (1, True, "ordinary"), (2, True, "spot"), (16, True, "reserved"),
    (1, False, "spot"), (2, False, "reserved"), (16, False, "ordinary"),
}  # fmt: skip
SIZES = [
    pytest.param(*size, marks=[] if size in QUICK else pytest.mark.long)
    for size in product((1, 2, 16), (True, False), ("ordinary", "spot", "reserved"))
]


class Terraform:
    """Terraform in one folder."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder, self._environment = folder, {**os.environ, **environment}

    def run(self, *arguments: str, code: int = 0) -> str:
        done = subprocess.run(
            ["terraform", *arguments], cwd=self.folder, env=self._environment, capture_output=True, text=True
        )
        assert done.returncode == code, f"terraform {' '.join(arguments)}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def planned(self, *arguments: str) -> dict[str, dict[str, Any]]:
        """Address -> what would be made."""
        self.run("plan", "-input=false", "-out=plan", *arguments)
        tree = json.loads(self.run("show", "-json", "plan"))
        resources = tree["planned_values"]["root_module"]["resources"]
        return {r["address"]: r["values"] for r in sorted(resources, key=lambda r: (r["type"], r.get("index", 0)))}


def prepared(site: dict[str, Any], folder: Path, stubs: Mapping[str, str]) -> Terraform:
    write(render(resolve_cluster(saved(site))), folder)
    terraform = Terraform(folder, stubs)
    terraform.run("init", "-input=false")
    return terraform


@pytest.mark.parametrize("provider", PROVIDERS)
def test_the_folder_is_formatted_and_valid(provider: str, tmp_path: Path, stubs: Mapping[str, str]) -> None:
    terraform = prepared(sized(provider, nodes=2), tmp_path / "out", stubs)
    assert terraform.run("fmt", "-check", "-diff") == ""
    assert json.loads(terraform.run("validate", "-json"))["diagnostics"] == []


@pytest.mark.parametrize("provider", PROVIDERS)
def test_hostile_labels_and_keys_stay_text(provider: str, tmp_path: Path, stubs: Mapping[str, str]) -> None:
    site = sized(provider, nodes=1)
    site["cloud"]["reservation"] = '${file("/etc/passwd")} %{ if true } "quoted" \\ é'
    planned = prepared(site, tmp_path / "out", stubs).planned()
    assert f"[{json.dumps(site['cloud']['reservation'])}]" in json.dumps(planned)


@pytest.mark.parametrize(("nodes", "gpus", "capacity"), SIZES)
def test_gcp_plans_what_the_site_says(
    nodes: int, gpus: bool, capacity: str, tmp_path: Path, stubs: Mapping[str, str]
) -> None:
    """Counts, accelerators, zone, tags, ports, capacity and what protects them."""
    site = sized("gcp", nodes=nodes, gpus=gpus, capacity=capacity)
    terraform = prepared(site, tmp_path / "out", stubs)
    planned = terraform.planned("-var", f"nodes={nodes}")
    assert f"{len(planned)} added, 0 changed, 0 destroyed" in terraform.run(
        "apply", "-input=false", "-no-color", "plan"
    )
    workers = [v for a, v in planned.items() if a.startswith("google_compute_instance.worker[")]
    assert [w["name"] for w in workers] == [f"rented-{n + 1}" for n in range(nodes)]
    for worker in workers:
        assert (worker["machine_type"], worker["zone"]) == ("n1-standard-8", "us-central1-a")
        assert worker["guest_accelerator"] == ([{"type": "nvidia-tesla-t4", "count": 1}] if gpus else [])
        assert worker["tags"] == ["rented"]
        assert worker["network_interface"][0]["access_config"] == []  # no way in from outside
        shielded = worker["shielded_instance_config"][0]
        assert shielded == dict.fromkeys(shielded, True)
        (scheduling,) = worker["scheduling"]
        assert scheduling["provisioning_model"] == ("SPOT" if capacity == "spot" else "STANDARD")
        stays = not gpus and capacity != "spot"
        assert scheduling["on_host_maintenance"] == ("MIGRATE" if stays else "TERMINATE")
        affinity = worker["reservation_affinity"]
        assert [a["specific_reservation"][0]["values"] for a in affinity] == [["our-nodes"]] * (capacity == "reserved")
    head = planned["google_compute_instance.head"]
    assert "export HPCJOBS_ROLE='head'\n" in head["metadata"]["startup-script"]
    assert (head["machine_type"], len(head["network_interface"][0]["access_config"])) == ("e2-standard-4", 1)
    ssh, inside = planned["google_compute_firewall.ssh"], planned["google_compute_firewall.inside"]
    assert (ssh["source_ranges"], ssh["target_tags"]) == (["203.0.113.0/24"], ["rented-head"])
    assert ssh["allow"] == [{"ports": ["22"], "protocol": "tcp"}]
    assert inside["source_tags"] == inside["target_tags"] == ["rented"]
    (tcp,) = [rule["ports"] for rule in inside["allow"] if rule["protocol"] == "tcp"]
    assert tcp is None  # all of them: see the test of the ports that job scripts choose


@pytest.mark.parametrize(("nodes", "gpus", "capacity"), SIZES)
def test_nebius_plans_what_the_site_says(
    nodes: int, gpus: bool, capacity: str, tmp_path: Path, stubs: Mapping[str, str]
) -> None:
    """Counts, presets, InfiniBand, the shared filesystem, capacity and who may come in."""
    site = sized("nebius", nodes=nodes, gpus=gpus, capacity=capacity)
    terraform = prepared(site, tmp_path / "out", stubs)
    planned = terraform.planned("-var", f"nodes={nodes}")
    assert f"{len(planned)} added, 0 changed, 0 destroyed" in terraform.run(
        "apply", "-input=false", "-no-color", "plan"
    )
    workers = [v for a, v in planned.items() if a.startswith("nebius_compute_v1_instance.worker[")]
    assert [w["hostname"] for w in workers] == [f"rented-{n + 1}" for n in range(nodes)]
    machine = ("gpu-h100-sxm", "8gpu-128vcpu-1600gb") if gpus else ("cpu-d3", "16vcpu-64gb")
    for worker in workers:
        assert (worker["resources"]["platform"], worker["resources"]["preset"]) == machine
        image = worker["boot_disk"]["managed_disk"]["spec"]["source_image_family"]["image_family"]
        assert image == ("ubuntu24.04-cuda13.0" if gpus else "ubuntu24.04-driverless")
        assert "public_ip_address" not in worker["network_interfaces"][0]
        (filesystem,) = worker["filesystems"]
        assert (filesystem["mount_tag"], filesystem["attach_mode"]) == ("shared", "READ_WRITE")
        assert (worker.get("preemptible") or {}).get("on_preemption") == ("STOP" if capacity == "spot" else None)
        reserved = (worker.get("reservation_policy") or {}).get("reservation_ids")
        assert reserved == (["our-nodes"] if capacity == "reserved" else None)
    fabrics = [v["infiniband_fabric"] for a, v in planned.items() if "gpu_cluster" in a]
    assert fabrics == (["fabric-2"] if gpus else [])
    assert planned["nebius_compute_v1_filesystem.shared[0]"]["size_gibibytes"] == 2048
    ssh = planned["nebius_vpc_v1_security_rule.ssh"]["ingress"]
    assert (ssh["source_cidrs"], ssh["destination_ports"]) == (["203.0.113.0/24"], [22])


@pytest.mark.parametrize("provider", PROVIDERS)
def test_applied_it_tells_how_to_log_in_and_to_submit(provider: str, tmp_path: Path, stubs: Mapping[str, str]) -> None:
    terraform = prepared(sized(provider, nodes=2), tmp_path / "out", stubs)
    terraform.run("apply", "-input=false", "-auto-approve", "-var", "nodes=2")
    document = {name: output["value"] for name, output in json.loads(terraform.run("output", "-json")).items()}
    assert document["ssh"] == f"ssh hpc@{document['head_address']}"
    assert document["submit"].startswith(f"{document['ssh']} hpcjobs submit --site rented --wait -N 1 ")
    assert set(document["nodes"]) == {"rented-1", "rented-2"}
    state = (tmp_path / "out" / "terraform.tfstate").read_text(encoding="utf-8")
    assert "PRIVATE KEY" not in state
    terraform.run("destroy", "-input=false", "-auto-approve")


def test_a_filestore_takes_the_place_of_the_heads_disk(tmp_path: Path, stubs: Mapping[str, str]) -> None:
    site = sized("gcp", nodes=2)
    site["cloud"]["shared"] |= {"kind": "filestore", "size": "1T"}
    site["cloud"]["disk"]["encryption_key"] = "projects/p/locations/l/keyRings/r/cryptoKeys/k"
    planned = prepared(site, tmp_path / "out", stubs).planned()
    filestore = planned["google_filestore_instance.shared[0]"]
    assert filestore["file_shares"][0]["capacity_gb"] == 1024
    assert "google_compute_disk.shared[0]" not in planned
    key = site["cloud"]["disk"]["encryption_key"]
    assert (
        filestore["kms_key_name"] == planned["google_compute_instance.head"]["boot_disk"][0]["kms_key_self_link"] == key
    )


@pytest.mark.parametrize("kind", ["nfs", "filestore"])
def test_a_fresh_project_gets_the_services_before_anything_that_needs_them(
    kind: str, tmp_path: Path, stubs: Mapping[str, str]
) -> None:
    """They stay enabled when the cluster goes: others may use them."""
    site = sized("gcp", nodes=2)
    site["cloud"]["shared"] |= {"kind": kind, "size": "1T"}
    terraform = prepared(site, tmp_path / "out", stubs)
    enabled = {a: v for a, v in terraform.planned().items() if a.startswith("google_project_service.")}
    names = {"compute", "iam", *(["file"] if kind == "filestore" else [])}
    assert {v["service"] for v in enabled.values()} == {f"{name}.googleapis.com" for name in names}
    assert {v["disable_on_destroy"] for v in enabled.values()} == {False}
    edges = re.findall(r'"([^"]+)" -> "([^"]+)"', terraform.run("graph"))
    waits = {"google_project_service.used"}
    while more := {source for source, target in edges if target in waits} - waits:
        waits |= more
    declared = re.findall(
        r'(?m)^resource "(\w+)" "(\w+)"', "".join(p.read_text() for p in terraform.folder.glob("*.tf"))
    )
    assert {".".join(names) for names in declared} <= waits


@pytest.mark.parametrize(
    ("tier", "location", "protocol", "nfs"),
    [
        ("BASIC_HDD", "us-central1-a", "NFS_V3", "3"),
        ("ZONAL", "us-central1-a", "NFS_V4_1", "4.1"),
        ("REGIONAL", "us-central1", "NFS_V4_1", "4.1"),
    ],
)
def test_machines_mount_a_filestore_by_a_protocol_that_its_tier_speaks(
    tier: str, location: str, protocol: str, nfs: str, tmp_path: Path, stubs: Mapping[str, str]
) -> None:
    site = sized("gcp", nodes=1)
    site["cloud"]["shared"] |= {"kind": "filestore", "size": "3T", "tier": tier}
    terraform = prepared(site, tmp_path / "out", stubs)
    filestore = terraform.planned()["google_filestore_instance.shared[0]"]
    assert (filestore["location"], filestore["protocol"]) == (location, protocol)
    terraform.run("apply", "-input=false", "plan")
    machines = json.loads(terraform.run("show", "-json"))["values"]["root_module"]["resources"]
    scripts = [m["values"]["metadata"]["startup-script"] for m in machines if m["type"] == "google_compute_instance"]
    assert len(scripts) == 2
    assert all(f"export HPCJOBS_NFS='{nfs}'\n" in script for script in scripts)


@pytest.fixture(scope="module")
def two_t4(tmp_path_factory: pytest.TempPathFactory, stubs: Mapping[str, str]) -> Terraform:
    """A folder of two nodes, ready to be planned."""
    folder = tmp_path_factory.mktemp("two")
    terraform = Terraform(folder / "out", stubs)
    write(render(resolve_cluster(saved(sized("gcp", nodes=2), folder=folder))), terraform.folder)
    terraform.run("init", "-input=false")
    return terraform


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ("nodes=17", "nodes is 17: the site allows 1 to 2"),
        ("nodes=1.5", "whole number of nodes"),
        ('ssh_from=["0.0.0.0/0"]', "lets a large part of the world try"),
        ('ssh_from=["0.0.0.0/1","128.0.0.0/1"]', "lets a large part of the world try"),
        ("ssh_from=[]", "At least one network"),
        ('ssh_keys=["-----BEGIN"]', "At least one public key"),
        ("zone=moon", "us-central1-a"),
        ("project=1", "6 to 30 small letters"),
        ("shared_kind=floppy", "Either nfs or filestore"),
    ],
)
def test_a_wrong_variable_is_refused_before_anything_is_built(variable: str, message: str, two_t4: Terraform) -> None:
    answer = two_t4.run("plan", "-input=false", "-no-color", "-var", variable, code=1)
    assert message in " ".join(answer.replace("│", " ").split())


@pytest.mark.parametrize("provider", PROVIDERS)
def test_what_is_shipped_names_only_what_the_provider_knows(provider: str) -> None:
    cluster = resolve_cluster(saved(sized(provider, nodes=2)))
    assert problems(render(cluster), cluster.cloud.provider) == []


@pytest.mark.parametrize(
    ("provider", "old", "new", "message"),
    [
        ("gcp", "machine_type  ", "machine_tipe  ", "machine_tipe: no such argument; did you mean 'machine_type'?"),
        ("gcp", "enable_vtpm", "vtpm", "shielded_instance_config.vtpm: no such argument"),
        ("gcp", '"google_compute_router"', '"google_compute_ruter"', "did you mean 'google_compute_router'?"),
        ("gcp", '  protocol = "icmp"', "", "google_compute_firewall.inside.allow.protocol: missing"),
        ("gcp", "= true", '= "yes"', "expected a bool"),
        ("nebius", "source_image_family", "source_image", "boot_disk.managed_disk.spec.source_image: no such argument"),
        ("nebius", "destination_ports", "ports", "ingress.ports: no such argument"),
    ],
)
def test_a_word_that_the_provider_does_not_know_is_found(provider: str, old: str, new: str, message: str) -> None:
    """Also inside objects, where Terraform drops it in silence; not inside expressions, which only it can read."""
    cluster = resolve_cluster(saved(sized(provider, nodes=2)))
    files = {name: text.replace(old, new) for name, text in render(cluster).items()}
    assert message in "\n".join(problems(files, cluster.cloud.provider))
