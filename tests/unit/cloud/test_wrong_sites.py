"""Site files that contradict themselves, the provider or good sense: each is refused with a message of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from site_folders import user_folder
from sites import NO_GPU, saved, sized, tree

from hpcjobs.cloud.provider import Machine
from hpcjobs.cloud.section import PROVIDERS, resolve_cluster
from hpcjobs.errors import ConfigError

Site = dict[str, Any]


def cloud(**fields: Any) -> Callable[[Site], None]:
    return lambda site: site["cloud"].update(fields)


def inside(section: str, **fields: Any) -> Callable[[Site], None]:
    return lambda site: site["cloud"].setdefault(section, {}).update(fields)


def partition(**fields: Any) -> Callable[[Site], None]:
    return lambda site: next(iter(site["partitions"].values())).update(fields)


def node(**fields: Any) -> Callable[[Site], None]:
    return lambda site: next(iter(site["partitions"].values()))["node"].update(fields)


ODD = ("", " ", "a b", "a\nb", "-x", "../..", "ü", '${file("/etc/passwd")}', "%{ if true }", "x" * 201)
WRONG: list[tuple[str, str, Callable[[Site], None], list[str]]] = [
    ("unknown key", "gcp", cloud(machin="x"), ["cloud.machin: unknown key", "did you mean 'machine'?"]),
    ("unknown nested key", "gcp", inside("shared", path="/x"), ["cloud.shared.path: unknown key"]),
    ("unknown provider", "gcp", cloud(provider="aws"), ["cloud.provider", "aws"]),
    ("unknown machine", "gcp", cloud(machine="n1-standard-9"), ["no machine type 'n1-standard-9'", "'n1-standard-"]),
    ("other provider's machine", "gcp", cloud(machine="cpu-d3/8vcpu-32gb"), ["a machine of nebius, not of gcp"]),
    ("unknown head", "gcp", inside("head", machine="tiny"), ["cloud.head.machine: gcp has no machine type 'tiny'"]),
    ("no zone", "gcp", cloud(zone=None), ["zone is missing: set one of us-central1"]),
    ("zone elsewhere", "gcp", cloud(zone="europe-west4-a"), ["europe-west4-a is not in region us-central1"]),
    ("zone of nebius", "nebius", cloud(zone="a"), ["a Nebius region has none"]),
    ("gpu it cannot have", "gcp", inside("gpu", model="h100"), ["n1-standard-8 cannot have h100: it may have t4"]),
    ("gpus it cannot have", "gcp", inside("gpu", count=3), ["n1-standard-8 has 1 or 2 or 4 x t4, not 3"]),
    ("no gpus said", "nebius", cloud(gpu=None), ["comes with 8 x h100: set gpu"]),
    ("no gpus", "gcp", inside("gpu", count=0), ["count must be positive"]),
    ("other cpus", "gcp", node(cpus=16), ["partitions.t4.node.cpus: 16, but n1-standard-8 has 8"]),
    ("more memory", "gcp", node(mem="64G"), ["partitions.t4.node.mem: 64G, but n1-standard-8 has 30G"]),
    ("other gpus", "gcp", node(gpus=2), ["partitions.t4.node.gpus: 2, but cloud.gpu says 1"]),
    ("other model", "gcp", node(gpu_model="l4"), ["partitions.t4.node.gpu_model: l4, but cloud.gpu says t4"]),
    ("other nodes", "gcp", partition(nodes=5), ["partitions.t4.nodes: 5, but cloud.nodes.max says 2"]),
    ("no such partition", "gcp", cloud(partition="t5"), ["no partition 't5'", "known: t4"]),
    ("max below min", "gcp", inside("nodes", min=3), ["max 2 is below min 3"]),
    ("spot and reserved", "gcp", cloud(spot=True, reservation="r"), ["reservation and spot exclude each other"]),
    ("price below zero", "gcp", inside("head", hour=-50), ["hour must be a number, finite and not negative"]),
    ("budget of nan", "gcp", cloud(budget={"amount": float("nan"), "hours": 1}), ["amount must be a positive number"]),
    ("budget of inf", "gcp", cloud(budget={"amount": 1, "hours": float("inf")}), ["hours must be a positive number"]),
    ("user of the image", "gcp", inside("ssh", user="ubuntu"), ["have a user of this name already"]),
    ("user of Slurm", "nebius", inside("ssh", user="slurm"), ["have a user of this name already"]),
    ("mount over the system", "gcp", inside("shared", mount="/etc"), ["would hide a folder of the system"]),
    (
        "network of IPv6",
        "gcp",
        inside("network", cidr="fd00::/64"),
        ["the cluster's own network is a part of 10.0.0.0/8"],
    ),
    (
        "network of all",
        "gcp",
        inside("network", cidr="0.0.0.0/0"),
        ["the cluster's own network is a part of 10.0.0.0/8"],
    ),
    (
        "size between the steps",
        "gcp",
        inside("shared", kind="filestore", size="1100G", tier="ZONAL"),
        ["1024G to 9984G in steps of 256G or 10240G to 102400G in steps of 2560G, not 1100G"],
    ),
    ("the whole world", "gcp", inside("network", ssh_from=["0.0.0.0/0"]), ["lets a large part of the world try"]),
    (
        "the whole world in halves",
        "gcp",
        inside("network", ssh_from=["0.0.0.0/1", "128.0.0.0/1"]),
        ["ssh_from 0.0.0.0/1, 128.0.0.0/1 lets a large part"],
    ),
    ("half of the world", "gcp", inside("network", ssh_from=["128.0.0.0/1"]), ["ssh_from 128.0.0.0/1 lets"]),
    ("no network", "gcp", inside("network", cidr="10.0.0.300/24"), ["cidr '10.0.0.300/24' is no network"]),
    ("small network", "gcp", inside("network", cidr="10.0.0.0/28"), ["has room for 0 nodes, not 2", "10.0.0.0/27"]),
    ("filestore at nebius", "nebius", inside("shared", kind="filestore"), ["filestore is GCP's"]),
    ("virtiofs at gcp", "gcp", inside("shared", kind="virtiofs"), ["virtiofs is Nebius'"]),
    ("small filestore", "gcp", inside("shared", kind="filestore"), ["a ZONAL filestore has 1024G to 9984G"]),
    (
        "a key for a tier without keys",
        "gcp",
        lambda site: site["cloud"].update(
            shared={"kind": "filestore", "mount": "/shared", "size": "1T", "tier": "BASIC_HDD"},
            disk={"encryption_key": "projects/p/locations/l/keyRings/r/cryptoKeys/k"},
        ),
        ["cloud.disk.encryption_key: a BASIC_HDD filestore cannot be encrypted with a key of yours"],
    ),
    ("tier of nfs", "gcp", inside("shared", tier="ZONAL"), ["tier belongs to filestore"]),
    ("size without unit", "gcp", inside("disk", size="100"), ["size: '100' has no unit; write 100G"]),
    ("runs not shared", "gcp", lambda site: site.update(run_root="/tmp/runs"), ["/tmp/runs is not on the shared"]),
    ("label", "gcp", cloud(labels={"Team": "NLP"}), ["labels Team=NLP"]),
    ("private key", "gcp", inside("ssh", keys=["-----BEGIN OPENSSH PRIVATE KEY-----"]), ["holds a private key"]),
    ("key file that is not there", "gcp", inside("ssh", keys=["gone.pub"]), ["gone.pub cannot be read"]),
    ("root", "gcp", inside("ssh", user="root"), ["have a user of this name already"]),
    ("an encryption key itself", "gcp", inside("disk", encryption_key="c2VjcmV0"), ["never a key"]),
    ("fabric without infiniband", "nebius", cloud(machine="gpu-h100-sxm/1gpu-16vcpu-200gb"), ["cloud.gpu.count"]),
    ("budget", "gcp", cloud(budget={"amount": 0, "hours": 1}), ["amount must be a positive number"]),
    *((f"region {odd!r}", "nebius", cloud(region=odd), ["region", "letters, digits"]) for odd in ODD),
    *((f"image {odd!r}", "nebius", cloud(image=odd), ["image", "letters, digits"]) for odd in ODD),
    *((f"head's image {odd!r}", "gcp", inside("head", image=odd), ["head.image", "letters, digits"]) for odd in ODD),
    *((f"disk {odd!r}", "nebius", inside("disk", type=odd), ["disk.type", "letters, digits"]) for odd in ODD),
    *((f"fabric {odd!r}", "nebius", inside("network", fabric=odd), ["network.fabric", "letters"]) for odd in ODD),
    (
        "project of gcp",
        "nebius",
        cloud(project="my-project"),
        ["project 'my-project': an id that starts with project-"],
    ),
    (
        "subnet",
        "nebius",
        inside("network", subnet="mine"),
        ["network.subnet 'mine': an id that starts with vpcsubnet-"],
    ),
    ("local", "gcp", lambda site: site.update(scheduler="local"), ["a cloud cluster runs slurm, not local"]),
]


@pytest.mark.parametrize(("provider", "spoil", "expected_message"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_a_wrong_site_is_refused_by_name(
    provider: str, spoil: Callable[[Site], None], expected_message: list[str]
) -> None:
    site = tree(provider)
    spoil(site)
    loaded = saved(site)
    with pytest.raises(ConfigError) as caught:
        resolve_cluster(loaded)
    message = str(caught.value)
    assert all(part in message for part in expected_message), message
    assert message.startswith(str(user_folder() / "rented.yaml"))


def test_every_wrong_site_has_a_message_of_its_own() -> None:
    messages = set()
    for _, provider, spoil, _ in WRONG:
        site = tree(provider)
        spoil(site)
        with pytest.raises(ConfigError) as caught:
            resolve_cluster(saved(site))
        messages.add(caught.value.message)
    assert len(messages) == len(WRONG)


def test_the_line_of_a_contradiction_is_named() -> None:
    site = saved(tree("gcp") | {"partitions": {"t4": {"nodes": 2, "node": {"cpus": 96}}}})
    with pytest.raises(ConfigError) as caught:
        resolve_cluster(site)
    line = int(str(caught.value).split(":")[1])
    assert "cpus: 96" in Path(site.path).read_text(encoding="utf-8").splitlines()[line - 1]


def test_a_site_without_a_cloud_section_says_where_one_is_shown() -> None:
    site = tree("gcp")
    del site["cloud"]
    with pytest.raises(ConfigError, match=r"has no cloud section\nhint: `hpcjobs help cloud.md`"):
        resolve_cluster(saved(site))


def test_a_name_that_no_machine_can_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="names the machines"):
        resolve_cluster(saved(sized("gcp", nodes=2), name="My_Cluster"))


def test_a_public_key_may_be_in_a_file_beside_the_site() -> None:
    site = tree("gcp")
    (key,) = site["cloud"]["ssh"]["keys"]
    site["cloud"]["ssh"]["keys"] = ["mine.pub"]
    loaded = saved(site)
    (user_folder() / "mine.pub").write_text(key + "\n", encoding="utf-8")
    assert resolve_cluster(loaded).ssh_keys == (key,)
    (user_folder() / "mine.pub").write_text("-----BEGIN OPENSSH PRIVATE KEY-----\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="does not hold one public key"):
        resolve_cluster(loaded)


def test_a_name_whose_service_account_would_end_with_a_hyphen_is_refused() -> None:
    with pytest.raises(ConfigError, match="which GCP refuses"):
        resolve_cluster(saved(sized("gcp", nodes=2), name="a" * 29))
    assert resolve_cluster(saved(sized("gcp", nodes=2), name="a" * 28)).name == "a" * 28


def test_a_machine_type_is_that_of_its_cloud_where_two_have_the_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = NO_GPU["gcp"]
    twin, other = Machine(name, 8, 29), Machine(name, 8, 30)
    for provider, machine in (("gcp", twin), ("nebius", other)):
        monkeypatch.setitem(PROVIDERS, provider, PROVIDERS[provider]._replace(machines=(machine,)))
    site = sized("gcp", nodes=1, gpus=False)
    site["cloud"]["head"] = {"machine": name}
    assert resolve_cluster(saved(site)).machine == twin
