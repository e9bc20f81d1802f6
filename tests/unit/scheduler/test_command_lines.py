"""Command lines of Slurm, and messages that mean that a daemon is away."""

from __future__ import annotations

import pytest

from hpcjobs import slurm_commands
from hpcjobs.node.schedulers import Slurm
from hpcjobs.processes.start import Result
from hpcjobs.scheduler.slurm.client import SlurmScheduler

AWAY = [
    "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
    "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation",
    "slurm_receive_msg: Zero Bytes were transmitted or received",
    "scontrol: error: slurm_persist_conn_open_without_init: failed to open persistent connection",
    "error: Slurm temporarily unable to accept job, sleeping and retrying",
    "slurm_update error: Slurm backup controller in standby mode",
    "Connection reset by peer",
]
FINAL = [
    "slurm_load_jobs error: Invalid job id specified",
    "sbatch: error: Batch job submission failed: Requested node configuration is not available",
    "Requested operation is presently disabled for job 42",
    "Access/permission denied",
]


@pytest.mark.parametrize("message", AWAY)
def test_login_host_and_node_ask_again_after_the_same_messages(message: str) -> None:
    assert slurm_commands.is_unanswered(message)
    answers = [Result(1, "", message), Result(0, "", "")]
    SlurmScheduler(runner=lambda *_, **__: answers.pop(0), pause=lambda _: None).queue()
    assert not answers
    tries = [Result(1, "", message), Result(0, "", "")]

    def answer(argv: list[str], env: dict[str, str]) -> Result:
        return Result(0, "JobId=42 JobState=RUNNING Restarts=0", "") if "show" in argv else tries.pop(0)

    node = Slurm({"SLURM_JOB_ID": "42"}, answer, job_script="/run/job.sh", sleep=lambda _: None)
    assert "is held" in node.hold()
    assert not tries


@pytest.mark.parametrize("message", FINAL)
def test_a_refusal_is_final(message: str) -> None:
    assert not slurm_commands.is_unanswered(message)


def test_jobs_and_nodes_of_hidden_partitions_are_listed() -> None:
    commands = (
        slurm_commands.list_queue(["JobID"], "|"),
        slurm_commands.list_node_states(),
        slurm_commands.count_nodes_by_state(None),
        slurm_commands.show_job("42"),
        slurm_commands.show_nodes(),
        slurm_commands.show_partitions(),
    )
    assert all("--all" in command for command in commands)


def test_times_are_given_to_sacct_as_local_time_after_1970() -> None:
    (since,) = (option for option in slurm_commands.list_accounted(["JobID"], "|", since=0) if "start" in option)
    assert since.startswith("--starttime=1970-01-0")
