"""Jobs of a user who submits with sbatch itself: every verb that needs no run folder serves them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from commandline import hpcjobs, ok, within
from login_node import SITE
from scripted_slurm import answer
from waiting import eventually

from hpcjobs.sandbox import Sandbox

HEAD = "#!/bin/bash\n#SBATCH --time=5\n"
SCRIPTS = {
    "job.sh": HEAD + "echo named as a script of hpcjobs\n",
    "array.sh": HEAD
    + "#SBATCH --array=0-2\n#SBATCH -o %x-%A-%a.txt\n"
    + "echo task $SLURM_ARRAY_TASK_ID\nexit $((SLURM_ARRAY_TASK_ID == 1))\n",
    "blank name.sh": HEAD + "#SBATCH -J 'two words'\necho blank\n",
    "elsewhere.sh": HEAD + "#SBATCH --output out/deep-%j.log\n#SBATCH --error err-%j.log\necho elsewhere\n",
    "het.sh": HEAD + "#SBATCH -n 1\n#SBATCH hetjob\n#SBATCH -n 1\necho heterogeneous\n",
    "python.py": "#!/usr/bin/env python3\n#SBATCH --time=5\nprint('from Python')\nraise SystemExit(3)\n",
    "no directive.sh": "#!/bin/sh\necho bare\n",
    "killed.sh": HEAD + "echo before\nkill -9 $$\n",
    "long.sh": HEAD + "echo started\nexec sleep 600\n",
    "held.sh": HEAD + "#SBATCH --hold\necho never\n",
}
NAMED = "scontrol update jobid=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID name=fit$SLURM_ARRAY_TASK_ID\n"
"""What a user of sbatch may have: ten scripts, each odd in another way."""
PRINTED = {
    "job.sh": "named as a script of hpcjobs\n",
    "array.sh": "task 0\ntask 1\ntask 2\n",
    "blank name.sh": "blank\n",
    "elsewhere.sh": "elsewhere\n",
    "het.sh": "heterogeneous\n",
    "python.py": "from Python\n",
    "no directive.sh": "bare\n",
    "killed.sh": "before\n",
}
CODES = {"array.sh": 1, "python.py": 3, "killed.sh": 137}
"""What `wait` ends with where that is not 0."""


@pytest.fixture
def ids(sandbox: Sandbox, workdir: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The scripts, submitted with sbatch; the id of each."""
    monkeypatch.setenv("SLURM_CONF", sandbox.slurm_conf)
    (workdir / "out").mkdir()
    ids = {}
    for name, text in SCRIPTS.items():
        ids[name] = submit(workdir, name, text)
    return ids


def submit(folder: Path, name: str, text: str) -> str:
    """The id of a script, submitted with sbatch."""
    (folder / name).write_text(text, encoding="utf-8")
    done = subprocess.run(["sbatch", "--parsable", name], capture_output=True, text=True, check=True, cwd=folder)
    return done.stdout.strip()


def states(*arguments: str) -> dict[str, set[str]]:
    """The states that ``ps`` lists, by job."""
    listed: dict[str, set[str]] = {}
    for row in ok("ps", *arguments, "--json").json:
        listed.setdefault(row["record"]["job_id"].split("_")[0].split("+")[0], set()).add(row["record"]["state"])
    return listed


def test_ten_odd_scripts_of_sbatch_are_served_by_every_verb_that_needs_no_run_folder(ids: dict[str, str]) -> None:
    for name in PRINTED:
        waited = within("wait", ids[name], "--timeout", "120")
        assert waited.code == CODES.get(name, 0), (name, waited)
    assert states("-a").keys() >= set(ids.values())
    assert states("-a")[ids["array.sh"]] == {"COMPLETED", "FAILED"}
    for name, printed in PRINTED.items():
        assert ok("logs", ids[name]).out == printed, name
        assert f"job {ids[name]}" in ok("show", ids[name]).out
    assert "exit code 3" in ok("why", ids["python.py"]).out
    assert "exit code 1" in ok("why", f"{ids['array.sh']}_1").out
    eventually(lambda: states()[ids["long.sh"]] == {"RUNNING"}, what="the long job's start")
    eventually(lambda: ok("logs", ids["long.sh"]).out == "started\n", what="the long job's first line")
    assert "PENDING" in ok("why", ids["held.sh"]).out
    assert ok("update", ids["long.sh"], "time=4m").out == f"job {ids['long.sh']}: TimeLimit=00:04:00\n"
    ok("release", ids["held.sh"])
    ok("hold", ids["held.sh"])
    refused = within("rerun", ids["long.sh"])
    assert refused.code == 6
    assert "what needs a run folder is not there" in refused.err


