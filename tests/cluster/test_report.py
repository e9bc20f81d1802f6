"""Accounting and scaling reports over a real Slurm: every figure against what Slurm and the runs themselves say."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from commandline import Answer, hpcjobs, moment

from hpcjobs import sandbox as sandboxes
from hpcjobs.errors import UnknownJobError
from hpcjobs.sandbox import Sandbox
from hpcjobs.sandbox.folder import folder_at
from hpcjobs.sandbox.network import enter
from hpcjobs.scaling.right_size import estimate_starts
from hpcjobs.sweeps.folder import SweepFolder, remember

SITE = ("--site", "tu-hpc")
REQUEUED = """
import json, os, subprocess, sys, time
folder = os.environ["HPCJOBS_RUN_DIR"]
again = os.path.exists(f"{folder}/metrics.jsonl")
with open(f"{folder}/metrics.jsonl", "a") as log:
    def line(**told): print(json.dumps(told), file=log, flush=True)
    line(kind="run", time_s=0.0)
    begun = time.time()
    time.sleep(4)
    line(kind="step", time_s=time.time() - begun)
    if not again:
        time.sleep(3)
        subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=True)
        time.sleep(60)
"""
LM = ("ddp", "--workload", "lm", "--batch-size", "4", "--train-samples", "48", "--epochs", "1")
# However busy the machine is: a second of CPU time at least, and four seconds in which its memory is measured.
HUNGRY = """
import time
held = bytearray(256 << 20)
end = time.time() + 4
while time.process_time() < 1: pass
time.sleep(max(0, end - time.time()))
"""


@pytest.fixture
def slurm(sandbox: Sandbox, workdir: Path) -> Callable[..., str]:
    """Slurm's own commands, in the fresh folder."""
    env = {**os.environ, **sandboxes.environment(), "SLURM_TIME_FORMAT": "%s"}

    def ask(*argv: str) -> str:
        return subprocess.run(argv, env=env, check=True, capture_output=True, text=True).stdout

    return ask


def ok(*arguments: str, env: Mapping[str, str] | None = None) -> Answer:
    """``hpcjobs ARGUMENTS``, which must succeed."""
    answer = hpcjobs(*arguments, env=env)
    assert answer.code == 0, answer
    return answer


def jobs(*arguments: str, env: Mapping[str, str] | None = None) -> dict[str, dict[str, Any]]:
    return {row["job_id"]: row for row in ok("report", "jobs", *SITE, *arguments, "--json", env=env).json}


