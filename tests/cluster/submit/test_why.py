"""Real failures on the sandbox, all at once, and what `hpcjobs why` says of each.

The programs are in tests/cluster/failures; their first lines say how they are submitted, and the right explanation.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from commandline import moment, ok, within
from login_node import SITE, Cluster
from waiting import eventually

FAILURES = sorted((Path(__file__).parents[1] / "failures").glob("*.*"))
if sys.version_info < (3, 11):
    FAILURES = [path for path in FAILURES if path.stem != "exception_group"]
_HEADER = re.compile(r"# (\w+): (.*)")


@dataclass(frozen=True)
class Failure:
    """A program that fails, and the explanation of it."""

    program: Path
    header: dict[str, str]

    def problems(self, answer: dict[str, Any], nodes: list[str]) -> Iterator[str]:
        """Where ``answer`` of ``hpcjobs why --json`` is not the right explanation."""
        header = self.header
        expected: dict[str, object] = {
            "cause": _value(header["cause"]),
            "rank": None if header["rank"] == "-" else int(header["rank"]),
            "host": None if header["host"] == "-" else nodes[int(header["host"])],
        }
        expected |= {key: int(header[key]) for key in ("signal", "exit_code") if key in header}
        expected["certain"] = header.get("certain", "no" if header["cause"] == "-" else "yes") == "yes"
        for key, value in expected.items():
            if answer[key] != value:
                yield f"{key} is {answer[key]!r}, not {value!r}"
        if header.get("line", "") not in (answer["line"] or {"text": ""})["text"]:
            yield f"line is {answer['line']}, without {header['line']!r}"
        if header.get("fix", "") not in "\n".join(answer["fix"]):
            yield f"fix is {answer['fix']}, without {header['fix']!r}"


def _value(text: str) -> str | None:
    return None if text == "-" else text


def read_failure(program: Path) -> Failure:
    lines = program.read_bytes().decode().splitlines()[:12]
    return Failure(program, dict(match.groups() for line in lines if (match := _HEADER.match(line))))


def submit(failure: Failure, cluster: Cluster, local_folder: Path) -> str:
    """Submit the program as its first lines say; the job's id."""
    program = cluster.folder / failure.program.name
    program.write_bytes(failure.program.read_bytes())
    program.chmod(0o755)
    if failure.header.get("via") == "sbatch":
        return cluster.slurm("sbatch", "--parsable", program.name).strip()
    site = SITE
    if extra := failure.header.get("site"):
        site = str(cluster.folder / f"{program.stem}.yaml")
        shape = {"partitions": {"compute": {"nodes": 4, "node": {"cpus": 16}}}, "slurm_conf": cluster.record.slurm_conf}
        own = yaml.safe_load(extra.replace("FOLDER", str(cluster.folder)))
        Path(site).write_text(yaml.safe_dump(shape | {"defaults": {"time": "10m"}} | own))
    options = failure.header["submit"]
    if "LOCAL" in options:
        shutil.copy2(program, local_folder)
        options = options.replace("LOCAL", str(local_folder))
    name = program.name if program.suffix == ".py" else f"./{program.name}"
    answer = ok("submit", "--json", "--site", site, *shlex.split(options), name)
    return str(answer.json["job_id"])


@pytest.fixture
def local_folder() -> Iterator[Path]:
    """A folder that this machine has and the sandbox's hosts do not."""
    with tempfile.TemporaryDirectory(prefix="hpcjobs-here-", dir="/tmp") as folder:
        yield Path(folder)


def nodes_of(job_id: str, cluster: Cluster) -> list[str]:
    """The nodes of a job that has ended; none before the accounting has its end."""
    row = cluster.slurm("sacct", "-X", "-n", "-P", "-o", "End,NodeList", "-j", job_id).strip()
    end, _, nodes = row.partition("|")
    return [] if end in ("", "Unknown") else cluster.slurm("scontrol", "show", "hostnames", nodes).split()


