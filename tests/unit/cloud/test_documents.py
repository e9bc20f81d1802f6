"""What is rendered, read as documents: golden folders, shell that shellcheck accepts, the providers' own standards.

GOLDEN=write writes the folders anew: read the difference before it is committed.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from sites import KEY, NO_GPU, PROJECT, PROVIDERS, SHIPPED, saved, sized, tree

import hpcjobs
from hpcjobs import __version__, plan
from hpcjobs.cloud import section
from hpcjobs.cloud.check import provider_schema
from hpcjobs.cloud.render import Kind, render, wheel_of, write
from hpcjobs.cloud.section import resolve_cluster
from hpcjobs.data import data_folder
from hpcjobs.errors import RequestError
from hpcjobs.packing import build_wheel
from hpcjobs.site.library import load_site

GOLDEN = Path(__file__).parents[2] / "data" / "golden" / "cloud"
FOLDERS: list[tuple[str, Kind]] = [
    ("gcp-t4", "vms"), ("gcp-t4", "toolkit"), ("nebius-h100", "vms"), ("nebius-h100", "soperator"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "kind"), FOLDERS)
def test_the_folder_is_the_golden_one(name: str, kind: Kind) -> None:
    """Without the module's own files, which are the same for every site and stand in templates/cloud."""
    files = render(resolve_cluster(load_site(name)), kind)
    wheel = build_wheel()
    written = {
        n: t.replace(__version__, "VERSION").replace(wheel.sha256, "SHA256-OF-THE-WHEEL")
        for n, t in files.items()
        if not n.endswith((".tf", ".gitignore"))
    }
    golden = GOLDEN / f"{name}-{kind}"
    if os.environ.get("GOLDEN") == "write":
        shutil.rmtree(golden, ignore_errors=True)
        golden.mkdir(parents=True)
        for file, text in written.items():
            (golden / file).write_text(text, encoding="utf-8")
    assert {path.name: path.read_text(encoding="utf-8") for path in golden.iterdir()} == written


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_provider_has_all_its_parts_and_the_schema_of_the_version_that_its_module_pins(provider: str) -> None:
    schema = provider_schema(provider)
    versions = (data_folder("templates") / "cloud" / provider / "versions.tf").read_text()
    assert re.search(rf'source *= "{schema["source"]}"\n *version *= "{schema["version"]}"', versions)
    assert get_args(section.Provider) == PROVIDERS
    assert {*SHIPPED} == {*PROJECT} == {*NO_GPU} == {*PROVIDERS}


def test_the_tool_writes_the_schemas_from_what_terraform_prints(tmp_path: Path) -> None:
    """Terraform names a provider with the host of its registry, which a module's source may lack."""
    root = Path(hpcjobs.__file__).parents[1]
    schemas = root / "hpcjobs" / "cloud" / "schemas"
    shutil.copytree(root / "templates" / "cloud", tmp_path / "templates" / "cloud")
    shutil.copytree(schemas, tmp_path / "hpcjobs" / "cloud" / "schemas")
    (tmp_path / "tools").mkdir()
    tool = shutil.copy(root / "tools" / "provider-schemas", tmp_path / "tools")
    printed = {}
    for provider in PROVIDERS:
        shipped = provider_schema(provider)
        source = shipped["source"] if shipped["source"].count("/") == 2 else f"registry.example/{shipped['source']}"
        kinds = {key: shipped[key] for key in ("resource_schemas", "data_source_schemas")}
        blocks = {key: {name: {"block": block} for name, block in kind.items()} for key, kind in kinds.items()}
        printed[source] = {"provider": {"block": shipped["provider"]}, **blocks}
        (tmp_path / "hpcjobs" / "cloud" / "schemas" / f"{provider}.json").unlink()
    subprocess.run([sys.executable, tool], input=json.dumps({"provider_schemas": printed}), text=True, check=True)
    for provider in PROVIDERS:
        written = tmp_path / "hpcjobs" / "cloud" / "schemas" / f"{provider}.json"
        assert written.read_text() == (schemas / f"{provider}.json").read_text()


