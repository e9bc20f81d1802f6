"""What cluster a shape and a site give, without building it."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

from hpcjobs.errors import RequestError
from hpcjobs.sandbox.folder import Folder
from hpcjobs.sandbox.layout import Shape, resolve_layout
from hpcjobs.sandbox.services import cgroup_conf, gres_conf, slurm_conf, write_modulefiles
from hpcjobs.site.library import load_site
from hpcjobs.site.models import NodeGroup, NodeShape, Partition, Resources, Site


def mixed_site() -> Site:
    """Two kinds of node, of which a cluster has many and few."""
    cpu = NodeShape(cpus=16, mem="64G")
    gpu = NodeShape(cpus=32, mem="256G", gpus=4, gpu_model="a100")
    return Site(
        name="big-9.x",
        partitions={
            "cpu": Partition(node=cpu, nodes=30, max_nodes=8, defaults=Resources(nodes=8, constraint="ib&new")),
            "gpu": Partition(node=gpu, nodes=10, qos=("gpu", "normal"), defaults=Resources(account="grant42")),
            "all": Partition(node=cpu, nodes=20),
        },
        qos={"gpu": "1h"},
    )


def test_a_site_is_scaled_down_to_the_nodes_asked_for_and_its_partitions_overlap() -> None:
    """tu-hpc in four hosts: every partition has all of them, but for short, which has its two."""
    layout = resolve_layout(Shape(like="tu-hpc", nodes=4), load_site("tu-hpc"))
    assert [host.name for host in layout.hosts] == ["tu01", "tu02", "tu03", "tu04"]
    assert [host.address for host in layout.hosts] == ["10.78.0.11", "10.78.0.12", "10.78.0.13", "10.78.0.14"]
    members = {name: len(hosts) for name, hosts in layout.members.items()}
    assert members == {"compute": 4, "short": 2, "long": 4, "scavenger": 4}
    assert layout.partitions["compute"].max_nodes == 4
    assert layout.partitions["short"].max_nodes == 2


def test_settings_of_another_site_take_the_place_of_the_sandboxes_own() -> None:
    changes = {"JobRequeue": "0", "AccountingStoragePort": "", "PrivateData": "jobs"}
    shape = Shape(like="tu-hpc", nodes=4, settings=changes, partition_settings={"short": "Hidden=YES"})
    lines = slurm_conf(resolve_layout(shape, load_site("tu-hpc")), Folder(Path("/x"))).splitlines()
    assert [line for line in lines if line.startswith(tuple(changes))] == ["JobRequeue=0", "PrivateData=jobs"]
    assert [line.split()[0] for line in lines if line.endswith("Hidden=YES")] == ["PartitionName=short"]


def test_kinds_of_node_share_the_hosts_in_proportion_and_each_has_one() -> None:
    """30 and 10 nodes in four hosts are three and one; partitions of one kind share hosts."""
    layout = resolve_layout(Shape(like="big", nodes=4), mixed_site())
    assert layout.members["cpu"] == layout.members["all"] == ("big01", "big02", "big03")
    assert [len(layout.members[name]) for name in ("cpu", "gpu", "all")] == [3, 1, 3]
    assert not set(layout.members["cpu"]) & set(layout.members["gpu"])


def test_the_sites_modules_are_empty_modulefiles_of_the_hosts(tmp_path: Path) -> None:
    """Of a name and its versions the versions are files; a path is a file of the real site."""
    site = msgspec.structs.replace(mixed_site(), modules=("gcc", "gcc/12.2", "mpi/openmpi-x86_64", "/opt/x", "../y"))
    layout = resolve_layout(Shape(like="big"), site, has_modules=True)
    assert layout.overlay["modules"] == ["gcc", "gcc/12.2", "mpi/openmpi-x86_64"]
    write_modulefiles(Folder(tmp_path), layout.modules)
    files = sorted(path for path in (tmp_path / "modulefiles").rglob("*") if path.is_file())
    assert [str(path.relative_to(tmp_path / "modulefiles")) for path in files] == ["gcc/12.2", "mpi/openmpi-x86_64"]
    assert resolve_layout(Shape(like="big"), site).overlay["modules"] == []


def test_where_slurm_has_no_pmix_its_tasks_find_each_other_by_what_it_has() -> None:
    """Debian took PMIx out of its packages of Slurm."""
    site = mixed_site()
    assert resolve_layout(Shape(like="big"), site).mpi == "pmix"
    layout = resolve_layout(Shape(like="big"), site, mpi_types={"none", "pmi2", "cray_shasta"})
    assert (layout.mpi, layout.overlay["mpi"]) == ("pmi2", "pmi2")
    assert resolve_layout(Shape(like="big"), site, mpi_types=()).mpi == "none"


def several_shapes() -> Site:
    """A partition of two kinds of node, one that shares the first kind, and limits of every sort."""
    small = NodeGroup(count=10, cpus=4, mem="4000M", gpus=4, gpu_model="v100", features=("v100", "ib"))
    large = NodeGroup(count=2, cpus=8, mem="8G", features=("a",))
    return Site(
        name="several",
        partitions={
            "both": Partition(nodes=(small, large), max_cpus_per_node=3, defaults=Resources(nodes="2-40")),
            "small": Partition(
                nodes=(small,), min_nodes=5, max_mem_per_cpu="1000", accounts=("physics",), preemptible="suspend"
            ),
        },
    )


def test_a_partition_of_several_shapes_has_hosts_of_each() -> None:
    layout = resolve_layout(Shape(like="several", nodes=4), several_shapes())
    assert layout.members["both"] == ("several01", "several02", "several03", "several04")
    assert layout.members["small"] == layout.members["both"][:3]
    assert [group.count for group in layout.partitions["both"].groups] == [3, 1]
    assert layout.partitions["both"].defaults.nodes == "2-4"
    assert layout.partitions["small"].min_nodes == 3
    assert "physics" in layout.accounts


def test_slurm_conf_has_shapes_features_limits_and_suspension() -> None:
    text = slurm_conf(resolve_layout(Shape(like="several", nodes=4), several_shapes()), Folder(Path("/var/lib/x")))
    lines = {line.split()[0]: line for line in text.splitlines() if line.startswith(("PartitionName", "NodeName"))}
    assert lines["NodeName=several01"].endswith("Gres=gpu:v100:4 Feature=v100,ib")
    assert lines["NodeName=several04"].endswith("RealMemory=8192 TmpDisk=20480 State=UNKNOWN Feature=a")
    assert "MaxCPUsPerNode=3" in lines["PartitionName=both"]
    assert "MinNodes=3 MaxMemPerCPU=1000 AllowAccounts=physics" in lines["PartitionName=small"]
    assert lines["PartitionName=small"].endswith("PreemptMode=SUSPEND")
    assert "PreemptMode=SUSPEND,GANG" in text


def test_a_default_of_more_nodes_than_there_are_is_clipped() -> None:
    """Else each job that does not set --nodes would be refused."""
    layout = resolve_layout(Shape(like="big", nodes=2), mixed_site())
    assert layout.overlay["partitions"]["cpu"]["defaults"]["nodes"] == 1
    assert layout.overlay["partitions"]["cpu"]["max_nodes"] == 1


def test_accounts_qos_and_features_that_the_site_names_exist() -> None:
    """A site's defaults must be accepted by the cluster that plays it."""
    layout = resolve_layout(Shape(like="big", nodes=2), mixed_site())
    assert layout.accounts == ("sandbox", "grant42")
    assert layout.qos == {"normal": "", "gpu": "1h"}
    assert layout.features == ("ib", "new")


