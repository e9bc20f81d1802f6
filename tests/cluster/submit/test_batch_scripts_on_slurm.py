"""Batch scripts: ``hpcjobs submit`` asks Slurm for what sbatch asks for them, and runs them as sbatch would."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from commandline import within
from login_node import Cluster
from waiting import eventually

from hpcjobs.sandbox import Sandbox

SCRIPTS = Path(__file__).parents[2] / "data" / "sbatch_scripts"
OF_THE_SUBMISSION = {"JobId", "ArrayJobId", "SubmitTime", "AccrueTime", "EligibleTime", "LastSchedEval", "Deadline"} | {
    *("AllocNode:Sid", "StartTime", "EndTime", "Command", "StdOut", "StdErr")
}
"""What differs between two submissions of one script, or is where hpcjobs keeps script and output."""
CONTROLLER = """\
ClusterName=centre
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/none
CredType=cred/none
SlurmctldPort={port}
SlurmctldPidFile={home}/pid
StateSaveLocation={home}
SlurmctldLogFile={home}/log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
EnforcePartLimits=ALL
MailProg=/bin/true
SuspendProgram=/bin/true
ResumeProgram=/bin/true
SuspendTime=600
"""
"""A controller alone: its nodes are cloud nodes that never start."""


def slurm(conf: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "SLURM_CONF": str(conf)}
    return subprocess.run(arguments, env=env, capture_output=True, text=True, check=False)


@contextmanager
def controller(home: Path) -> Iterator[Path]:
    """A slurmctld with the cluster that the scripts are written for; its slurm.conf."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    lines = (SCRIPTS / "cluster.conf").read_text("utf-8").splitlines()
    nodes = [f"{line} State=CLOUD NodeAddr=127.0.0.1" if line.startswith("NodeName=") else line for line in lines]
    conf = home / "slurm.conf"
    conf.write_text(CONTROLLER.format(host=socket.gethostname(), port=port, home=home) + "\n".join(nodes) + "\n")
    (home / "gres.conf").write_text(
        "NodeName=gn[0-7] Name=gpu Type=a100 Count=8\nNodeName=vn[0-3] Name=gpu Type=v100 Count=8\n"
    )
    program = shutil.which("slurmctld") or "/usr/sbin/slurmctld"
    with (home / "out").open("wb") as out:
        daemon = subprocess.Popen([program, "-D", "-f", str(conf)], stdout=out, stderr=out)
    try:
        eventually(
            lambda: daemon.poll() is not None or slurm(conf, "scontrol", "ping").returncode == 0,
            what=f"an answer of slurmctld ({home / 'out'})",
        )
        assert daemon.poll() is None, (home / "out").read_text()
        yield conf
    finally:
        slurm(conf, "scancel", "--user=root")
        daemon.terminate()
        daemon.wait(timeout=240)


def request(conf: Path, job_id: str) -> list[str]:
    """What scontrol shows of a job's request, word by word."""
    shown = slurm(conf, "scontrol", "--oneliner", "show", "job", job_id).stdout
    shown = shown.replace("/./", "").replace("/. ", " ")  # sbatch leaves -D ./ as it is
    return [part for part in shown.split() if part.partition("=")[0] not in OF_THE_SUBMISSION]


def test_sixty_scripts_of_many_centres_ask_for_what_sbatch_asks(sandbox: Sandbox, workdir: Path) -> None:
    home = workdir / "ctld"
    home.mkdir()
    scripts = sorted(SCRIPTS.glob("*.sh"))
    assert len(scripts) == 60
    # What a site adds to other jobs must not come to a script's.
    site = {"partitions": {"normal": {"nodes": 64, "node": {"cpus": 256}}}, "slurm_conf": str(home / "slurm.conf")}
    site |= {"defaults": {"nodes": 3, "time": "7m", "mem": "3G", "account": "other"}, "sbatch": ["reboot"]}
    (workdir / "centre.yaml").write_text(json.dumps(site), encoding="utf-8")
    differences: dict[str, list[str]] = {}
    with controller(home) as conf:
        for script in scripts:
            theirs = slurm(conf, "sbatch", "--parsable", "--hold", str(script))
            ours = within("submit", "--site", "./centre.yaml", "--hold", "--json", str(script))
            if theirs.returncode != 0 or ours.code != 0:
                differences[script.name] = [theirs.stderr, ours.err]
                continue
            expected = request(conf, theirs.stdout.strip())
            actual = request(conf, json.loads(ours.out)["job_id"])
            if expected != actual:
                differences[script.name] = sorted(set(expected) ^ set(actual))
    assert "\n".join(f"{script}: {arguments}" for script, arguments in differences.items()) == ""


def test_a_script_runs_as_by_sbatch_with_log_first_failure_and_signals(cluster: Cluster) -> None:
    """Its steps, arguments and environment are as with sbatch; an end with a code and a signal reach who waits."""
    cluster.program(
        "steps.sh",
        "#!/bin/bash\n#SBATCH -N 2 --ntasks-per-node=2\n#SBATCH -t 5 -p compute -o lost.log\n"
        'echo "args $* omp ${OMP_NUM_THREADS-unset} rank ${RANK-unset}"\n'
        "srun bash -c 'echo \"task $SLURM_PROCID of $SLURM_NTASKS\"'\nexit 7\n",
    )
    cluster.program(
        "signal.sh",
        "#!/bin/bash\n#SLURM -J \"my job's\"\n#SBATCH -N 1 -t 5 -p compute\ntrap 'echo stopped; exit 3' USR1\n"
        "touch ready\nwhile :; do sleep 0.2; done\n",
    )
    steps, signalled = cluster.submit("steps.sh", "a b"), cluster.submit("./signal.sh")
    eventually((cluster.folder / "ready").exists)
    assert cluster.slurm("squeue", "-ho%j", f"--jobs={signalled.id}").strip() == "my job's"
    cluster.slurm("scancel", "--batch", "--signal=USR1", signalled.id)
    answer = steps.wait()
    assert (answer.code, "first failure: rank 0 on" in answer.err) == (7, True), answer
    lines = sorted(line for line in steps.log.splitlines() if not line.startswith("hpcjobs:"))
    assert lines == ["args a b omp unset rank unset", *(f"task {n} of 4" for n in range(4))]
    assert (signalled.wait().code, "stopped" in signalled.log) == (3, True)
    assert not (cluster.folder / "lost.log").exists()


@pytest.mark.long
def test_scripts_are_started_again_run_as_arrays_and_are_made_of_wrapped_text(cluster: Cluster) -> None:
    head = "#!/bin/bash\n#SBATCH -N 1 -t 5 -p compute\n"
    cluster.program("again.sh", head + "[ -e mark ] && { echo second; exit 0; }\ntouch mark\nexit 85\n")
    cluster.program("array.sh", head + "#SBATCH -a 0-1\nexit $((SLURM_ARRAY_TASK_ID * 3))\n")
    again, array = cluster.submit("--retries", "on", "again.sh"), cluster.submit("array.sh")
    wrapped = cluster.submit("-n", "2", "-p", "compute", "-t", "5", "--wrap", "srun echo task; echo done")
    assert (array.wait().code, sorted(array.sacct().values())) == (3, ["COMPLETED", "FAILED"])
    assert (wrapped.wait().code, wrapped.log.split()) == (0, ["task", "task", "done"])
    assert (again.wait().code, "second" in again.log) == (0, True)
    assert len((again.run_dir / "attempts.jsonl").read_text().splitlines()) == 2