@pytest.mark.parametrize("provider", PROVIDERS)
def test_the_module_is_the_same_for_every_site(provider: str) -> None:
    """A site's values stand in terraform.tfvars alone."""
    small, large = (render(resolve_cluster(saved(sized(provider, nodes=n, gpus=n > 1)))) for n in (1, 16))
    folders = (data_folder("templates") / "cloud" / name for name in ("common", provider))
    module = {path.name: path.read_text(encoding="utf-8") for folder in folders for path in folder.glob("*.tf")}
    module["applied.tf"] = small["applied.tf"]  # made from the variables
    assert module == {n: t for n, t in small.items() if n.endswith(".tf")}
    assert module == {n: t for n, t in large.items() if n.endswith(".tf")}


@pytest.mark.parametrize("provider", PROVIDERS)
def test_every_variable_is_described_and_every_value_has_one(provider: str) -> None:
    files = render(resolve_cluster(saved(tree(provider))))
    text = files["variables.tf"] + files["variables_common.tf"]
    variables = dict(re.findall(r'(?ms)^variable "(\w+)" \{\n(.*?)^\}', text))
    assert [name for name, body in variables.items() if "description" not in body or "type" not in body] == []
    assert set(re.findall(r"(?m)^(\w+) +=", files["terraform.tfvars"])) <= set(variables)
    assert set(re.findall(r"= var\.(\w+)$", files["applied.tf"], re.MULTILINE)) == set(variables)
    outputs = re.findall(r'(?ms)^output "\w+" \{\n(.*?)^\}', files["outputs.tf"])
    assert all("description" in body for body in outputs)
    assert 'version = "' in files["versions.tf"]