def test_cancel_ends_jobs_of_sbatch_beside_those_of_hpcjobs(ids: dict[str, str]) -> None:
    own = ok("submit", "--site", SITE, "--parsable", "sleep", "600").out.strip()
    cancelled = ok("cancel", own, ids["long.sh"], ids["job.sh"]).out
    assert {own, ids["long.sh"]} <= set(cancelled.split())
    assert ids["held.sh"] in ok("cancel", "--all").out
    eventually(lambda: not ok("ps", "--state", "PENDING,RUNNING", "--json").json, what="the end of all jobs")


def test_tasks_and_components_are_known_by_their_slurm_job_id_and_an_array_whatever_its_tasks_names(
    sandbox: Sandbox, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", sandbox.slurm_conf)
    texts = {
        "het.sh": HEAD + "#SBATCH -n 1\n#SBATCH hetjob\n#SBATCH -n 1\nexec sleep 600\n",
        "array.sh": HEAD + "#SBATCH --array=0-1\n" + NAMED + "exec sleep 600\n",
    }
    het, array = (submit(workdir, name, text) for name, text in texts.items())
    eventually(
        lambda: [row["name"] for row in ok("ps", "--json").json if row["name"].startswith("fit")] == ["fit0", "fit1"]
    )
    component = str(int(het) + 1)
    assert f"{het}+1: RUNNING" in ok("show", component).out
    shown = ok("show", het).out
    assert all(f"{het}+{n}: RUNNING" in shown for n in range(2))
    squeue = ["squeue", "--noheader", "--format=%A %i"]
    numbers = dict(line.split()[::-1] for line in subprocess.check_output(squeue, text=True).splitlines())
    assert ok("cancel", numbers[f"{array}_0"]).out == f"cancelled {array}_0\n"
    assert ok("cancel", array).out == f"cancelled {array}\n"
    assert ok("cancel", het).out == f"cancelled {het}\n"
    eventually(lambda: not ok("ps", "--state", "PENDING,RUNNING", "--json").json, what="the end of all jobs")


def test_the_log_of_a_job_that_slurmctld_has_forgotten_is_found(ids: dict[str, str]) -> None:
    """As when MinJobAge has passed: scontrol knows no job any more."""
    names = ("elsewhere.sh", "array.sh", "job.sh")
    for name in names:
        within("wait", ids[name], "--timeout", "120")
    forgetful = Path("forgetful").absolute()
    forgetful.mkdir()
    answer(forgetful, "scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    path = f"{forgetful}:{os.environ['PATH']}"
    for name in names:
        assert hpcjobs("logs", ids[name], env={"PATH": path}).out == PRINTED[name], name


def test_a_job_whose_name_is_not_utf8_is_served_by_every_verb(
    sandbox: Sandbox, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """slurmctld keeps the byte, slurmdbd a question mark, and JSON can have no such byte."""
    monkeypatch.setenv("SLURM_CONF", sandbox.slurm_conf)
    (workdir / "odd.sh").write_text("#!/bin/bash\nsleep 600\n")
    command = [b"sbatch", b"--parsable", b"-J", b"a\xffb", b"odd.sh"]
    job_id = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    eventually(lambda: states().get(job_id) == {"RUNNING"}, what="the start")
    assert [row["name"] for row in ok("ps", "--json").json if row["record"]["job_id"] == job_id] == ["a?b"]
    assert f"job {job_id}  a?b" in ok("show", job_id).out
    assert ok("show", job_id, "--json").json
    ok("cancel", job_id)
    waited = within("wait", job_id, "--timeout", "120")
    assert "CANCELLED" in waited.out + waited.err
    assert states("-a")[job_id] == {"CANCELLED"}


@pytest.mark.parametrize("name", ["日本", "é\u202evil"])
def test_an_ended_job_whose_name_the_accounting_may_be_unable_to_store_is_known(
    sandbox: Sandbox, workdir: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Where the database's text is Latin-1 (Debian 12), sacct has question marks for the rest."""
    monkeypatch.setenv("SLURM_CONF", sandbox.slurm_conf)
    (workdir / "odd.sh").write_text("#!/bin/bash\ntrue\n")
    command = ["sbatch", "--parsable", "-J", name, "odd.sh"]
    job_id = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    accounted = ["sacct", "-nXPj", job_id, "-o", "State"]
    eventually(
        lambda: "COMPLETED" in subprocess.run(accounted, check=True, capture_output=True, text=True).stdout,
        what="the job's end in the accounting",
    )
    assert within("cancel", job_id).out == f"job {job_id} had ended before: COMPLETED\n"
    assert states("-a")[job_id] == {"COMPLETED"}
