"""A cluster whose jobs are in every state at a fixed moment, as commands of Slurm and run folders tell it."""

from __future__ import annotations

import json
import os
import pwd
import re
import shutil
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from commandline import ok

from hpcjobs.fabric.verdict import BAD, NodeVerdict, append, record_path
from hpcjobs.run import index

NOW = 1_800_000_000.0
"""Friday, 15 January 2027, 08:00:00 UTC."""
USER = "anna"
RECORDED_FOLDER = "/tmp/hpcjobs_golden"
"""The cluster's folder in recorded output; the real one has another name of the same length."""
SITE = """
description: two racks, A100
cluster: mine
defaults: {account: physics, partition: gpu}
partitions:
  gpu:
    nodes: 8
    max_time: 2-00:00:00
    node: {cpus: 64, mem: 512G, gpus: 4}
  debug:
    nodes: 2
    max_time: 30m
    node: {cpus: 64, mem: 512G, gpus: 4}
"""
_SACCT = r"""#!/usr/bin/awk -f
# A table of jobs, asked for by column as sacct is.
BEGIN {
    for (i = 1; i < ARGC; i++) {
        if (ARGV[i] ~ /^--format=/) columns = split(substr(ARGV[i], 10), wanted, ",")
        if (ARGV[i] ~ /^--delimiter=/) separator = substr(ARGV[i], 13)
        if (ARGV[i] ~ /^--jobs=/) jobs = split(substr(ARGV[i], 8), ids, ",")
        if (ARGV[i] == "--helpformat") { getline line < table; gsub(/\|/, " ", line); print line; exit }
    }
    for (i = 1; i <= jobs; i++) asked[ids[i]] = 1
    getline line < table
    n = split(line, names, "|")
    while ((getline line < table) > 0) {
        split(line, values, "|")
        for (i = 1; i <= n; i++) value[names[i]] = values[i]
        split(value["JobID"], parent, /[_.]/)
        if (jobs && !(parent[1] in asked)) continue
        out = value[wanted[1]]
        for (i = 2; i <= columns; i++) out = out separator value[wanted[i]]
        print out
    }
    exit
}
"""
_SQUEUE = r"""#!/usr/bin/awk -f
# A table of jobs, asked for by letters as squeue is; of anna without --states, of all with it.
BEGIN {
    for (i = 1; i < ARGC; i++) {
        if (ARGV[i] ~ /^--format=/) parts = split(substr(ARGV[i], 10), wanted, "%")
        if (ARGV[i] ~ /^--states=/) everybody = 1
    }
    getline line < table
    n = split(line, names, "|")
    while ((getline line < table) > 0) {
        split(line, values, "|")
        for (i = 1; i <= n; i++) value[names[i]] = values[i]
        if (value["u"] != "anna" && !everybody) continue
        out = ""
        for (i = 2; i <= parts; i++) out = out value[substr(wanted[i], 1, 1)] substr(wanted[i], 2)
        print out
    }
    exit
}
"""
_SACCT_COLUMNS = (
    "JobID|JobIDRaw|JobName|User|Account|Partition|QOS|State|ExitCode|Reason|Submit|Eligible|Start|End|ElapsedRaw|"
    "TimelimitRaw|NNodes|NTasks|NCPUS|ReqCPUS|ReqMem|ReqTRES|AllocTRES|NodeList|TotalCPU|MaxRSS|AveRSS|TRESUsageInTot|"
    "TRESUsageInAve|ConsumedEnergyRaw|WorkDir|MaxRSSNode|MaxRSSTask"
)
_SQUEUE_LETTERS = "i|j|T|r|P|N|D|V|S|M|l|o|u|a|q|Q|L"


class Saved(NamedTuple):
    """The cluster at one moment."""

    copy: Path
    drawn: int
    accounted: list[dict[str, str]]


_urandom = os.urandom
_SIZE_OF_A_NAME = 4


