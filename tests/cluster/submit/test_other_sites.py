"""What other clusters do differently, on a real Slurm."""

from __future__ import annotations

import json
import sys
import time

import pytest
from login_node import SITE as SITE_NAME
from login_node import Cluster
from waiting import eventually

from hpcjobs.runtime.exits import ExitCode
from hpcjobs.sandbox import services
from hpcjobs.sandbox.services import apt_line

SITE = {
    "partitions": {"compute": {"nodes": 4, "node": {"cpus": 16}}},
    "defaults": {"time": "10m"},
    "interface": "eth0",
}


def site_of(cluster: Cluster, **more: object) -> str:
    """A site file for the sandbox's cluster; its path."""
    path = cluster.folder / "other.yaml"
    path.write_text(json.dumps({**SITE, "slurm_conf": cluster.record.slurm_conf, **more}), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_tasks_have_the_scripts_environment_where_jobs_are_submitted_with_export_none(
    cluster: Cluster, launcher: str
) -> None:
    site = site_of(cluster, sbatch=["export=NONE"], env={"OF_THE_SITE": "yes"})
    arguments = ("-N", "2", "--ntasks-per-node", "1", "--launcher", launcher, "bash", "-c", 'echo "has $OF_THE_SITE"')
    answer = cluster.hpcjobs("submit", "--site", site, "--json", *arguments)
    assert answer.code == 0, answer
    job = cluster.took(answer.out).done()
    assert sorted(line for line in job.log.splitlines() if "has" in line) == ["0: has yes", "1: has yes"]


@pytest.mark.skipif(not services.available(), reason=apt_line([services.PACKAGE]))
def test_a_job_loads_the_modules_of_its_site_and_one_that_is_not_there_ends_it_by_name(cluster: Cluster) -> None:
    """By the hosts' own Environment Modules; openmpi is what tu-hpc names."""
    listed = cluster.submit("-N", "2", "--ntasks-per-node", "1", "bash", "-c", "module -t list 2>&1").done().log
    assert sorted(line for line in listed.splitlines() if "openmpi" in line) == ["0: openmpi", "1: openmpi"]
    arguments = ("submit", "--site", site_of(cluster, modules=["openmpi", "cuda/99"]), "--json", "true")
    job = cluster.took(cluster.hpcjobs(*arguments).out)
    assert job.wait().code == 1
    assert "Unable to locate a modulefile for 'cuda/99'" in job.log
    assert "module load cuda/99 failed" in job.log


def test_the_script_of_a_dry_run_runs_by_sbatch_alone(cluster: Cluster) -> None:
    """``hpcjobs submit --dry-run ... > job.sh; sbatch job.sh``, for a job and for an array."""
    for name, flags in (("one", ("-N", "2", "--ntasks-per-node", "1")), ("many", ("-a", "0-1"))):
        arguments = (
            "submit",
            "--site",
            SITE_NAME,
            "--dry-run",
            "--name",
            name,
            *flags,
            "bash",
            "-c",
            'echo "rank $RANK"',
        )
        answer = cluster.hpcjobs(*arguments)
        assert answer.code == 0, answer
        (cluster.folder / f"{name}.sh").write_text(answer.out)
        cluster.slurm("sbatch", "--wait", f"{name}.sh")
    (log,) = cluster.folder.glob("one_*.out")
    assert sorted(line for line in log.read_text().splitlines() if "rank" in line) == ["0: rank 0", "1: rank 1"]
    assert ["rank 0" in path.read_text() for path in cluster.folder.glob("many_*_[01].out")] == [True, True]
    states = [json.loads(path.read_text()) for path in cluster.folder.glob("runs/*/**/state.json")]
    assert [state["state"] for state in states] == ["COMPLETED"] * 3


TRAIN = (sys.executable, "-m", "hpcjobs.trainers.ddp", "--steps", "2", "--no-probe", "--device", "cpu")


def test_a_trainer_started_by_hand_in_the_shell_of_salloc_is_refused(cluster: Cluster) -> None:
    """The shell is what salloc starts where LaunchParameters has use_interactive_step."""
    step = ["srun", "--interactive", "--preserve-env", *TRAIN]
    shell = f"{' '.join(step)}; echo code=$?"
    out = cluster.slurm("salloc", "-Q", "-N", "2", "-n", "4", "bash", "-c", shell)
    assert f"code={int(ExitCode.WORLD_MISMATCH)}" in out


PLACE = """
import os, sys
from hpcjobs.runtime.dist import DistEnv
from hpcjobs.runtime.exits import UsageError
try:
    env = DistEnv.from_environ(os.environ)
except UsageError as error:
    sys.exit(f"refused: {error}")
print("rank", env.rank, "of", env.world_size, "meets at", env.master_addr, env.master_port, flush=True)
"""


def test_ranks_that_mpirun_starts_on_two_hosts_are_refused_without_a_master_and_agree_on_one(cluster: Cluster) -> None:
    """On the second host they run in a step of mpirun's daemon, whose node list and number are not theirs."""
    program = cluster.program("place.py", PLACE)
    mpirun = "mpirun --allow-run-as-root -np 2 --map-by ppr:1:node"
    python = f"{sys.executable} {program}"
    script = f"{mpirun} {python}; export MASTER_ADDR=tu01; {mpirun} -x MASTER_ADDR {python}"
    log = cluster.folder / "mpi.out"
    cluster.slurm("sbatch", "--wait", "-N", "2", "--ntasks-per-node=1", f"--output={log}", "--wrap", script)
    printed_lines = log.read_text().splitlines()
    assert len([line for line in printed_lines if line.startswith("refused: 2 processes on several hosts")]) >= 1, (
        printed_lines
    )
    met = sorted(line for line in printed_lines if "meets at" in line)
    assert [line.split()[1] for line in met] == ["0", "1"], printed_lines
    assert len({line.partition("meets at")[2] for line in met}) == 1, printed_lines


def test_a_job_that_is_cancelled_as_its_step_begins_is_recorded_as_cancelled(cluster: Cluster) -> None:
    """srun waits for such a step for longer than Slurm lets the script live."""
    jobs = []
    for retries in ("off", "on", "on"):
        job = cluster.submit("--retries", retries, "-N", "2", "--ntasks-per-node", "2", "sleep", "600")
        eventually(lambda job=job: f"{job.id}.0" in cluster.slurm("squeue", "-h", "-s", "-j", job.id, "-o", "%i"))
        cluster.slurm("scancel", job.id)
        jobs.append(job)
    eventually(lambda: [job.state["state"] for job in jobs] == ["CANCELLED"] * 3)


@pytest.mark.long
def test_a_training_that_is_suspended_for_longer_than_it_may_stand_still_goes_on(cluster: Cluster) -> None:
    flags = ("--workload", "mnist", "--steps", "600", "--log-every", "20", "--stall-after", "5")
    job = cluster.submit("-N", "2", "--ntasks-per-node", "1", "ddp", *flags)
    eventually(lambda: "  20/600" in job.log)
    cluster.slurm("scontrol", "suspend", job.id)
    time.sleep(12)  # time that the ranks do not have is what this is about
    cluster.slurm("scontrol", "resume", job.id)
    job.done()
    assert not (job.run_dir / "stalled").exists()