@pytest.mark.parametrize("gpus", [True, False], ids=["gpus", "no-gpus"])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_the_shell_is_clean(provider: str, gpus: bool, tmp_path: Path) -> None:
    files = render(resolve_cluster(saved(sized(provider, nodes=2, gpus=gpus))))
    (tmp_path / "bootstrap.sh").write_text(files["bootstrap.sh"], encoding="utf-8")
    inner = files["bootstrap.sh"].split("<<'SCRIPT'\n")[1].split("\nSCRIPT\n")[0]
    (tmp_path / "hpcjobs-nodes").write_text(inner + "\n", encoding="utf-8")
    shellcheck = Path(sys.executable).with_name("shellcheck")
    scripts = ("bootstrap.sh", "hpcjobs-nodes")
    done = subprocess.run([shellcheck, *scripts], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert ("install_driver" in files["bootstrap.sh"]) == gpus


def test_the_site_travels_to_the_head_as_it_is(tmp_path: Path) -> None:
    """Quotes, substitutions and letters of any language: no shell reads them."""
    site = tree("gcp")
    site["description"] = "नेपाली $(touch /tmp/x) `id` 'one' \"two\" \\n EOF"
    loaded = saved(site)
    text = Path(loaded.path).read_text(encoding="utf-8").rstrip()
    assert text in render(resolve_cluster(loaded))["bootstrap.sh"]


def test_files_are_their_owners_and_the_state_is_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    files = render(resolve_cluster(saved(tree("gcp"))))
    write(files, out)
    (out / "terraform.tfstate").write_text("{}", encoding="utf-8")
    write(files, out)
    assert stat.S_IMODE(out.stat().st_mode) == 0o700
    assert {p.name: stat.S_IMODE(p.stat().st_mode) & 0o077 for p in out.iterdir() if p.name in files} == dict.fromkeys(
        files, 0
    )
    assert (out / "terraform.tfstate").read_text(encoding="utf-8") == "{}"


def test_a_kind_of_another_provider_is_refused() -> None:
    with pytest.raises(RequestError, match=r"no soperator for gcp\nhint: use vms or toolkit"):
        render(resolve_cluster(saved(tree("gcp"))), "soperator")
    assert set(section.PROVIDERS) == set(PROVIDERS) == set(get_args(section.Provider))


def test_ssh_from_is_refused_where_it_cannot_be_kept_and_passed_on_where_it_can() -> None:
    """Soperator's login node takes a connection from anywhere; Google's toolkit takes a list of networks."""
    with pytest.raises(RequestError, match=r"ssh_from cannot be kept by Soperator"):
        render(resolve_cluster(saved(tree("nebius"))), "soperator")
    settings = blueprint(sized("gcp", nodes=2))["network"]["settings"]
    assert settings == {"allowed_ssh_ip_ranges": ["203.0.113.0/24"]}


@pytest.mark.parametrize("first_id", [1, 2, 999_983, 4_294_967_295])
def test_every_port_that_a_job_script_chooses_is_open_inside_the_cluster(first_id: int) -> None:
    """MASTER_PORT of `job.sh`, by the function that it calls, and what else listens between nodes."""
    site = saved(sized("gcp", nodes=2))
    assert "MASTER_PORT=$(free_port)" in plan(["python", "train.py"], site=site, nodes=2).script
    functions = (data_folder("templates") / "shell" / "common.bash").read_text(encoding="utf-8")
    # bash's own UID cannot be set
    shell = functions.replace("UID", "user") + "for user in 0 1000 65535; do free_port; done"
    env = {"PATH": os.environ["PATH"], "HPCJOBS_SCHEDULER": "slurm", "HPCJOBS_JOB_ID": str(first_id)}
    chosen = subprocess.run(["bash", "-c", shell], env=env, capture_output=True, text=True, check=True).stdout.split()
    assert len(chosen) == 3
    # Open MPI, NCCL, Gloo and srun take ports from 1024 on or the kernel's ephemeral range; NFS, Slurm and ssh below.
    listening = {*map(int, chosen), 22, 1024, 2049, 6817, 6818, 6819, 32768, 60999, 65535}
    assert {
        port for port in listening if not is_open_inside(render(resolve_cluster(site))["network.tf"], port)
    } == set()


def is_open_inside(network: str, port: int) -> bool:
    """Whether the firewall between machines of the cluster, as rendered, lets TCP to ``port`` pass."""
    hcl2 = pytest.importorskip("hcl2")
    rules = [block for block in hcl2.loads(network)["resource"] if '"google_compute_firewall"' in str(block)]
    (inside,) = [body for rule in rules for kind in rule.values() for name, body in kind.items() if "inside" in name]
    for allow in inside["allow"]:
        if allow["protocol"].strip('"') != "tcp":
            continue
        ranges = [text.strip('"').partition("-") for text in allow.get("ports", ["0-65535"])]
        if any(int(low) <= port <= int(high or low) for low, _, high in ranges):
            return True
    return False


def test_jobs_of_a_rented_cluster_are_confined_to_what_they_asked_for() -> None:
    script = render(resolve_cluster(saved(sized("gcp", nodes=2))))["bootstrap.sh"]
    for line in (
        "ProctrackType=proctrack/cgroup",
        "TaskPlugin=task/cgroup,task/affinity",
        *(f"Constrain{what}=yes" for what in ("Cores", "RAMSpace", "Devices")),
    ):
        assert f"\n{line}\n" in script


def test_slurmd_waits_for_the_shared_filesystem_after_a_restart_of_the_machine() -> None:
    script = render(resolve_cluster(saved(sized("gcp", nodes=2))))["bootstrap.sh"]
    assert "slurmd.service.d/hpcjobs.conf" in script
    assert "RequiresMountsFor=$mount" in script
    assert "/etc/fstab" in script


def test_the_wheel_that_nodes_install_is_the_one_that_a_build_makes(tmp_path: Path) -> None:
    """File by file, but for files that name the tool that packed them, and those of interactive shells."""
    repository = Path(__file__).parents[3]
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(tmp_path), str(repository)]
    subprocess.run(command, check=True, capture_output=True)
    (built,) = tmp_path.glob("*.whl")
    wheel = build_wheel()
    assert wheel.name == built.name
    with zipfile.ZipFile(built) as expected, zipfile.ZipFile(io.BytesIO(wheel.content)) as packed:
        own = {"WHEEL", "RECORD", "METADATA", "LICENSE"}
        members = [archive.namelist() for archive in (expected, packed)]
        names = [{n for n in each if Path(n).name not in own and ".data/" not in n} for each in members]
        assert names[0] == names[1]
        assert {n for n in names[0] if expected.read(n) != packed.read(n)} == set()