def bring_about_the_end(failure: Failure, job_id: str, cluster: Cluster) -> None:
    """What ends the job from outside: its time limit, its user, a node that goes down."""
    how = failure.header.get("end")
    if how is None:
        return
    eventually(lambda: cluster.slurm("squeue", "-h", "-o", "%T", "-j", job_id).split() == ["RUNNING"])
    if how == "scancel":
        cluster.slurm("scancel", job_id)
    elif how == "time":
        end = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 20))  # Slurm refuses what has passed
        cluster.slurm("scontrol", "update", f"JobId={job_id}", f"EndTime={end}")
    elif how == "node":
        nodes = cluster.slurm("squeue", "-h", "-o", "%N", "-j", job_id).strip()
        second = cluster.slurm("scontrol", "show", "hostnames", nodes).split()[1]
        cluster.slurm("scontrol", "update", f"NodeName={second}", "State=DOWN", "Reason=failure on purpose")


def test_real_failures_are_explained_with_rank_host_and_line(cluster: Cluster, local_folder: Path) -> None:
    failures = [read_failure(path) for path in FAILURES]
    assert len(failures) >= 25
    jobs = {submit(failure, cluster, local_folder): failure for failure in failures}
    cluster.submitted.extend(jobs)
    # The node goes down when nothing else can run on it.
    last = next(job_id for job_id, failure in jobs.items() if failure.header.get("end") == "node")
    for job_id, failure in jobs.items():
        if job_id != last:
            bring_about_the_end(failure, job_id, cluster)
    eventually(lambda: cluster.slurm("squeue", "-h", "-o", "%i", "-j", ",".join(jobs)).split() == [last], timeout_s=400)
    bring_about_the_end(jobs[last], last, cluster)
    try:
        eventually(lambda: not cluster.slurm("squeue", "-h", "-o", "%i", "-j", last).split())
        wrong = {}
        for job_id, failure in jobs.items():
            eventually(lambda job_id=job_id: nodes_of(job_id, cluster))
            site = ("--site", SITE) if failure.header.get("via") else ()
            answer = ok("why", job_id, "--json", *site).json
            if problems := list(failure.problems(answer, nodes_of(job_id, cluster))):
                wrong[failure.program.name] = [*problems, answer["text"], answer["evidence"], answer["tail"]]
        assert not wrong, json.dumps(wrong, indent=1)
    finally:
        for row in cluster.slurm("sinfo", "-h", "-N", "-o", "%N %T").splitlines():
            if row.split()[1].startswith("down"):
                cluster.slurm("scontrol", "update", f"NodeName={row.split()[0]}", "State=RESUME")