def test_the_overlay_is_a_site_with_this_machines_software() -> None:
    """Modules, conda and set-up lines of the real site are not on this machine; its env is kept."""
    site = load_site("tu-hpc")
    layout = resolve_layout(Shape(like="tu-hpc", nodes=4), site)
    played = msgspec.convert(msgspec.to_builtins(site) | layout.overlay, Site)
    assert (played.modules, played.setup, played.environment.conda, played.module_init) == ((), (), None, None)
    assert played.python == sys.executable
    assert (played.interface, played.address_suffix, played.mpi) == ("eth0", "", "pmix")
    assert played.node_local == ("/tmp", "/var/tmp", "/dev/shm")
    assert played.env == site.env
    assert played.partitions == layout.partitions
    assert played.defaults == site.defaults


def test_without_like_the_shape_is_that_of_the_options() -> None:
    """Nodes, CPUs and GPUs replace those of the base site."""
    layout = resolve_layout(Shape(nodes=6, cpus_per_node=3, gpus_per_node=2), load_site("sandbox"))
    assert len(layout.hosts) == 6
    assert {(host.shape.cpus, host.shape.gpus) for host in layout.hosts} == {(3, 2)}
    assert layout.overlay["partitions"]["cpu"]["nodes"] == 6


@pytest.mark.parametrize(
    ("shape", "site", "says"),
    [
        (Shape(like="tu-hpc", nodes=9), "tu-hpc", "the site has 8"),
        (Shape(like="tu-hpc", cpus_per_node=2), "tu-hpc", "from the site"),
        (Shape(like="a10g-box"), "a10g-box", "no Slurm"),
        (Shape(nodes=0), "sandbox", "1 to 64"),
        (Shape(nodes=65), "sandbox", "1 to 64"),
        (Shape(gpus_per_node=-1), "sandbox", "0 to 64"),
        (Shape(proctrack="pgid"), "sandbox", "linuxproc or cgroup"),
    ],
)
def test_a_shape_that_does_not_fit_is_refused(shape: Shape, site: str, says: str) -> None:
    """The message says what is there, not only what is wrong."""
    with pytest.raises(RequestError, match=says):
        resolve_layout(shape, load_site(site))


