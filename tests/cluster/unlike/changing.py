"""``sites init`` and ``sites check`` on clusters of five kinds, each of which is changed under its site file."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from commandline import Answer, ok, within

from hpcjobs import sandbox as sandboxes
from hpcjobs.processes.programs import run
from hpcjobs.sandbox import Sandbox, Shape

NO_ACCOUNTING = {
    "AccountingStorageType": "accounting_storage/none",
    **dict.fromkeys(("AccountingStorageEnforce", "AccountingStorageHost", "AccountingStoragePort"), ""),
    **dict.fromkeys(("AccountingStoragePass", "AccountingStoreFlags"), ""),
}


Init = Callable[..., Path]


class Cluster:
    """A sandbox shaped like a site file, and commands that change it."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.conf = Path(sandbox.slurm_conf)
        self.hosts = [host.name for host in sandbox.hosts]
        self._env = {"SLURM_CONF": sandbox.slurm_conf}

    def slurm(self, *arguments: str) -> str:
        answer = run([*arguments], env=self._env)
        assert answer.code == 0, answer
        return answer.out

    def update(self, *arguments: str) -> None:
        self.slurm("scontrol", "update", *arguments)

    def rename_partition(self, old: str, new: str) -> None:
        text = self.conf.read_text()
        assert f"PartitionName={old} " in text
        self.conf.write_text(text.replace(f"PartitionName={old} ", f"PartitionName={new} "))
        self.slurm("scontrol", "reconfigure")


@contextlib.contextmanager
def cluster_like(folder: Path, name: str, text: str, **shape: dict[str, str]) -> Iterator[Cluster]:
    """The sandbox of the site file ``text``, while it is up."""
    (folder / f"{name}.yaml").write_text(text)
    try:
        yield Cluster(sandboxes.up(Shape(like=str(folder / f"{name}.yaml"), **shape)))  # type: ignore[arg-type]
    finally:
        sandboxes.down()