class SampleCluster:
    """The commands, the site `mine` and its jobs 41 to 46."""

    def __init__(self, here: Path, commands: Path) -> None:
        self.here, self.commands = here, commands
        self.run_dirs: dict[str, Path] = {}
        self.drawn = 0
        """Names of run folders so far: they are counted, to be the same each time."""
        self._accounted: list[dict[str, str]] = []

    def draw(self, size: int) -> bytes:
        if size != _SIZE_OF_A_NAME:  # of a file that is renamed at once, and more of those without a cache
            return _urandom(size)
        self.drawn += 1
        return self.drawn.to_bytes(size, "big")

    def as_recorded(self, text: str) -> str:
        """The text with the cluster's folder named as in recorded output, also where a table cuts the path."""
        folder, letters = str(self.here), range(len(str(self.here)), len("/tmp/"), -1)
        for n in letters:
            text = re.sub(re.escape(folder[:n]) + (r"" if n == len(folder) else r"(?=…)"), RECORDED_FOLDER[:n], text)
        return text

    def save(self, copy: Path) -> Saved:
        """Everything as it is now: folders, files, numbers."""
        shutil.copytree(self.here, copy, symlinks=True)
        return Saved(copy, self.drawn, list(self._accounted))

    def restore(self, saved: Saved) -> None:
        for path in self.here.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        shutil.copytree(saved.copy, self.here, symlinks=True, dirs_exist_ok=True)
        self.drawn, self._accounted = saved.drawn, list(saved.accounted)

    def sweep(self) -> None:
        """The sweep `lr` of three cells: two have completed, one has failed."""
        (self.commands / "next").write_text("50")
        ok("sweep", "run", "--set", "lr=0.1,0.2,0.4", "--name", "lr", "train.py")
        rows = ok("sweep", "run", "--set", "lr=0.1,0.2,0.4", "--name", "lr", "--dry-run", "--json", "train.py").json
        for task, (row, code) in enumerate(zip(rows, (0, 1, 0), strict=True)):
            folder = self.here / "runs" / "sweep-lr" / "cells" / row["cell"]
            folder.mkdir(parents=True)
            state = {"job_id": f"50_{task}", "state": "FAILED" if code else "COMPLETED", "exit_code": code,
                     "started": NOW - 900, "ended": NOW - 600, "nodes": "n1"}  # fmt: skip
            (folder / "state.json").write_text(json.dumps(state))
            if not code:
                summary = {"schema": "hpcjobs.summary/1", "loss": 2.5 - task / 4}
                (folder / "summary.json").write_text(json.dumps(summary))
        self.account(
            accounted(f"50_{task}", "lr", state, code, begun=900, lasted=300, nodes="n1", n=1)
            for task, (state, code) in enumerate((("COMPLETED", "0:0"), ("FAILED", "1:0"), ("COMPLETED", "0:0")))
        )

    def study(self) -> None:
        """The scaling study `speed` of one and two nodes, whose runs have completed."""
        (self.commands / "next").write_text("60")
        ok("scale", "-N", "1,2", "--repeats", "3", "--name", "speed", "train.py")
        self.account(
            accounted(f"{job}_{task}", "speed", "COMPLETED", "0:0", begun=900, lasted=lasted + task, nodes="n1", n=n)
            for job, n, lasted in ((60, 1, 400.0), (61, 2, 220.0))
            for task in range(3)
        )

    def samples(self, job_id: str) -> None:
        """Two samples of each of two nodes of a job."""
        (entry,) = [entry for entry in index.entries() if entry.job_id == job_id]
        for name, host in (("monitor", "n3"), ("monitor-1", "n4")):
            lines = [{"kind": "monitor", "host": host, "interval_s": 5.0, "started_at": NOW - 3600}]
            values = {"cpu_percent": 40.0, "rss_bytes": 2**31, "gpu_percent": 91.0}
            lines += [{"kind": "sample", "time_s": time_s, **values} for time_s in (5.0, 10.0)]
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (Path(entry.run_dir) / f"{name}.jsonl").write_text(text)

    def bad_node(self) -> None:
        append(record_path("mine"), [NodeVerdict("n3", BAD, NOW - 7200, "interface ib0 is down", "31")])

    def account(self, rows: Iterable[dict[str, str]]) -> None:
        """Add rows to what sacct prints."""
        self._accounted += rows
        self.table("sacct", self._accounted)

    def command(self, name: str, script: str) -> None:
        path = self.commands / name
        path.write_text(script if script.startswith("#!") else f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def submit(self, job_id: str, *arguments: str, at: float) -> Path:
        """The run folder of a job that was submitted ``at`` so many seconds before now."""
        (self.commands / "next").write_text(job_id)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "time", lambda: NOW - at)
            folder = Path(ok("submit", "--json", *arguments).json["run_dir"])
        self.run_dirs[job_id] = folder
        return folder

    def write_state(self, job_id: str, state: str, *, task: int | None = None, **values: Any) -> None:
        folder = self.run_dirs[job_id] / (str(task) if task is not None else "")
        folder.mkdir(exist_ok=True)
        record = {"job_id": job_id if task is None else f"{job_id}_{task}", "state": state, "exit_code": None,
                  "started": None, "ended": None, "nodes": None, **values}  # fmt: skip
        (folder / "state.json").write_text(json.dumps(record))

    def write_log(self, job_id: str, text: str) -> None:
        folder = self.run_dirs[job_id]
        (folder / "logs" / f"{folder.name.rsplit('-', 3)[0]}_{job_id}.out").write_text(text)

    def table(self, command: str, rows: list[dict[str, str]]) -> None:
        header = _SACCT_COLUMNS if command == "sacct" else _SQUEUE_LETTERS
        lines = [header, *("|".join(row.get(name, "") for name in header.split("|")) for row in rows)]
        table = self.commands / f"{command}.table"
        table.write_text("\n".join(lines) + "\n")
        script = _SACCT if command == "sacct" else _SQUEUE
        self.command(command, script.replace("BEGIN {", f'BEGIN {{ table = "{table}"', 1))


