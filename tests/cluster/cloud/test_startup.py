"""The start-up script of the site gcp-t4, run for real: in Debian roots of several machines, joined by a network."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import yaml
from debian_machines import PATH, Machine, machines
from waiting import eventually

import hpcjobs
from hpcjobs.cloud.cluster import settle
from hpcjobs.cloud.render import render
from hpcjobs.data import shipped
from hpcjobs.site.library import load_site

pytestmark = pytest.mark.long  # packages come by apt and pip: a minute on a quiet machine, more on a busy one
REPOSITORY = Path(__file__).parents[3]
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
def wheels(work: Path) -> Path:
    """This checkout as a wheel: the one thing that pip gets here and the world does not have."""
    build = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(work / "wheels")]
    subprocess.run([*build, str(REPOSITORY)], check=True, capture_output=True)
    return work / "wheels"


@pytest.fixture(scope="module")
def script(work: Path) -> str:
    """What is rendered for the shipped site, with nothing but hpcjobs itself for pip to install."""
    site = yaml.safe_load((shipped("site_configs") / "gcp-t4.yaml").read_text(encoding="utf-8"))
    site["cloud"]["packages"] = [f"hpcjobs=={hpcjobs.__version__}"]
    (work / "gcp-t4.yaml").write_text(yaml.safe_dump(site, sort_keys=False), encoding="utf-8")
    return render(settle(load_site(str(work / "gcp-t4.yaml"))))["bootstrap.sh"]


@pytest.fixture(scope="module")
def baked(machine: None, work: Path, wheels: Path, script: str) -> Iterator[Path]:
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
        shutil.copytree(wheels, root / "wheels")
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
    pip["PIP_FIND_LINKS"] = f"/wheels {pip.get('PIP_FIND_LINKS', '')}".strip()
    told = {"HPCJOBS_ROLE": "head", "HPCJOBS_USER": "hpc", "HPCJOBS_SSH_KEYS": KEY, "HPCJOBS_SHARED": ""}
    # Packages that start services while they are installed must not do so here.
    (root / "usr" / "sbin" / "policy-rc.d").write_text("#!/bin/sh\nexit 101\n", encoding="utf-8")
    (root / "usr" / "sbin" / "policy-rc.d").chmod(0o755)
    isolated = ["unshare", "--pid", "--uts", "--fork", "--kill-child", "chroot", str(root)]
    done = subprocess.run(
        [*isolated, "bash", "/root/bootstrap.sh", "bake"],
        env={"PATH": PATH, "HOME": "/root", **pip, **told},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    (root / "usr" / "sbin" / "policy-rc.d").unlink()


def _start(machine: Machine, role: str) -> subprocess.Popen[str]:
    told = {"HPCJOBS_USER": "hpc", "HPCJOBS_SSH_KEYS": KEY, "HPCJOBS_SHARED": "10.99.0.11:/shared"}
    return machine.start("bash", "/root/bootstrap.sh", HPCJOBS_ROLE=role, **told)


@pytest.fixture(scope="module")
def cluster(work: Path, baked: Path) -> Iterator[Mapping[str, Machine]]:
    """A head and two workers, started at once; each worker has a GPU in name."""
    with machines(NAMES, work, baked) as running:
        for name, machine in running.items():
            machine.run("/usr/sbin/sshd")
            if name != NAMES[0]:
                machine.run("bash", "-c", "ln -s null /dev/nvidia0; ln -sf /bin/true /usr/local/bin/nvidia-smi")
        started = {n: _start(m, "head" if n == NAMES[0] else "worker") for n, m in running.items()}
        told = {name: process.communicate()[0] for name, process in started.items()}
        assert {n: p.returncode for n, p in started.items()} == dict.fromkeys(NAMES, 0), "\n".join(told.values())
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
    said = cluster[NAMES[0]].run("mpirun", "--hostfile", "/shared/hosts", "-np", "2", "hostname", user="hpc")
    assert sorted(line for line in said.split() if line.startswith("gcp-t4")) == ["gcp-t4-1", "gcp-t4-2"]


def test_hpcjobs_is_there_for_the_user(cluster: Mapping[str, Machine]) -> None:
    for machine in cluster.values():
        said = machine.run("bash", "-lc", ". ~/.bashrc; hpcjobs --version", user="hpc")
        assert said.strip() == f"hpcjobs {hpcjobs.__version__}"


@pytest.mark.timeout(280)
def test_a_job_submitted_on_the_head_runs_on_both_nodes_and_is_accounted_for(cluster: Mapping[str, Machine]) -> None:
    """By Slurm with munge, slurmdbd, GPUs as GRES, and the site file that the start-up script left."""
    head = cluster[NAMES[0]]
    submit = ". ~/.bashrc; hpcjobs submit -N 2 --wait bash -c 'echo rank $RANK on $(hostname) of $SLURM_GPUS_ON_NODE'"
    said = head.run("bash", "-c", submit, user="hpc")
    assert re.search(r"job \d+ COMPLETED on gcp-t4-\[1-2\]", said), said
    log = head.run("bash", "-c", ". ~/.bashrc; hpcjobs logs", user="hpc")
    assert {"rank 0 on gcp-t4-1 of 1", "rank 1 on gcp-t4-2 of 1"} <= {line.split(": ")[-1] for line in log.splitlines()}
    eventually(lambda: "COMPLETED|2" in head.run("sacct", "-nPX", "-o", "State,AllocNodes", user="hpc"))


def test_started_again_it_changes_nothing(cluster: Mapping[str, Machine]) -> None:
    """Keys, host names and the site stay; a second start is one of seconds."""
    kept = "sha256sum /etc/munge/munge.key /etc/hosts /etc/slurm/slurm.conf /shared/home/hpc/.ssh/* /shared/hosts"
    head = cluster[NAMES[0]]
    before = head.run("bash", "-c", kept)
    again = _start(head, "head")
    out, _ = again.communicate()
    assert again.returncode == 0, out
    assert "installing" not in out
    assert head.run("bash", "-c", kept) == before


def test_secrets_are_nobody_elses(cluster: Mapping[str, Machine]) -> None:
    head = cluster[NAMES[0]]
    modes = head.run("stat", "-c", "%a %U", "/etc/munge/munge.key", "/etc/slurm/slurmdbd.conf", "/shared/.cluster")
    assert modes.split() == ["400", "munge", "600", "root", "700", "root"]
    assert "Permission denied" in head.run("cat", "/shared/.cluster/munge.key", user="hpc", code=1)