def test_nodes_install_hpcjobs_by_content_and_never_by_name_from_an_index(tmp_path: Path) -> None:
    cluster = resolve_cluster(saved(sized("gcp", nodes=2)))
    files = render(cluster)
    write(files, tmp_path / "out", wheel_of(cluster))
    wheel = build_wheel()
    assert (tmp_path / "out" / wheel.name).read_bytes() == wheel.content
    assert f"wheel_sha256={wheel.sha256}" in files["bootstrap.sh"]
    assert "hpcjobs==" not in files["bootstrap.sh"]


def blueprint(site: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Module id -> module of the Cluster Toolkit blueprint for ``site``."""
    text = render(resolve_cluster(saved(site)), "toolkit")["blueprint.yaml"]
    (group,) = yaml.safe_load(text)["deployment_groups"]
    return {module["id"]: module for module in group["modules"]}


@pytest.mark.parametrize("capacity", ["ordinary", "spot", "reserved"])
def test_the_blueprint_says_what_the_site_says(capacity: str) -> None:
    site = sized("gcp", nodes=4, capacity=capacity)
    modules = blueprint(site)
    nodes = modules["t4_nodes"]["settings"]
    assert nodes["node_count_static"] + nodes["node_count_dynamic_max"] == 4
    assert nodes["guest_accelerator"] == [{"type": "nvidia-tesla-t4", "count": 1}]
    assert nodes["enable_spot_vm"] == (capacity == "spot")
    assert nodes.get("reservation_name") == ("our-nodes" if capacity == "reserved" else None)
    known: set[str] = set()
    for name, module in modules.items():
        assert set(module.get("use", [])) <= known, f"{name} uses a module that stands after it"
        known.add(name)


def test_a_blueprint_without_gpus_or_with_a_filestore() -> None:
    site = sized("gcp", nodes=2, gpus=False)
    site["cloud"]["shared"] = {"kind": "filestore", "mount": "/shared", "size": "2T"}
    modules = blueprint(site)
    assert "guest_accelerator" not in modules["t4_nodes"]["settings"]
    assert modules["shared"]["settings"] == {"filestore_tier": "ZONAL", "local_mount": "/shared", "size_gb": 2048}


def test_soperators_values_are_what_the_site_says() -> None:
    hcl2 = pytest.importorskip("hcl2")
    site = sized("nebius", nodes=16, capacity="reserved")
    site["cloud"]["network"]["open_to_world"] = True
    values = hcl2.loads(render(resolve_cluster(saved(site)), "soperator")["hpcjobs.auto.tfvars"])
    (workers,) = values["slurm_nodeset_workers"]
    assert workers["size"] == 16
    assert workers["resource"]["preset"] == '"8gpu-128vcpu-1600gb"'
    assert workers["gpu_cluster"]["infiniband_fabric"] == '"fabric-2"'
    assert workers["reservation_policy"]["reservation_ids"] == ['"our-nodes"']
    assert values["slurm_login_ssh_root_public_keys"] == [f'"{KEY}"']


@pytest.mark.parametrize("provider", PROVIDERS)
def test_checkov_finds_nothing_that_is_not_explained(provider: str, tmp_path: Path) -> None:
    checkov = shutil.which("checkov")
    if checkov is None:
        pytest.skip("checkov is not on PATH (pip install checkov, in an environment of its own)")
    write(render(resolve_cluster(saved(sized(provider, nodes=2)))), tmp_path / "out")
    arguments = (checkov, "--directory", str(tmp_path / "out"), "--quiet", "--compact", "--skip-download")
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
