"""The start-up script of the site gcp-t4, run for real: in Debian roots of several machines, joined by a network."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import yaml
from debian_machines import PATH, Machine, machines
from waiting import eventually

import hpcjobs
from hpcjobs.cloud.render import render
from hpcjobs.cloud.section import resolve_cluster
from hpcjobs.data import data_folder
from hpcjobs.packing import build_wheel
from hpcjobs.site.library import load_site

pytestmark = pytest.mark.long  # packages come by apt and pip: a minute on a quiet machine, more on a busy one
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIG9uZSBrZXkgdGhhdCBub2JvZHkgaGFzIGF0IGFsbA you@laptop"
NAMES = ("gcp-t4-head", "gcp-t4-1", "gcp-t4-2")
BASE = Path(os.environ.get("HPCJOBS_TEST_ROOT") or "/")
"""The Debian that the machines start from: this one, or an empty one that somebody made by mmdebstrap."""


@pytest.fixture(scope="module")
def work() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(dir="/var/tmp"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def script(work: Path) -> str:
    """What is rendered for the shipped site, without torch: a gigabyte that no test here needs."""
    site = yaml.safe_load((data_folder("site_configs") / "gcp-t4.yaml").read_text(encoding="utf-8"))
    del site["cloud"]["horovod"]
    (work / "gcp-t4.yaml").write_text(yaml.safe_dump(site, sort_keys=False), encoding="utf-8")
    text = render(resolve_cluster(load_site(str(work / "gcp-t4.yaml"))))["bootstrap.sh"]
    assert "wheel_extras='[train,digits,mpi]'" in text
    return text.replace("wheel_extras='[train,digits,mpi]'", "wheel_extras=''")


@pytest.fixture(scope="module")
def baked(machine: None, work: Path, script: str) -> Iterator[Path]:
    """A Debian root in which `bootstrap.sh bake` has installed everything, by the network that this machine has."""
    layers = work / "baked"
    for name in ("upper", "work", "root"):
        (layers / name).mkdir(parents=True)
    root = layers / "root"
    options = f"lowerdir={BASE},upperdir={layers}/upper,workdir={layers}/work"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, str(root)], check=True)
    try:
        for folder in ("proc", "dev", "run/lock"):
            (root / folder).mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", "--rbind", "--make-rslave", "/dev", str(root / "dev")], check=True)
        subprocess.run(["mount", "-t", "proc", "proc", str(root / "proc")], check=True)
        if str(BASE) != "/":
            _like_here(root)
        _bake(root, script)
        yield root
    finally:
        subprocess.run(["umount", "--recursive", str(root)], check=True)


def _like_here(root: Path) -> None:
    """What a machine of the provider would bring or find: name servers, mirrors, certificates."""
    for name in ("etc/resolv.conf", "etc/pip.conf", "etc/ssl/certs/ca-certificates.crt"):
        if (source := Path("/") / name).is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, root / name)


def _bake(root: Path, script: str) -> None:
    (root / "root" / "bootstrap.sh").write_text(script, encoding="utf-8")
    pip = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    wheel = build_wheel()
    (root / "root" / wheel.name).write_bytes(wheel.content)
    environment = {"HPCJOBS_ROLE": "head", "HPCJOBS_USER": "hpc", "HPCJOBS_SSH_KEYS": KEY, "HPCJOBS_SHARED": ""}
    # Packages that start services while they are installed must not do so here.
    (root / "usr" / "sbin" / "policy-rc.d").write_text("#!/bin/sh\nexit 101\n", encoding="utf-8")
    (root / "usr" / "sbin" / "policy-rc.d").chmod(0o755)
    isolated = ["unshare", "--pid", "--uts", "--fork", "--kill-child", "chroot", str(root)]
    done = subprocess.run(
        [*isolated, "bash", "/root/bootstrap.sh", "bake"],
        env={"PATH": PATH, "HOME": "/root", **pip, **environment},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    (root / "usr" / "sbin" / "policy-rc.d").unlink()


def _start(machine: Machine, role: str) -> subprocess.Popen[str]:
    environment = {"HPCJOBS_USER": "hpc", "HPCJOBS_SSH_KEYS": KEY, "HPCJOBS_SHARED": "10.99.0.11:/shared"}
    return machine.start("bash", "/root/bootstrap.sh", HPCJOBS_ROLE=role, **environment)


@pytest.fixture(scope="module")
def cluster(work: Path, baked: Path) -> Iterator[Mapping[str, Machine]]:
    """A head and two workers, started at once; each worker has a GPU in name."""
    with machines(NAMES, work, baked) as running:
        for name, machine in running.items():
            machine.run("/usr/sbin/sshd")
            if name != NAMES[0]:
                # /dev/full's device, which nobody else reads: a job without GPUs must not.
                machine.run("mknod", "-m", "666", "/dev/gpu0-of-the-test", "c", "1", "7")
                machine.run("ln", "-s", "gpu0-of-the-test", "/dev/nvidia0")
                machine.run("ln", "-sf", "/bin/true", "/usr/local/bin/nvidia-smi")
        started = {n: _start(m, "head" if n == NAMES[0] else "worker") for n, m in running.items()}
        outputs = {name: process.communicate()[0] for name, process in started.items()}
        assert {n: p.returncode for n, p in started.items()} == dict.fromkeys(NAMES, 0), "\n".join(outputs.values())
        for machine in running.values():  # a timer of systemd's, which is not here
            machine.run("/usr/local/sbin/hpcjobs-nodes")
        _await_idle(running[NAMES[0]])
        yield running


def _await_idle(head: Machine) -> None:
    until = time.monotonic() + 120
    while (states := head.run("sinfo", "-hN", "-o", "%t").split()) != ["idle", "idle"]:
        assert time.monotonic() < until, f"{states}: {head.run('sinfo', '-R')}"
        time.sleep(0.5)


def test_mpirun_runs_two_ranks_on_two_nodes_without_a_question(cluster: Mapping[str, Machine]) -> None:
    """By the host list that the machines made of what each said, over ssh with the key that the head made."""
    answer = cluster[NAMES[0]].run("mpirun", "--hostfile", "/shared/hosts", "-np", "2", "hostname", user="hpc")
    assert sorted(line for line in answer.split() if line.startswith("gcp-t4")) == ["gcp-t4-1", "gcp-t4-2"]


def test_hpcjobs_is_there_for_the_user(cluster: Mapping[str, Machine]) -> None:
    for machine in cluster.values():
        answer = machine.run("bash", "-lc", ". ~/.bashrc; hpcjobs --version", user="hpc")
        assert answer.strip() == f"hpcjobs {hpcjobs.__version__}"


@pytest.mark.timeout(280)
def test_a_job_submitted_on_the_head_runs_on_both_nodes_and_is_accounted_for(cluster: Mapping[str, Machine]) -> None:
    """By Slurm with munge, slurmdbd, GPUs as GRES, and the site file that the start-up script left."""
    head = cluster[NAMES[0]]
    submit = ". ~/.bashrc; hpcjobs submit -N 2 --wait bash -c 'echo rank $RANK on $(hostname) of $SLURM_GPUS_ON_NODE'"
    answer = head.run("bash", "-c", submit, user="hpc")
    assert re.search(r"job \d+ COMPLETED on gcp-t4-\[1-2\]", answer), answer
    log = head.run("bash", "-c", ". ~/.bashrc; hpcjobs logs", user="hpc")
    assert {"rank 0 on gcp-t4-1 of 1", "rank 1 on gcp-t4-2 of 1"} <= {line.split(": ")[-1] for line in log.splitlines()}
    eventually(lambda: "COMPLETED|2" in head.run("sacct", "-nPX", "-o", "State,AllocNodes", user="hpc"))


@pytest.mark.timeout(280)
def test_a_job_gets_the_memory_and_the_gpus_that_it_asked_for_and_no_more(cluster: Mapping[str, Machine]) -> None:
    """By the cgroups of this kernel, of whichever version."""
    head = cluster[NAMES[0]]
    take = "python3 -c 'x = bytearray(400 << 20); print(len(x))'"
    fits = head.run("srun", "-N1", "-n1", "--mem=600M", "bash", "-c", take, user="hpc")
    assert str(400 << 20) in fits
    kill = head.start("srun", "-N1", "-n1", "--mem=100M", "bash", "-c", take, user="hpc")
    out, _ = kill.communicate()
    assert kill.returncode != 0, out
    assert "Out Of Memory" in out or "oom" in out.lower() or "Killed" in out, out
    read = "head -c 1 /dev/gpu0-of-the-test | wc -c"
    assert head.run("srun", "-N1", "-n1", "--gres=gpu:1", "bash", "-c", read, user="hpc").strip() == "1"
    denied = head.run("srun", "-N1", "-n1", "--gres=none", "bash", "-c", read, user="hpc")
    assert "Operation not permitted" in denied, denied


@pytest.mark.timeout(280)
def test_a_node_that_restarts_in_the_middle_of_a_queue_comes_back_and_runs_the_rest(
    cluster: Mapping[str, Machine],
) -> None:
    """All of its processes end, and its start-up script runs again: as a restart of the machine does."""
    head, worker = cluster[NAMES[0]], cluster[NAMES[1]]
    sbatch = ("sbatch", "--parsable", "-N2", "--exclusive", "--output=/dev/null", "--wrap")
    first = head.run(*sbatch, "srun sleep 1000", user="hpc").strip()
    queued = [head.run(*sbatch, "srun hostname", user="hpc").strip() for _ in range(2)]
    eventually(lambda: "RUNNING" in head.run("squeue", "-h", "-j", first, "-o", "%T"))
    worker.run("bash", "-c", "pkill -KILL slurmd; pkill -KILL slurmstepd; pkill -KILL munged; true")
    started = _start(worker, "worker")
    out, _ = started.communicate()
    assert started.returncode == 0, out
    head.run("scancel", first)

    def states() -> set[str]:
        return set(head.run("sacct", "-nPX", "-o", "State", "-j", ",".join(queued), user="hpc").split())

    eventually(lambda: states() == {"COMPLETED"}, timeout_s=180)
    mounts = worker.run("cat", "/etc/fstab", "/etc/systemd/system/slurmd.service.d/hpcjobs.conf")
    assert "10.99.0.11:/shared /shared nfs vers=4.1,hard,noatime,nconnect=4,_netdev,nofail 0 0" in mounts
    assert "RequiresMountsFor=/shared" in mounts


def test_a_wheel_with_other_content_is_not_installed(cluster: Mapping[str, Machine], script: str) -> None:
    head = cluster[NAMES[0]]
    name = build_wheel().name
    check = "sed -n '/^find_wheel/,/^}/p; /^put()/,/^}/p; /^say()/p' /root/bootstrap.sh"
    settings = f"inside=/run/wheel home=/run/other wheel={name} wheel_sha256={build_wheel().sha256}"
    arguments = f'{settings}; eval "$({check})"; find_wheel'
    head.run("bash", "-c", f"mkdir -p /run/other; echo other >/run/other/{name}")
    out = head.run("bash", "-c", f"cd /run; {arguments.replace('BASH_SOURCE', 'NONE')}", code=1)
    assert "is not the wheel that this cluster was made with" in out
    assert head.run("ls", "/run/wheel") == ""


def test_started_again_it_changes_nothing(cluster: Mapping[str, Machine]) -> None:
    """Keys, host names and the site stay; a second start is one of seconds."""
    checksums = "sha256sum /etc/munge/munge.key /etc/hosts /etc/slurm/slurm.conf /shared/home/hpc/.ssh/* /shared/hosts"
    head = cluster[NAMES[0]]
    before = head.run("bash", "-c", checksums)
    again = _start(head, "head")
    out, _ = again.communicate()
    assert again.returncode == 0, out
    assert "installing" not in out
    assert head.run("bash", "-c", checksums) == before


def test_secrets_are_nobody_elses(cluster: Mapping[str, Machine]) -> None:
    head = cluster[NAMES[0]]
    modes = head.run("stat", "-c", "%a %U", "/etc/munge/munge.key", "/etc/slurm/slurmdbd.conf", "/shared/.cluster")
    assert modes.split() == ["400", "munge", "600", "root", "700", "root"]
    assert "Permission denied" in head.run("cat", "/shared/.cluster/munge.key", user="hpc", code=1)
