"""Launchers: what they would run on a cluster, and real worlds of this machine."""

from __future__ import annotations

import os
import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
from commandline import Answer, hpcjobs

import hpcjobs as api
from hpcjobs.errors import RequestError
from hpcjobs.site.models import Site

PROGRAM = """
import os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GREETING")
print(*(os.environ.get(name, "-") for name in names))
sys.exit(7 if sys.argv[1:] == ["fail"] and os.environ["RANK"] == "1" else 0)
"""
HOSTS = """
scheduler: local
launchers: [mpirun, horovodrun, spawn]
partitions:
  cloud: {nodes: 2, node: {cpus: 8}}
defaults: {nodelist: "gpu-node-1,gpu-node-2", nodes: 2}
interface: eth0
env: {NCCL_DEBUG: INFO}
"""


def script(site: str | Site, launcher: str, **resources: object) -> str:
    return api.plan(["/bin/true"], site=site, launcher=launcher, chdir="/", made_by="a test", **resources).script


def test_mpirun_in_an_allocation_puts_the_ranks_on_the_nodes_and_forwards_the_sites_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("USER", "you")
    text = script("gcp-t4", "mpirun", nodes=2, ntasks_per_node=1)
    assert 'mpirun -np "$HPCJOBS_NTASKS" --map-by ppr:1:node --bind-to none "${_hj_forward[@]}" bash ' in text
    forwarded = set(re.findall(r"\w+", next(line for line in text.splitlines() if line.startswith("for _hj_name"))))
    assert {"PATH", "LD_LIBRARY_PATH", "NCCL_DEBUG", "HPCJOBS_", "MASTER_ADDR"} <= forwarded
    assert "export OMPI_MCA_btl_tcp_if_include=eth0" in text


def test_mpirun_over_hosts_without_a_scheduler(here: Path) -> None:
    (here / "cloud.yaml").write_text(HOSTS, encoding="utf-8")
    text = script(str(here / "cloud.yaml"), "mpirun")
    assert "--host gpu-node-1:1,gpu-node-2:1 " in text
    assert "MASTER_ADDR=gpu-node-1\n" in text
    assert "GLOO_SOCKET_IFNAME=eth0" in text
    assert "_hj_nodes=gpu-node-1,gpu-node-2\n" in text
    text = script(str(here / "cloud.yaml"), "horovodrun", ntasks_per_node=2)
    assert "-H gpu-node-1:2,gpu-node-2:2 --network-interfaces eth0" in text


def test_more_nodes_than_hosts_and_launchers_that_stay_here_are_refused(here: Path) -> None:
    (here / "cloud.yaml").write_text(HOSTS.replace("nodes: 2}\ninterface", "nodes: 1}\ninterface"), encoding="utf-8")
    with pytest.raises(RequestError, match="launcher spawn starts tasks on this machine only"):
        script(str(here / "cloud.yaml"), "spawn")
    with pytest.raises(RequestError, match=r"nodes=2 .*names 1 hosts"):
        script(str(here / "cloud.yaml"), "mpirun", nodes=2, nodelist="gpu-node-1")


def test_horovod_gloo_tells_each_task_its_place_and_needs_no_mpi() -> None:
    text = script("tu-hpc", "horovod-gloo", nodes=2, ntasks_per_node=4)
    assert "HOROVOD_CONTROLLER=gloo HOROVOD_CPU_OPERATIONS=gloo HOROVOD_GLOO_IFACE=eth0" in text
    assert "mpirun" not in text


@pytest.fixture
def submit(here: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setenv("HPCJOBS_LOCAL_CPUS", "4")
    (here / "show.py").write_text(PROGRAM, encoding="utf-8")

    def call(launcher: str, *arguments: str) -> tuple[Answer, str]:
        layout = ("--site", "local", "--ntasks-per-node", "2", "--launcher", launcher, "--name", "job")
        answer = hpcjobs("submit", *layout, "--env", "GREETING=बिहान", "--wait", *arguments, timeout_s=280)
        logs = sorted(path for folder in here.glob("runs/job-*") for path in (folder / "logs").iterdir())
        return answer, "".join(path.read_text(encoding="utf-8") for path in logs)

    return call


def needs(launcher: str) -> None:
    if launcher == "mpirun" and shutil.which("mpirun") is None:
        pytest.skip("mpirun is not on this machine")
    if launcher != "mpirun" and find_spec("horovod.runner") is None:
        pytest.skip("Horovod is not installed (make horovod)")


@pytest.mark.parametrize("launcher", ["mpirun", "horovod-gloo", "horovodrun"])
def test_two_ranks_of_this_machine_know_their_places_and_lines_are_labelled(launcher: str, submit: object) -> None:
    needs(launcher)
    answer, log = submit(launcher, "show.py")  # type: ignore[operator]
    assert answer.code == 0, (answer, log)
    assert sorted(re.findall(r"(?m)^\d: .*$", log)) == ["0: 0 0 2 2 0 बिहान", "1: 1 1 2 2 0 बिहान"], log


@pytest.mark.parametrize("launcher", ["mpirun", "horovod-gloo", "horovodrun"])
def test_the_rank_that_fails_first_is_named_and_its_code_is_the_jobs(launcher: str, submit: object) -> None:
    needs(launcher)
    answer, log = submit(launcher, "show.py", "fail")  # type: ignore[operator]
    assert answer.code == 7, (answer, log)
    assert "first failure: rank 1 on " in answer.err


def test_an_mpirun_that_starts_worlds_of_one_ends_the_job(
    submit: object, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Open MPI's does with a library of another MPI: every process believes to be alone."""
    fake = here / "bin" / "mpirun"
    fake.parent.mkdir()
    fake.write_text(
        '#!/bin/bash\n[ "$1" = --version ] && echo "mpirun (Open MPI) 4.1.4" && exit\n'
        'while [ "$1" != bash ]; do shift; done\n'
        "export OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_LOCAL_RANK=0\n"
        "export OMPI_COMM_WORLD_SIZE=1 OMPI_COMM_WORLD_LOCAL_SIZE=1\n"
        'exec "$@"\n',
        encoding="utf-8",
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
    answer, log = submit("mpirun", "show.py")  # type: ignore[operator]
    assert answer.code == 10
    assert "WORLD_SIZE is 1, expected 2; started by mpirun" in log


def test_an_mpirun_of_another_mpi_is_refused_before_anything_starts(
    submit: object, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = here / "bin" / "mpirun"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\necho 'HYDRA build details:'\n", encoding="utf-8")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
    answer, log = submit("mpirun", "show.py")  # type: ignore[operator]
    assert answer.code == 1
    assert "no mpirun of Open MPI in the job's PATH" in log
