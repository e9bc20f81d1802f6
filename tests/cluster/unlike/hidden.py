"""A site without accounting and requeueing, with a hidden partition, private data and a plugin that refuses jobs.

Its sbatch is a wrapper that prints banners and exports nothing to the job. The user is an ordinary one, who has
settings for Slurm's commands.
"""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from commandline import Answer
from shared import shared_folder
from waiting import eventually

from hpcjobs import sandbox as sandboxes
from hpcjobs.sandbox import Sandbox, Shape
from hpcjobs.site.machine import current_sandbox
from hpcjobs.slurm_commands import hosts_of

SETTINGS = {
    "AccountingStorageType": "accounting_storage/none",
    **dict.fromkeys(("AccountingStorageEnforce", "AccountingStorageHost", "AccountingStoragePort"), ""),
    **dict.fromkeys(("AccountingStoragePass", "AccountingStoreFlags"), ""),
    "PrivateData": "jobs,nodes,partitions,reservations,usage,users",
    "JobSubmitPlugins": "lua",
    "JobRequeue": "0",
}
PLUGIN = """\
function slurm_job_submit(job, partitions, uid)
    slurm.log_user("Welcome. Maintenance is on")
    slurm.log_user("2026")
    if job.comment == "refuse this" then
        slurm.log_user("Jobs with this comment are not for this cluster.")
        return slurm.ERROR
    end
    job.requeue = 0
    return slurm.SUCCESS
end
function slurm_job_modify(job, record, partitions, uid)
    return slurm.SUCCESS
end
return slurm.SUCCESS
"""
WRAPPER = """\
#!/bin/sh
echo '*** 3 of your jobs wait ***'
echo
{sbatch} --export=NONE "$@" || exit $?
echo 'Your project has 1234 hours left.'
"""
# The user's own, for commands typed by hand: each would hide jobs from hpcjobs or spare them.
DEFAULTS = {
    "SQUEUE_PARTITION": "none",
    "SQUEUE_STATES": "COMPLETED",
    "SQUEUE_FORMAT": "%j",
    "SCANCEL_STATE": "PENDING",
    "SACCT_FORMAT": "User",
    "SBATCH_EXPORT": "NONE",
    "SBATCH_PARTITION": "cpu",
}
USER = "visitor"


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    hidden, plugin = {"cpu": "Hidden=YES"}, {"job_submit.lua": PLUGIN}
    shape = Shape(nodes=2, cpus_per_node=4, settings=SETTINGS, partition_settings=hidden, files=plugin)
    # An /etc of our own: see tools/elsewhere.
    subprocess.run(["useradd", "--no-create-home", "--home-dir", "/var/lib", "--shell", "/bin/bash", USER], check=True)
    try:
        yield sandboxes.up(shape)
    finally:
        sandboxes.down()