@pytest.fixture
def init(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> Init:
    """Writes the site file ``ours`` from the live cluster; a login shell there has modules."""
    home = workdir / "home"
    (home / "modules" / "init").mkdir(parents=True)
    (home / "avail").write_text("openmpi/4.1\ncuda/12.4\n")
    (home / "modules" / "init" / "bash").write_text("module() { :; }\n")
    (home / ".bash_profile").write_text(f"MODULESHOME={home}/modules; module() {{ cat {home}/avail; }}\n")

    def write(cluster: Cluster, *answers: str) -> Path:
        with monkeypatch.context() as patch:
            patch.setenv("SLURM_CONF", str(cluster.conf))
            ok("sites", "init", "ours", *answers)
        return home / ".config" / "hpcjobs" / "site_configs" / "ours.yaml"

    return write


def is_green(cluster: Cluster, *, jobs: int) -> None:
    """A job runs by the file as it is written, and so does one in each partition."""
    ok("submit", "--site", "ours", "--wait", "hostname")
    answer = within("sites", "check", "ours", "--run", "--json")
    assert answer.code == 0, answer
    findings = answer.json["findings"]
    assert len([f for f in findings if re.fullmatch(r"job \d+ ran( in \S+)?", f["text"])]) == jobs, findings


def wrong(answer: Answer) -> dict[str, str]:
    """What the check calls wrong, by its subject."""
    assert answer.code == 1, answer
    return {f["subject"]: f["text"] for f in answer.json["findings"] if f["verdict"] == "wrong"}


def check(*arguments: str) -> Answer:
    return within("sites", "check", "ours", "--json", *arguments)


CPUS = """\
licenses: {matlab: 2}
partitions:
  cpu: {default: true, nodes: 2, node: {cpus: 4, mem: 4G}, max_time: 2h}
  whole: {nodes: 2, node: {cpus: 4, mem: 4G}}
  quiet: {nodes: 1, node: {cpus: 4, mem: 4G}}
"""


def test_cpus_with_whole_nodes_a_hidden_partition_licences_and_switches(
    workdir: Path, init: Init, tmp_path: Path
) -> None:
    topology = "SwitchName=leaf1 Nodes=cpus01\nSwitchName=leaf2 Nodes=cpus02\nSwitchName=top Switches=leaf[1-2]\n"
    settings = {"TopologyPlugin": "topology/tree"}
    partitions = {"whole": "OverSubscribe=EXCLUSIVE", "quiet": "Hidden=YES"}
    with cluster_like(
        tmp_path, "cpus", CPUS, settings=settings, partition_settings=partitions, files={"topology.conf": topology}
    ) as cluster:
        file = init(cluster, "--interface", "eth0", "--module", "openmpi")
        assert yaml.safe_load(file.read_text())["licenses"] == {"matlab": 2}
        is_green(cluster, jobs=3)
        shown = 'scontrol show job "$SLURM_JOB_ID"'
        arguments = ("submit", "--site", "ours", "--follow", "-p", "whole", "-n", "1", "-L", "matlab:2")
        job = ok(
            *arguments, "bash", "-c", f"{shown} | grep -o 'OverSubscribe=.*\\|Licenses=[^ ]*\\|NumCPUs=[0-9]*'"
        ).out
        assert "NumCPUs=4" in job
        assert "Licenses=matlab:2" in job
        assert "there are 2 of matlab" in within("submit", "--site", "ours", "-L", "matlab:3", "true").err
        far = ok("submit", "--site", "ours", "--follow", "-N", "2", "-o", "switches=2@1h", "hostname").out
        assert "cpus02" in far
        ok("submit", "--site", "ours", "--wait", "-p", "quiet", "hostname")

        cluster.update("partitionname=cpu", "maxtime=00:30:00")
        cluster.update(f"nodename={cluster.hosts[1]}", "state=drain", "reason=broken disk")
        (Path.home() / "avail").write_text("cuda/12.4\n")
        findings = wrong(check())
        assert findings["partitions.cpu.max_time"] == "is 02:00:00; MaxTime is 00:30:00"
        assert findings["modules"].startswith("module avail has no openmpi; ")
        notes = [f["text"] for f in check().json["findings"] if f["verdict"] == "note"]
        assert any(text.startswith("1 of 2 nodes start no job: cpus02 ") and "broken disk" in text for text in notes)
        cluster.update(f"nodename={cluster.hosts[0]}", "state=drain", "reason=maintenance")
        findings = wrong(check("--run", "--timeout", "1m"))
        assert findings["partitions.quiet"].startswith("1 of 1 nodes start no job: cpus01 ")
        assert "maintenance" in findings["partitions.quiet"]


GPUS = """\
partitions:
  gpu:
    nodes:
      - {count: 1, cpus: 4, mem: 4G, gpus: 2, gpu_model: v100, features: [old]}
      - {count: 1, cpus: 4, mem: 4G, gpu_models: [a100:1, 1g.5gb:2], features: [new]}
"""


def test_two_gpu_models_and_slices_in_one_partition(workdir: Path, init: Init, tmp_path: Path) -> None:
    with cluster_like(tmp_path, "gpus", GPUS, settings=NO_ACCOUNTING) as cluster:
        file = init(cluster)
        groups = yaml.safe_load(file.read_text())["partitions"]["gpu"]["nodes"]
        assert [group.get("gpu_models") or group["gpu_model"] for group in groups] == ["v100", ["a100:1", "1g.5gb:2"]]
        is_green(cluster, jobs=1)
        seen = {
            model: ok("submit", "--site", "ours", "--follow", "--gpus-per-node", model, "--ntasks-per-node", "1",
                      "bash", "-c", "echo $CUDA_VISIBLE_DEVICES on $SLURMD_NODENAME").out.split()[-3:]
            for model in ("v100:2", "1g.5gb:2", "a100:1")
        }  # fmt: skip
        assert seen["v100:2"] == ["0,1", "on", "gpus01"]
        assert seen["1g.5gb:2"][1:] == ["on", "gpus02"]
        assert len(seen["1g.5gb:2"][0].split(",")) == 2
        assert seen["a100:1"] == ["0", "on", "gpus02"]

        file.write_text(file.read_text().replace("v100", "h100"))
        text = wrong(check())["partitions.gpu.nodes"]
        assert text.startswith("gpu_model h100: the GRES of its nodes are called ")
        cluster.rename_partition("gpu", "accelerated")
        assert wrong(check())["partitions.gpu"].startswith("the cluster has no partition gpu; ")


QOS = """\
defaults: {account: physics, time: 30m}
qos: {normal: 1-0, long: 7-0}
partitions:
  short: {default: true, nodes: 1, node: {cpus: 4, mem: 4G}, qos: [normal], accounts: [physics]}
  long: {nodes: 1, node: {cpus: 4, mem: 4G}, qos: [long]}
"""


def test_accounts_and_qos_that_slurm_enforces(workdir: Path, init: Init, tmp_path: Path) -> None:
    with cluster_like(tmp_path, "qos", QOS) as cluster:
        init(cluster)
        is_green(cluster, jobs=2)
        cluster.slurm("sacctmgr", "-i", "modify", "qos", "long", "set", "MaxWall=1:00:00")
        cluster.update("partitionname=short", "allowaccounts=sandbox")
        findings = wrong(check("--run"))
        assert findings["qos.long"] == "is 7-00:00:00; MaxWall is 01:00:00"
        assert findings["partitions.short.accounts"] == "the partition takes sandbox"


BARE = "partitions: {all: {nodes: 2, node: {cpus: 4, mem: 4G}}}\n"


def test_no_accounting_at_all(workdir: Path, init: Init, tmp_path: Path) -> None:
    with cluster_like(tmp_path, "bare", BARE, settings=NO_ACCOUNTING) as cluster:
        file = init(cluster)
        assert "sacct does not answer here" in file.read_text()
        is_green(cluster, jobs=1)
        cluster.rename_partition("all", "everything")
        text = wrong(check("--run"))["partitions.all"]
        assert text.startswith("the cluster has no partition all; ")


PLUGIN = """\
function slurm_job_submit(job, partitions, uid)
    slurm.log_user("Welcome to the centre")
    if job.time_limit == slurm.NO_VAL then
        slurm.log_user("Say how long your job may run.")
        return slurm.ERROR
    end
    REFUSAL
    return slurm.SUCCESS
end
function slurm_job_modify(job, record, partitions, uid)
    return slurm.SUCCESS
end
return slurm.SUCCESS
"""


def test_a_plugin_that_prints_and_refuses(workdir: Path, init: Init, tmp_path: Path) -> None:
    settings = {**NO_ACCOUNTING, "JobSubmitPlugins": "lua"}
    files = {"job_submit.lua": PLUGIN.replace("REFUSAL", "")}
    with cluster_like(tmp_path, "lua", BARE, settings=settings, files=files) as cluster:
        init(cluster)
        is_green(cluster, jobs=1)
        refused = within("submit", "--site", "ours", "-o", "time=", "true")
        assert refused.code == 7, refused
        assert "Say how long your job may run." in refused.err
        refusal = 'slurm.log_user("No jobs before noon.")\n    do return slurm.ERROR end'
        plugin = cluster.conf.parent / "job_submit.lua"
        plugin.write_text(PLUGIN.replace("REFUSAL", refusal))
        os.utime(plugin, (time.time() + 60,) * 2)  # Slurm reads it again when it is newer than the last reading
        text = wrong(check("--run"))["job with no GPU and no partition named by the default launcher"]
        assert "No jobs before noon." in text