def accounted(
    job_id: str, name: str, state: str, code: str, *, begun: float, lasted: float, nodes: str, n: int
) -> dict[str, str]:
    start, cpu_min = int(NOW - begun), int(50 * n * lasted) // 60
    return {
        "JobID": job_id, "JobIDRaw": job_id, "JobName": name, "User": USER, "Account": "physics", "Partition": "gpu",
        "QOS": "normal", "State": state, "ExitCode": code, "Reason": "None", "Submit": str(start - 300),
        "Eligible": str(start - 300), "Start": str(start), "End": str(int(start + lasted)),
        "ElapsedRaw": str(int(lasted)), "TimelimitRaw": "60", "NNodes": str(n), "NCPUS": str(64 * n),
        "ReqCPUS": str(64 * n), "ReqMem": "512G", "ReqTRES": f"cpu={64 * n},mem={512 * n}G,node={n},gres/gpu={4 * n}",
        "AllocTRES": f"cpu={64 * n},mem={512 * n}G,node={n},gres/gpu={4 * n}", "NodeList": nodes,
        "TotalCPU": f"{cpu_min // 1440}-{cpu_min // 60 % 24:02}:{cpu_min % 60:02}:00", "MaxRSS": "",
    }  # fmt: skip


def _queued(
    job_id: str,
    name: str,
    state: str,
    *,
    submitted: float,
    reason: str = "None",
    user: str = USER,
    script: str = "",
    nodes: str = "",
    n: int = 1,
    started: float | None = None,
    priority: str = "100",
) -> dict[str, str]:
    return {
        "i": job_id, "j": name, "T": state, "r": reason, "P": "gpu", "N": nodes, "D": str(n),
        "V": str(int(NOW - submitted)), "S": "N/A" if started is None else str(int(NOW - started)),
        "M": "20:00" if state == "RUNNING" else "0:00", "o": script, "u": user, "a": "physics", "q": "normal",
        "Q": priority, "L": "40:00" if state == "RUNNING" else "1:00:00", "l": "1:00:00",
    }  # fmt: skip


FAILED_LOG = """\
0: epoch 1 loss 2.31
1: epoch 1 loss 2.33
1: Traceback (most recent call last):
1:   File "train.py", line 31, in <module>
1:     main()
1: RuntimeError: CUDA error: device-side assert triggered
0: epoch 2 loss 1.97
"""


def sample_cluster(here: Path) -> SampleCluster:
    """The cluster below ``here``, an empty folder."""
    commands = here / "slurm"
    for folder in (commands, here / "home", here / "site_configs"):
        folder.mkdir()
    (here / "site_configs" / "mine.yaml").write_text(SITE)
    (here / "train.py").write_text("print('hello')\n")
    (commands / "python").symlink_to(sys.executable)
    cluster = SampleCluster(here, commands)
    cluster.command("sbatch", _SBATCH.replace("NEXT", str(commands / "next")))
    cluster.command("scontrol", _SCONTROL)
    for name in ("scancel", "sinfo", "srun", "sacctmgr"):
        cluster.command(name, ":")
    cluster.table("squeue", [])
    cluster.account([])
    with pytest.MonkeyPatch.context() as patch:
        use(cluster, patch)
        _fill(cluster)
        ok("ps")  # keeps what the accounting says
    return cluster


def use(cluster: SampleCluster, patch: pytest.MonkeyPatch) -> None:
    """Be `USER` in the cluster's folder at the moment `NOW`."""
    here, commands = cluster.here, cluster.commands
    variables = {"HPCJOBS_SITE": "mine", "TZ": "UTC", "USER": USER, "LOGNAME": USER, "HOME": str(here / "home"),
                 "HPCJOBS_SANDBOX_ROOT": str(here / "sandbox"), "PATH": f"{commands}:/usr/bin:/bin"}  # fmt: skip
    for name, value in variables.items():
        patch.setenv(name, value)
    time.tzset()
    patch.chdir(here)
    entry = pwd.struct_passwd((USER, "x", os.getuid(), os.getgid(), "", str(here / "home"), "/bin/sh"))
    patch.setattr(pwd, "getpwuid", lambda _: entry)
    strftime = time.strftime
    patch.setattr(time, "time", lambda: NOW)
    patch.setattr(time, "strftime", lambda form, t=None: strftime(form, t or time.localtime(time.time())))
    patch.setattr(sys, "executable", str(commands / "python"))
    patch.setattr(os, "urandom", cluster.draw)