def accounted(job_id: str, condition: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """The job's row, once the accounting has caught up."""
    end = time.monotonic() + 240
    while True:
        answer = hpcjobs("report", "jobs", *SITE, job_id, "--json")
        assert answer.code in (0, UnknownJobError.exit_code), answer  # a new job is not known at once
        row = next((r for r in answer.json if r["job_id"] == job_id), None) if answer.code == 0 else None
        if row is not None and condition(row):
            return row
        assert time.monotonic() < end, row
        time.sleep(0.5)


def submit(*arguments: str) -> str:
    job_id: str = ok("submit", *SITE, "--json", "-t", "10m", *arguments).json["job_id"]
    return job_id


def test_a_job_over_two_nodes_is_told_as_slurm_and_arithmetic_have_it(slurm: Callable[..., str]) -> None:
    """Four tasks of 256 MiB and a busy second each; sacct's own figures; the site's prices and watts."""
    Path("hungry.py").write_text(HUNGRY)
    job_id = submit("-N", "2", "--ntasks-per-node", "2", "--mem", "2G", "hungry.py")
    ok("wait", job_id)
    row = accounted(job_id, lambda values: values["state"] == "COMPLETED" and values["mem_used_bytes"])
    raw = slurm("sacct", "-nPXj", job_id, "-o", "ElapsedRaw,NCPUS,NNodes,Start,End,NodeList,CPUTimeRAW")
    elapsed, cpus, nodes, start, end, node_list, cpu_time = raw.strip().split("|")
    assert [row["elapsed_s"], row["cpus"], row["nodes"], moment(row["started"]), moment(row["ended"])] == list(
        map(int, (elapsed, cpus, nodes, start, end))
    )
    assert row["node_list"] == node_list
    assert row["mem_requested_bytes"] == 4 << 30
    assert 4 * (256 << 20) < row["mem_used_bytes"] < 4 * (400 << 20)
    assert row["cpu_efficiency"] == pytest.approx(row["cpu_s"] / int(cpu_time))
    assert row["cpu_s"] >= 4
    assert row["cost"] == pytest.approx(row["elapsed_s"] * 4 / 3600 * 0.01)
    assert row["energy_j"] == pytest.approx(row["elapsed_s"] * (4 * 6 + 90 * 4 / 16))
    assert (row["source"], row["energy_source"], row["tasks"]) == ("sacct", "modelled", 4)
    (run_dir,) = Path("runs").glob("hungry-*")
    assert Path(row["run_dir"]) == run_dir.absolute()


def test_a_running_job_has_the_cpu_time_and_memory_that_sstat_measures(slurm: Callable[..., str]) -> None:
    """Two busy tasks that hold 256 MiB each, until they are cancelled; before the first sample nothing is known."""
    Path("busy.py").write_text("held = bytearray(256 << 20)\nwhile True: pass\n")
    job_id = submit("-N", "1", "--ntasks-per-node", "2", "--mem", "2G", "busy.py")
    seen: list[dict[str, Any]] = []

    def measured(values: dict[str, Any]) -> bool:
        seen.append(values)
        return (
            values["state"] == "RUNNING" and (values["mem_used_bytes"] or 0) > 2 * (256 << 20) and values["cpu_s"] > 1
        )

    try:
        row = accounted(job_id, measured)
    finally:
        ok("cancel", job_id)
    assert row["cpu_efficiency"] == pytest.approx(row["cpu_s"] / (row["elapsed_s"] * row["cpus"]))
    assert row["cpu_s"] <= row["cpus"] * (time.time() - moment(row["started"]) + 1)
    assert row["max_rss_bytes"] > 256 << 20
    assert all(values["cpu_s"] is None for values in seen if values["state"] == "PENDING")


def test_a_requeued_job_has_its_attempts_and_what_was_really_lost(slurm: Callable[..., str]) -> None:
    """What the first attempt had done when it saved lasts; the rest of it, and its start-up, are lost."""
    Path("drill.py").write_text(REQUEUED)
    job_id = submit("-N", "1", "-o", "requeue", "drill.py")
    row = accounted(job_id, lambda values: values["state"] == "COMPLETED" and values["attempts"] == 2)
    spans = slurm("sacct", "-nPXDj", job_id, "-o", "ElapsedRaw").split()
    first, last = map(int, spans)
    assert (row["elapsed_all_s"], row["elapsed_s"]) == (first + last, last)
    assert row["goodput_source"] == "checkpoints"
    (run_dir,) = Path("runs").glob("drill-*")
    _, saved, *_ = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    assert row["lost_s"] == pytest.approx(first - saved["time_s"], abs=0.1)
    assert row["goodput"] == pytest.approx(1 - row["lost_s"] / (first + last))


def test_where_sacct_refuses_the_queue_and_the_jobs_own_files_answer(slurm: Callable[..., str]) -> None:
    """The same job, marked by who told of it, and a line that says why."""
    job_id = submit("-N", "1", "true")
    ok("wait", job_id)
    broken = Path("bin")
    broken.mkdir()
    (broken / "sacct").write_text("#!/bin/sh\necho 'sacct: error: accounting is for staff only' >&2\nexit 1\n")
    (broken / "sacct").chmod(0o755)
    env = {"PATH": f"{broken.absolute()}:{os.environ['PATH']}"}
    answer = ok("report", "jobs", *SITE, "--json", env=env)
    assert "accounting is for staff only" in answer.err
    (row,) = [row for row in answer.json if row["job_id"] == job_id]
    assert (row["state"], row["source"], row["nodes"], row["cpus"]) == ("COMPLETED", "scontrol", 1, 1)


def test_a_local_job_has_the_same_columns(workdir: Path) -> None:
    job_id = ok("submit", "--site", "local", "--json", "-c", "1", "--wait", "sleep", "1").json["job_id"]
    (row,) = ok("report", "jobs", "--site", "local", "--json").json
    assert (row["job_id"], row["state"], row["source"], row["cpus"]) == (job_id, "COMPLETED", "local", 1)
    assert row["elapsed_s"] >= 1
    assert row["max_rss_bytes"] > 0


def test_a_study_is_submitted_taken_further_and_told_on_one_page(slurm: Callable[..., str]) -> None:
    """One node once; then one and two nodes twice, the two larger ones as one array; numbers as in the run folders."""
    command = ("scale", *SITE, "--name", "lm", "-t", "10m", "--json")
    first = ok(*command, "--nodes", "1", "--repeats", "1", *LM).json["points"]
    again = ok(*command, "--nodes", "1,2", "--repeats", "2", "--wait", *LM)
    points = json.loads(Path("lm.study.json").read_text())["points"]
    assert points[0] == first[0]
    assert [point["job_id"].partition("_")[2] for point in points] == ["0", "0", "0", "1"], again
    accounted(points[-1]["job_id"], lambda values: values["state"] == "COMPLETED")

    answer = ok("report", "scaling", "lm", "--json", "--target", "0.5")
    summaries = [json.loads((Path(point["run_dir"]) / "summary.json").read_text()) for point in points]
    for group in answer.json["groups"]:
        mine = sorted(s["throughput"]["value"] for s in summaries if s["nnodes"] == group["nodes"])
        assert group["throughput"]["value"] == pytest.approx((mine[0] * mine[1]) ** 0.5)
    assert {s["global_batch_size"] for s in summaries} == {4}
    one, two = (group["throughput"]["value"] for group in answer.json["groups"])
    # Two nodes of one busy machine may be slower, within the scatter or beyond it.
    expected = ("too few to tell a law",) if two >= one else ("not faster here", "slower here")
    assert any(text in answer.json["summary"][0] for text in expected)
    page = Path("lm-report/index.html").read_text(encoding="utf-8")
    assert all(point["run_dir"] in page and point["job_id"] in page for point in points)
    assert stat.S_ISREG(Path("lm-report/speedup.png").stat().st_mode)
    advice = ok("report", "advise", "lm", points[0]["job_id"])
    assert advice.out.startswith("lm: ")
    now = time.time()
    larger = estimate_starts(Path(first[0]["job_dir"]), ["--nodes=2"])
    assert larger is not None
    assert all(now - 60 < moment < now + 900 for moment in larger)
    assert estimate_starts(Path(first[0]["job_dir"]), ["--nodes=99"]) is None


MBITS = 5
GRADIENT_S = 0.5 * 8 / MBITS
"""How long the 0.5 MB of a step's gradients take, at the very least."""


@contextmanager
def slow_network(sandbox: Sandbox) -> Iterator[None]:
    """So many Mbit/s out of every host."""
    hosts = [[*enter(folder_at(None), host), "tc", "qdisc"] for host in sandbox.hosts]
    try:
        for host in hosts:
            shaped = f"add dev eth0 root tbf rate {MBITS}mbit burst 64kbit latency 200ms"
            subprocess.run([*host, *shaped.split()], check=True)
        yield
    finally:
        for host in hosts:
            subprocess.run([*host, "del", "dev", "eth0", "root"], check=False)


def copy_smallest_run(name: str, new_name: str) -> None:
    """A second study that has the run of one node already."""
    study = json.loads(Path(f"{name}.study.json").read_text())
    folder = Path(study["folder"]).with_name(f"study-{new_name}")
    shutil.copytree(study["folder"], folder, symlinks=True)
    shutil.rmtree(folder / "cells" / "2x1-1")
    shutil.rmtree(folder / "chunks" / "0002")
    Path(f"{new_name}.study.json").write_text(json.dumps({**study, "name": new_name, "folder": str(folder)}))
    remember(folder.name, SweepFolder(folder))  # or it would be somebody's, and only be read


def test_a_slow_network_shows_as_communication_and_as_a_worse_efficiency(
    sandbox: Sandbox, slurm: Callable[..., str]
) -> None:
    """Two studies that share the run of one node: at two, steps wait for gradients, and the efficiency is lower.

    On a busy machine two hosts that share its cores wait for each other on any network: figures are compared with
    those of the fast one, and with the time that the gradients must take.
    """
    command = ("scale", *SITE, "--nodes", "1,2", "--repeats", "1", "-t", "10m", "--wait")
    ok(*command, "--name", "fast", *LM)
    copy_smallest_run("fast", "slow")
    with slow_network(sandbox):
        ok(*command, "--name", "slow", *LM)
    fast, slow = (ok("report", "scaling", name, "--json").json for name in ("fast", "slow"))
    before, after = fast["groups"][1], slow["groups"][1]
    waited_s, waits_s = (group["communication"] * group["step_s"] for group in (before, after))
    assert waits_s > max(waited_s, 0.9 * GRADIENT_S)
    assert after["efficiency"]["value"] < before["efficiency"]["value"]
    ok("report", "scaling", "slow", "--baseline", "fast")


# Hold SIZE MiB for SECONDS in PROCESSES that share it; each says "done".
HOLD = """
import mmap, os, sys, time
size, seconds, processes = map(int, sys.argv[1:])
shared = mmap.mmap(-1, size << 20)
def touch():
    for page in range(0, size << 20, mmap.PAGESIZE): shared[page] = shared[page] + 1 & 255
touch()
children = []
while len(children) < processes - 1 and (child := os.fork()): children.append(child)
touch()
time.sleep(seconds)
for child in children if len(children) == processes - 1 else (): os.waitpid(child, 0)
print("done", flush=True)
"""
SPIN = "import time\nend = time.time() + 64\nwhile time.time() < end: pass\nprint('done')\n"
AT_ONCE = "for step in 1 2 3 4; do srun -n 1 --exact --mem=512M python3 hold.py 300 64 1 & done; wait"
AGAIN = "if [ ${SLURM_RESTART_COUNT:-0} = 0 ]; then sleep 8; scontrol requeue $SLURM_JOB_ID; sleep 60; fi"
# Kind of job: options, lines of the script, processes that say "done".
ADVISED = {
    "one-step": (("-n", "1", "--mem", "4G"), "srun python3 hold.py 300 64 1", 1),
    "no-step": (("-n", "1", "--mem", "4G"), "python3 hold.py 300 64 1", 1),
    "steps-at-once": (("-n", "4", "--mem", "8G"), AT_ONCE, 4),
    "steps-in-turn": (("-n", "1", "--mem", "4G"), "srun python3 hold.py 100 30 1\nsrun python3 hold.py 300 40 1", 2),
    "two-nodes": (("-N", "2", "--ntasks-per-node", "2", "--mem", "6G"), "srun python3 hold.py 300 64 1", 4),
    "shared-memory": (("-n", "1", "--mem", "8G"), "srun python3 hold.py 400 64 4", 4),
    "idle-cpus": (("-n", "1", "-c", "8", "--mem", "4G"), "srun python3 spin.py", 1),
    "script-beside-step": (
        ("-n", "1", "--mem", "4G"),
        "python3 hold.py 200 64 1 & srun python3 hold.py 300 64 1; wait",
        2,
    ),
    "requeued": (("-n", "1", "--mem", "4G", "--requeue"), f"{AGAIN}\nsrun python3 hold.py 300 64 1", 1),
    "short-of-time": (("-n", "1", "--mem", "4G", "-t", "1"), "srun python3 hold.py 100 90 1", 1),
}


@pytest.mark.long
def test_jobs_complete_again_with_what_was_advised(slurm: Callable[..., str]) -> None:
    """Ten kinds of job; each does its whole work a second time, in no more than was advised."""
    Path("hold.py").write_text(HOLD)
    Path("spin.py").write_text(SPIN)

    def submit_all(extra: Mapping[str, list[str]]) -> dict[str, str]:
        ids = {}
        for kind, (options, body, _) in ADVISED.items():
            Path(f"{kind}.sh").write_text(f"#!/bin/bash\n#SBATCH -J {kind}\n{body}\n")
            limit = () if "-t" in options else ("-t", "2h")
            arguments = (*limit, *options, *extra.get(kind, []), f"{kind}.sh")
            ids[kind] = ok("submit", *SITE, "--json", *arguments).json["job_id"]
        return ids

    def follow(ids: Mapping[str, str], *, ends: Mapping[str, str]) -> None:
        hpcjobs("wait", *ids.values())
        for kind, job_id in ids.items():
            accounted(job_id, lambda values, kind=kind: values["state"] == ends.get(kind, "COMPLETED"))

    first = submit_all({})
    follow(first, ends={"short-of-time": "TIMEOUT"})
    advised = {
        kind: {one["option"]: one["value"] for one in ok("report", "advise", job_id, "--json").json[0]["advice"]}
        for kind, job_id in first.items()
    }
    assert all("--mem" in advised[kind] for kind in ADVISED if kind != "short-of-time"), advised
    assert advised["idle-cpus"]["--cpus-per-task"] == "2", advised
    assert advised["short-of-time"]["--time"] == "00:02:00", advised
    second = submit_all({kind: [f"{option}={value}" for option, value in own.items()] for kind, own in advised.items()})
    follow(second, ends={})
    for kind, (_, _, processes) in ADVISED.items():
        printed = ok("logs", second[kind]).out
        assert printed.count("done") == processes, (kind, advised[kind], printed)
