"""The longest array that hpcjobs submits, and the longest list of hosts: no verb looks at each task or host."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from commandline import ok, within
from scripted_slurm import answer

from hpcjobs.run.job_files import log_path

MOST_S = 4.0
"""Of processor time; before, these took 6 to 30 s."""


@pytest.fixture
def slurm(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cluster that has forgotten all jobs, and has no accounting."""
    answers = here / "slurm"
    answers.mkdir()
    answer(answers, "squeue", ":")
    answer(answers, "sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    answer(
        answers,
        "scontrol",
        'case "$*" in *config*) echo "ClusterName = c" ;; *) echo "Invalid job id" >&2; exit 1; esac',
    )
    (here / "slurm.conf").write_text("ClusterName=c\n")
    partitions = "partitions: {main: {nodes: 4, node: {cpus: 4}, default: true}}"
    (here / "site.yaml").write_text(f"cluster: c\nslurm_conf: {here}/slurm.conf\n{partitions}\n")
    monkeypatch.setenv("PATH", f"{answers}:/usr/bin:/bin")
    return answers


def submit(slurm: Path, job_id: str, *arguments: str) -> Path:
    answer(slurm, "sbatch", f"echo '{job_id};c'")
    return Path(ok("submit", "--site", "./site.yaml", "--json", *arguments, "true").json["run_dir"])


@pytest.mark.parametrize("verb", ["why 42", "show 42", "logs 42", "cancel 42", "diff 42 43", "wait --timeout 0 42"])
def test_an_array_of_100000_tasks_is_answered_at_once(slurm: Path, verb: str) -> None:
    folder = submit(slurm, "42", "-a", "0-99999")
    submit(slurm, "43")
    state = {
        "job_id": "7",
        "state": "FAILED",
        "exit_code": 3,
        "started": 1763000000,
        "ended": 1763000100,
        "nodes": "n1",
    }
    (folder / "77777").mkdir()
    (folder / "77777" / "state.json").write_text(json.dumps(state))
    begun = time.process_time()
    output = within(*verb.split())
    assert time.process_time() - begun < MOST_S, verb
    if verb.startswith(("why", "wait")):
        assert "42_77777" in output.out + output.err, "the one task that began is found"


def test_wait_describes_some_failed_tasks_and_counts_the_others(slurm: Path) -> None:
    folder = submit(slurm, "42", "-a", "0-999")
    (folder / "777").mkdir()
    state = {"job_id": "7", "state": "FAILED", "exit_code": 3, "started": 1, "ended": 2, "nodes": "n1"}
    (folder / "777" / "state.json").write_text(json.dumps(state))
    (folder / "logs").mkdir(exist_ok=True)
    log_path(folder, "true", "42_777").write_text("first words\n")
    lines = within("wait", "--timeout", "0", "42").err.splitlines()
    logs = [line for line in lines if line.startswith("hpcjobs: log ")]
    assert (len(logs), logs[0].endswith("42_777.out")) == (1, True), logs
    assert lines[-1] == "hpcjobs: and 980 UNKNOWN; hpcjobs ps -a lists them"


def test_runs_on_a_million_hosts_are_compared_as_lists_of_ranges(slurm: Path) -> None:
    ranges = ",".join(f"{first:07d}-{min(first + 65535, 999_999):07d}" for first in range(0, 1_000_000, 65_536))
    for job_id, nodes in (("42", f"n[{ranges}]"), ("43", "n[0000001-0000002],x1")):
        folder = submit(slurm, job_id)
        state = {"job_id": job_id, "state": "COMPLETED", "exit_code": 0, "started": 1, "ended": 2, "nodes": nodes}
        (folder / "state.json").write_text(json.dumps(state))
    begun = time.process_time()
    text = ok("diff", "42", "43").out
    assert time.process_time() - begun < MOST_S
    assert f"nodes: n[{ranges}] -> n[0000001-0000002],x1" in text
    assert len(text) < 2000


def test_the_end_of_a_job_has_one_line(slurm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    submit(slurm, "42")
    now = int(time.time())
    fields = {"JobID": "42", "JobName": "true", "State": "CANCELLED by 0", "Start": str(now), "End": str(now + 1)}
    fields |= {"Submit": str(now), "ExitCode": "0:0", "NodeList": "n1", "User": os.environ.get("USER", "root")}
    script = "from __future__ import print_function\n"
    lister = slurm / "rows.py"
    lister.write_text(
        f"{script}import sys\nfields = {fields!r}\n"
        "options = dict(word[2:].partition('=')[::2] for word in sys.argv[1:])\n"
        "print(options['delimiter'].join(fields.get(name, '') for name in options['format'].split(',')))\n"
    )
    answer(slurm, "sacct", f'/usr/bin/env python3 {lister} "$@"')
    lines = within("wait", "42").err
    assert [line for line in lines.splitlines() if " 42 CANCELLED" in line] == ["hpcjobs: job 42 CANCELLED on n1"]
    answer(slurm, "sacct", ":")
    submit(slurm, "43")
    lines = within("wait", "43").err
    assert sum(" 43 UNKNOWN" in line for line in lines.splitlines()) == 1, lines