@dataclass(frozen=True)
class Visitor:
    """An ordinary user on the login node."""

    folder: Path
    env: dict[str, str]

    def hpcjobs(self, *arguments: str) -> Answer:
        # May read everything: this Python can lie in root's home.
        user = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--inh-caps=+dac_read_search"]
        command = [*user, "--ambient-caps=+dac_read_search", sys.executable, "-m", "hpcjobs", *arguments]
        done = subprocess.run(command, cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=300)
        return Answer(done.returncode, done.stdout, done.stderr)

    def run(self, *arguments: str) -> str:
        """What one of Slurm's own commands prints for the user."""
        user = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"]
        env = {name: value for name, value in self.env.items() if name not in DEFAULTS}
        record = current_sandbox()
        assert record is not None
        done = subprocess.run(
            [*user, *arguments],
            cwd=self.folder,
            env=env | {"PATH": "/usr/bin:/bin", "SLURM_CONF": record.slurm_conf},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout

    def submit(self, *arguments: str) -> tuple[str, Path]:
        answer = self.hpcjobs("submit", "--json", *arguments)
        assert answer.code == 0, answer
        return answer.json["job_id"], Path(answer.json["run_dir"])


@pytest.fixture
def visitor(sandbox: Sandbox) -> Iterator[Visitor]:
    with shared_folder() as folder:
        (folder / "bin").mkdir()
        (folder / "bin" / "sbatch").write_text(WRAPPER.format(sbatch="/usr/bin/sbatch"))
        (folder / "bin" / "sbatch").chmod(0o755)
        for path in (folder, *folder.rglob("*")):
            os.chown(path, *user_ids())
        env = {name: os.environ[name] for name in os.environ if not name.startswith(("SLURM_", "SBATCH_", "XDG_"))}
        own = {
            "HOME": str(folder),
            "USER": USER,
            "PATH": f"{folder}/bin:{os.environ['PATH']}",
            "HPCJOBS_SITE": "sandbox",
        }
        yield Visitor(folder, env | own | DEFAULTS)


def user_ids() -> tuple[int, int]:
    entry = pwd.getpwnam(USER)
    return entry.pw_uid, entry.pw_gid


def test_a_job_is_submitted_listed_followed_and_ends_with_its_own_code(visitor: Visitor) -> None:
    job_id, run_dir = visitor.submit("bash", "-c", "echo from $USER $SLURM_PROCID; exit 6")
    answer = visitor.hpcjobs("wait", job_id)
    assert answer.code == 6, (answer, (run_dir / "logs").glob("*"))
    (row,) = visitor.hpcjobs("ps", "--json").json
    assert (row["record"]["job_id"], row["record"]["state"], row["record"]["exit_code"]) == (job_id, "FAILED", 6)
    assert "exit code 6" in visitor.hpcjobs("show", job_id).out
    assert visitor.hpcjobs("logs", job_id).out.startswith("from visitor 0")


def test_a_running_job_is_found_by_ps_and_really_cancelled(visitor: Visitor) -> None:
    job_id, run_dir = visitor.submit("sleep", "600")
    eventually(lambda: (run_dir / "state.json").exists())
    assert state_of(visitor, job_id) == "RUNNING"
    assert visitor.hpcjobs("cancel", job_id).out == f"cancelled {job_id}\n"
    eventually(lambda: json.loads((run_dir / "state.json").read_text())["state"] == "CANCELLED")
    answer = visitor.hpcjobs("wait", job_id)
    assert answer.code not in (0, 6), answer
    assert f"job {job_id} CANCELLED" in answer.err
    assert "first failure" not in answer.err
    assert "had ended before: CANCELLED" in visitor.hpcjobs("cancel", job_id).out


def test_a_program_that_asks_to_be_started_again_goes_on_as_another_job_in_the_same_environment(
    sandbox: Sandbox, visitor: Visitor
) -> None:
    """Its comment reads like fields of `scontrol show job`; the nodes' own Python decides."""
    own_python = visitor.folder / "site_configs" / "own-python.yaml"
    own_python.parent.mkdir()
    partitions = {"cpu": {"nodes": 2, "node": {"cpus": 4}}}
    site = {"partitions": partitions, "defaults": {"time": "10m"}, "slurm_conf": sandbox.slurm_conf}
    own_python.write_text(json.dumps({**site, "node_python": "/usr/bin/python3"}))
    assert visitor.hpcjobs("sites", "trust", str(own_python)).code == 0
    program = (
        'echo "${LC_ALL-none} ${SLURM_TIME_FORMAT-none}"; [ ! -e $HPCJOBS_CONTROL_DIR/progress ] || exit 0; '
        "echo 5 > $HPCJOBS_CONTROL_DIR/progress; exit 85"
    )
    arguments = ["--site", "own-python", "--retries", "on", "-o", "comment=x JobState=TIMEOUT Restarts=7", "bash", "-c"]
    job_id, run_dir = visitor.submit(*arguments, program)
    answer = visitor.hpcjobs("wait", job_id)
    assert answer.code == 0, answer
    attempts = [json.loads(line) for line in (run_dir / "attempts.jsonl").read_text().splitlines()]
    assert [attempt["decision"] for attempt in attempts] == [f"resubmitted as {attempts[1]['job_id']}", "completed"]
    assert [line for line in visitor.hpcjobs("logs", job_id).out.splitlines() if "hpcjobs" not in line] == [
        "none none",
        "none none",
    ]


def state_of(visitor: Visitor, job_id: str) -> str:
    rows = visitor.hpcjobs("ps", "--json").json
    return str(next(row["record"]["state"] for row in rows if row["record"]["job_id"] == job_id))


def test_what_the_plugin_refuses_is_quoted_and_leaves_nothing(visitor: Visitor) -> None:
    answer = visitor.hpcjobs("submit", "-o", "comment=refuse this", "true")
    assert answer.code == 7, answer
    assert "Jobs with this comment are not for this cluster." in answer.err
    assert not list((visitor.folder / "runs").glob("true-*"))


def test_a_failure_is_explained_without_accounting_and_a_run_is_repeated_and_compared(visitor: Visitor) -> None:
    failing = ("bash", "-c", '[ "$SLURM_PROCID" = 1 ] || exec sleep 60; exec python3 -c "import nosuch"')
    job_id, _ = visitor.submit("-N", "2", *failing)
    assert visitor.hpcjobs("wait", job_id).code == 1
    answer = visitor.hpcjobs("why", job_id, "--json").json
    nodes = visitor.hpcjobs("show", job_id, "--json").json["records"][0]["node_list"]
    assert (answer["cause"], answer["rank"]) == ("python-module-missing", 1)
    assert answer["host"] == hosts_of(nodes)[1]
    # The wrapper prints more than the id; the plain command is the second one on PATH.
    plain_id = visitor.run("/usr/bin/sbatch", "--parsable", "--wrap", "exec nosuchcommand").split()[-1]
    eventually(lambda: visitor.hpcjobs("why", plain_id, "--json").json.get("cause") == "command-missing")
    table = visitor.hpcjobs("where", "--site", "sandbox", "-t", "5m", "true")
    assert (table.code, "at once" in table.out) == (0, True), table
    again = visitor.hpcjobs("rerun", job_id, "--env", "LR=1", "--json")
    assert again.code == 0, again
    visitor.hpcjobs("wait", again.json["job_id"])
    difference = visitor.hpcjobs("diff", job_id, again.json["job_id"], "--json").json
    assert difference["environment"] == [{"name": "env.LR", "first": None, "second": "1"}]
    assert not difference["settings"]