def test_a_waiting_job_is_explained_with_what_is_ahead_and_what_would_start_sooner(cluster: Cluster) -> None:
    running = cluster.submit("-N", "3", "--exclusive", "-t", "30m", "sleep", "600")
    running.becomes("RUNNING")
    ahead = cluster.submit("-N", "4", "--exclusive", "-t", "1h", "sleep", "600")
    job = cluster.submit("-N", "2", "--exclusive", "-t", "1h", "sleep", "600")

    def explain() -> dict[str, Any]:
        answer: dict[str, Any] = ok("why", job.id, "--json").json
        return answer

    answer: dict[str, Any] = {}

    def is_explained() -> bool:
        answer.update(explain())
        return answer["reason"] in ("Priority", "Resources") and bool(answer["sooner"])

    eventually(is_explained)
    assert ahead.id in [other["job_id"] for other in answer["waiting_before"]]
    assert running.id in [other["job_id"] for other in answer["running"]]
    # One node is free until the first job ends, in half an hour at most.
    assert (answer["sooner"][0]["nodes"], answer["sooner"][0]["time"]) == (1, "00:15:00")
    starts = [moment(row["start"]) // 60 for row in answer["sooner"]]
    assert all(later >= earlier - 1 for earlier, later in pairwise(starts)), starts  # by start, to a minute, and cost
    assert f"hpcjobs rerun {job.id} --partition" in answer["fix"][0]
    text = ok("why", job.id).out
    assert "ahead in the queue: 1\n" in text
    assert "would start sooner:" in text
    foreign = cluster.slurm("sbatch", "--parsable", "-N", "2", "--exclusive", "-t", "60", "--wrap", "true").strip()
    cluster.submitted.append(foreign)
    eventually(lambda: ok("why", foreign, "--site", SITE, "--json").json["sooner"])
    row = ok("why", foreign, "--site", SITE, "--json").json["sooner"][0]
    assert (row["nodes"], row["time"]) == (1, "00:15:00")
    waiting = cluster.submit("-d", f"afterok:{running.id}", "sleep", "1")
    eventually(lambda: ok("why", waiting.id, "--json").json["reason"] == "Dependency")
    assert f"waits for job {running.id} (afterok): RUNNING" in ok("why", waiting.id).out
    plain = cluster.slurm("sbatch", "--parsable", "--hold", "--wrap", "true").strip()
    cluster.submitted.append(plain)
    eventually(lambda: f"try: scontrol release {plain}" in ok("why", plain, "--site", SITE).out)


def test_where_a_program_can_run_is_a_table_over_partitions_with_start_and_cost(cluster: Cluster) -> None:
    rows = ok("where", "--site", SITE, "-N", "2", "-t", "10m", "--json", "sleep", "1").json
    assert {row["partition"] for row in rows} == {"compute", "short", "long", "scavenger"}
    assert all(row["is_valid"] for row in rows)
    assert all(row["start"] is not None and row["cost"]["currency"] == "EUR" for row in rows)
    rows = {row["partition"]: row for row in ok("where", "--site", SITE, "-t", "3-0", "--json", "sleep", "1").json}
    assert rows["long"]["is_valid"]
    assert not rows["short"]["is_valid"]
    assert "max_time" in rows["short"]["remark"] or "time" in rows["short"]["remark"]
    table = ok("where", "--site", SITE, "-t", "3-0", "sleep", "1").out.splitlines()
    assert table[0].split()[:3] == ["SITE", "PARTITION", "VALID"]
    before = set(cluster.slurm("squeue", "-h", "-o", "%i").split())
    answer = ok("submit", "--site", SITE, "--test-only", "-t", "10m", "sleep", "1")
    assert "node hours" in answer.out
    assert set(cluster.slurm("squeue", "-h", "-o", "%i").split()) <= before  # others may have ended
    assert not list(cluster.folder.glob("runs/*"))
    refused = within("submit", "--site", SITE, "--test-only", "-A", "nobody", "sleep", "1")
    assert refused.code == 7
    assert "account" in refused.out


def test_of_an_array_and_a_heterogeneous_job_of_sbatch_what_failed_is_explained(cluster: Cluster) -> None:
    head = "#!/bin/bash\n#SBATCH --time=5 -n 1 -o %x-%j.out -e %x-%j.err\n"
    task = "[ $SLURM_ARRAY_TASK_ID != 1 ] || python3 -c 'import no_such_module'\n"
    cluster.program("array_of_three.sh", f"{head}#SBATCH --array=0-2\n{task}")
    second = "srun --het-group=0 true; srun --het-group=1 sh -c 'exit 3'\n"
    cluster.program("heterogeneous.sh", f"{head}#SBATCH hetjob\n#SBATCH -n 1\n{second}")
    array = cluster.slurm("sbatch", "--parsable", "array_of_three.sh").strip()
    pair = cluster.slurm("sbatch", "--parsable", "heterogeneous.sh").strip()
    cluster.submitted.extend([array, pair])
    eventually(lambda: not cluster.slurm("squeue", "-h", "-o", "%i", "-j", f"{array},{pair}").split())
    answer = ok("why", array, "--json", "--site", SITE).json
    assert (answer["job_id"], answer["cause"]) == (f"{array}_1", "python-module-missing")
    for name in (pair, f"{pair}+1"):
        assert ok("why", name, "--json", "--site", SITE).json["job_id"].startswith(pair)