def test_too_few_hosts_for_the_kinds_of_node_are_refused() -> None:
    """One host cannot be a CPU node and a GPU node."""
    with pytest.raises(RequestError, match="2 kinds of node"):
        resolve_layout(Shape(like="big", nodes=1), mixed_site())


def test_slurm_conf_says_the_limits_of_the_site() -> None:
    """Read as its administrator would read it."""
    text = slurm_conf(resolve_layout(Shape(like="tu-hpc", nodes=4), load_site("tu-hpc")), Folder(Path("/var/lib/x")))
    lines = {line.split()[0]: line for line in text.splitlines() if line.startswith(("PartitionName", "NodeName"))}
    assert "CoresPerSocket=16 ThreadsPerCore=1 RealMemory=65536" in lines["NodeName=tu03"]
    assert lines["PartitionName=compute"].split()[1:] == [
        "Nodes=tu01,tu02,tu03,tu04",
        "State=UP",
        "Default=YES",
        "MaxTime=2-00:00:00",
        "MaxNodes=4",
        "DefMemPerCPU=4096",
        "PriorityTier=2",
        "PreemptMode=OFF",
    ]
    assert lines["PartitionName=scavenger"].endswith(" PriorityTier=1 PreemptMode=REQUEUE GraceTime=60")
    assert "PreemptType=preempt/partition_prio" in text
    assert "Nodes=tu01,tu02 " in lines["PartitionName=short"]
    assert "AllowQos=long" in lines["PartitionName=long"]
    assert "GresTypes" not in text


def test_processes_are_known_by_cgroups_where_that_was_asked_for() -> None:
    folder = Folder(Path("/var/lib/x"))
    plain, with_cgroup = (resolve_layout(Shape(proctrack=how), load_site("sandbox")) for how in (None, "cgroup"))
    assert "ProctrackType=proctrack/linuxproc\n" in slurm_conf(plain, folder)
    assert "ProctrackType=proctrack/cgroup\n" in slurm_conf(with_cgroup, folder)
    assert (
        cgroup_conf(with_cgroup, folder, version=(22, 5))
        == f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={folder.cgroups}\n"
    )
    assert cgroup_conf(plain, folder, version=(22, 5)) is None
    assert cgroup_conf(plain, folder, version=(24, 11)) == "CgroupPlugin=disabled\n"
    own_file = resolve_layout(Shape(files={"cgroup.conf": "ConstrainRAMSpace=yes\n"}), load_site("sandbox"))
    assert cgroup_conf(own_file, folder, version=(24, 11)) is None


def test_gpus_are_gres_with_their_model_and_device_files() -> None:
    """Slurm counts files; the fake ones are the sandbox's own."""
    layout, folder = resolve_layout(Shape(like="big", nodes=2), mixed_site()), Folder(Path("/var/lib/x"))
    (gpu_host,) = layout.members["gpu"]
    assert gres_conf(layout, folder) == f"NodeName={gpu_host} Name=gpu Type=a100 File={folder.devices}/gpu[0-3]\n"
    assert "GresTypes=gpu\nAccountingStorageTRES=gres/gpu\n" in slurm_conf(layout, folder)


def test_gpus_are_no_matter_of_the_accounting_where_there_is_none() -> None:
    """slurmctld refuses AccountingStorageTRES=gres/gpu without slurmdbd."""
    settings = {"AccountingStorageType": "accounting_storage/none"}
    for shape, accounted in ((Shape(), True), (Shape(settings=settings), False)):
        text = slurm_conf(resolve_layout(shape, load_site("gcp-t4")), Folder(Path("/s")))
        assert "GresTypes=gpu\n" in text
        assert ("AccountingStorageTRES" in text) is accounted