_SBATCH = """\
case "$*" in
*--test-only*)
    echo "sbatch: Job 99 to start at 2027-01-15T08:20:00 using 64 processors on nodes n5 in partition gpu" >&2
    exit 0
    ;;
esac
n=$(cat NEXT); echo $((n + 1)) >NEXT; echo "$n"
"""
_SCONTROL = r"""case "$*" in
*"show config"*) echo "ClusterName             = mine" ;;
*"show job 45"*)
    echo "JobId=45 JobName=big UserId=anna(1000) Priority=90 JobState=PENDING Reason=Priority Dependency=(null)" \
        "Partition=gpu NumNodes=4 TimeLimit=01:00:00"
    ;;
esac
"""


def _fill(cluster: SampleCluster) -> None:
    cluster.submit("41", "-N", "2", "--name", "ddp", "train.py", "--lr", "0.1", at=7500)
    cluster.write_state("41", "COMPLETED", exit_code=0, started=NOW - 7200, ended=NOW - 3600, nodes="n[1-2]")
    cluster.write_log("41", "0: epoch 1 loss 2.31\n1: epoch 1 loss 2.33\n0: epoch 2 loss 1.97\n")
    summary = {"schema": "hpcjobs.summary/1", "loss": 1.97, "throughput": {"value": 13892.4, "unit": "images/s"}}
    (cluster.run_dirs["41"] / "summary.json").write_text(json.dumps(summary))
    cluster.submit("42", "-N", "2", "--name", "train", "--retries", "node=2", "train.py", "--lr", "0.5", at=3900)
    cluster.write_state(
        "42", "FAILED", exit_code=1, started=NOW - 3600, ended=NOW - 3000, nodes="n[3-4]",
        first_failure={"rank": 1, "host": "n4", "exit_code": 1},
    )  # fmt: skip
    cluster.write_log("42", FAILED_LOG)
    cluster.submit("43", "--array", "0-4", "--name", "search", "train.py", at=2400)
    for task, state, code in ((0, "COMPLETED", 0), (1, "FAILED", 2)):
        cluster.write_state("43", state, task=task, exit_code=code, started=NOW - 2000, ended=NOW - 1800, nodes="n5")
    lm = cluster.submit("44", "-N", "2", "--name", "lm", "train.py", at=1500)
    cluster.write_state("44", "RUNNING", started=NOW - 1200, nodes="n[6-7]")
    steps = (
        {"kind": "run", "schema": "hpcjobs.metrics/1", "steps": 4000},
        {"kind": "step", "step": 1000, "epoch": 2, "time_s": 300.0, "loss": 2.5, "throughput": 13892.4,
         "unit": "tokens/s"},
    )  # fmt: skip
    (lm / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps))
    cluster.write_log("44", "0: epoch 1 loss 2.61\n")
    cluster.submit("45", "-N", "4", "--name", "big", "train.py", at=900)
    script = {job: f"{cluster.run_dirs[job]}/job.sh" for job in ("44", "45")}
    cluster.table(
        "squeue",
        [
            _queued("43_[2-4]", "search", "PENDING", reason="JobArrayTaskLimit", submitted=2400),
            _queued("44", "lm", "RUNNING", submitted=1500, script=script["44"], nodes="n[6-7]", n=2, started=1200),
            _queued("45", "big", "PENDING", reason="Priority", submitted=900, script=script["45"], n=4, priority="90"),
            _queued("46", "bash", "RUNNING", submitted=600, script="/bin/bash", nodes="n8", started=600),
            _queued("40", "fluid", "RUNNING", submitted=9000, user="bert", nodes="n[1-5]", n=5, started=1200),
        ],
    )
    cluster.account(
        [
            accounted("41", "ddp", "COMPLETED", "0:0", begun=7200, lasted=3600, nodes="n[1-2]", n=2),
            accounted("42", "train", "FAILED", "1:0", begun=3600, lasted=600, nodes="n[3-4]", n=2),
            accounted("43_0", "search", "COMPLETED", "0:0", begun=2000, lasted=200, nodes="n5", n=1),
            accounted("43_1", "search", "FAILED", "2:0", begun=2000, lasted=200, nodes="n5", n=1),
        ],
    )
