"""Why jobs wait, from what Slurm's commands print."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import msgspec
import pytest

from hpcjobs.cli.why import print_pending
from hpcjobs.diagnosis.placement import explain_pending
from hpcjobs.diagnosis.reasons import REASONS, explain_reason
from hpcjobs.processes.programs import Result
from hpcjobs.run.index import Entry
from hpcjobs.scheduler.base import JobRecord, State
from hpcjobs.scheduler.slurm.estimates import Estimate, ask_sbatch

US = "\x1f"


class Slurm:
    """Answers of Slurm's commands, by the command; an unknown one fails."""

    def __init__(self, **answers: str) -> None:
        self.answers = answers
        self.commands: list[Sequence[str]] = []

    def __call__(self, argv: Sequence[str], *, cwd: str | None = None, env: Mapping[str, str] | None = None) -> Result:
        self.commands.append(argv)
        answer = self.answers.get(argv[0])
        return Result(1, "", f"{argv[0]}: error") if answer is None else Result(0, answer, "")


def queue(*rows: tuple[str, ...]) -> str:
    return "\n".join(US.join(row) for row in rows) + "\n"


def pending(reason: str) -> JobRecord:
    return JobRecord("20", State.PENDING, "squeue", name="train", reason=reason, partition="gpu")


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ("Priority", "Jobs with a higher priority"),
        ("(Resources)", "It is next"),
        ("QOSMaxGRESPerUser", "limit of the QOS for one job or one user"),
        ("AssocGrpCPUMinutesLimit", "jobs of the account together"),
        ("ReqNodeNotAvail, UnavailableNodes:n[1-3]", "down, drained or reserved"),
        ("DependencyNeverSatisfied", "can never start"),
        (
            "Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved_for_jobs_in_higher_priority_partitions",
            "down, drained, or reserved for other partitions",
        ),
        ("ReqNodeNotAvail,_Reserved_for_maintenance", "reaches into a maintenance"),
        (None, "a moment ago"),
        ("JobArrayTaskLimit,JobHeldUser", "own limit (%N) allows; It is held by its user"),
        ("JobHeldUser,ReqNodeNotAvail, UnavailableNodes:n[1,3]", "held by its user; Nodes that it needs are down"),
        ("SomethingOfTomorrow", "Slurm's reason is SomethingOfTomorrow"),
    ],
)
def test_slurms_reason_is_put_into_words_and_an_unknown_one_is_quoted(argument: str | None, text: str) -> None:
    assert text in explain_reason(argument).text


def test_a_held_task_is_explained_by_its_own_reason_where_squeue_lists_it_with_others() -> None:
    slurm = Slurm(scontrol="JobId=62 ArrayJobId=20 ArrayTaskId=2 JobState=PENDING Reason=JobHeldUser\n")
    record = msgspec.structs.replace(pending("JobArrayTaskLimit,JobHeldUser"), job_id="20_[1-3%1]")
    entry = Entry("20", "train", "mine", "slurm", "/runs/train", 0.0, array="0-3%1", task=2)
    answer = explain_pending(record, entry=entry, runner=slurm)
    assert (answer.reason, answer.text) == ("JobHeldUser", "It is held by its user")
    assert slurm.commands[0][-1] == "20_2"
    every = explain_pending(record, entry=msgspec.structs.replace(entry, task=None), runner=slurm)
    assert every.text.endswith("allows; It is held by its user")
    assert every.fix == ("scontrol show job 20  # has the reason of each task",)


def test_every_reason_says_something_that_is_not_slurms_word() -> None:
    assert all(" " in reason.text and part not in reason.text.split() for part, reason in REASONS.items())


def test_jobs_of_higher_priority_are_ahead_and_older_ones_of_the_same() -> None:
    slurm = Slurm(
        scontrol="JobId=20 Priority=100 Dependency=(null) JobState=PENDING\n",
        squeue=queue(
            ("18", "PENDING", "100", "ada", "2", "1:00:00", "gpu"),
            ("21", "PENDING", "100", "eve", "2", "1:00:00", "gpu"),
            ("30", "PENDING", "900", "bob", "8", "1:00:00", "gpu"),
            ("20", "PENDING", "100", "me", "1", "1:00:00", "gpu"),
            ("5", "RUNNING", "1", "ada", "2", "2:00:00", "gpu"),
            ("6", "RUNNING", "1", "bob", "2", "30:00", "gpu"),
        ),
    )
    answer = explain_pending(pending("Priority"), runner=slurm)
    assert [job.job_id for job in answer.waiting_before] == ["30", "18"]
    assert [(job.job_id, job.time_left_s) for job in answer.running] == [("6", 1800.0), ("5", 7200.0)]


def test_a_heterogeneous_job_waits_behind_another_one() -> None:
    slurm = Slurm(
        scontrol="JobId=20 Priority=100 Dependency=(null) JobState=PENDING\n",
        squeue=queue(
            ("20+1", "PENDING", "100", "me", "2", "1:00:00", "gpu"),
            ("15+0", "PENDING", "100", "eve", "2", "1:00:00", "gpu"),
        ),
    )
    answer = explain_pending(msgspec.structs.replace(pending("Priority"), job_id="20+0"), runner=slurm)
    assert [job.job_id for job in answer.waiting_before] == ["15+0"]


def test_the_jobs_that_a_dependency_names_are_shown_with_their_states() -> None:
    slurm = Slurm(
        scontrol="JobId=20 Priority=0 Dependency=afterok:12(failed),after:13+10(unfulfilled) JobState=FAILED\n"
    )
    answer = explain_pending(pending("DependencyNeverSatisfied"), runner=slurm)
    assert [(job.job_id, job.condition) for job in answer.awaited] == [("12", "afterok"), ("13", "after")], "10 minutes"
    assert answer.fix[0].startswith("scancel 20 && sbatch SCRIPT")


def test_a_queue_that_cannot_be_read_leaves_the_reason() -> None:
    answer = explain_pending(pending("Resources"), runner=Slurm())
    assert "next" in answer.text
    assert answer.waiting_before == ()


def test_a_refusal_of_test_only_is_quoted_without_its_prefixes_and_with_the_message_of_a_plugin() -> None:
    def refuse(argv: Sequence[str], *, cwd: str | None = None, env: Mapping[str, str] | None = None) -> Result:
        return Result(
            1, "", "sbatch: error: large jobs need --qos=big\nallocation failure: Invalid qos specification\n"
        )

    assert ask_sbatch([], runner=refuse) == Estimate(refusal="large jobs need --qos=big; Invalid qos specification")


@pytest.mark.parametrize(
    ("lost", "reason"),
    [
        (
            Result(1, "", "allocation failure: Unable to contact slurm controller (connect failure)"),
            "Unable to contact",
        ),
        (Result(1, "", "sbatch: error: Socket timed out on send/recv operation"), "Socket timed out"),
        (Result(-9, "", ""), "exit code -9"),
    ],
)
def test_a_lost_answer_of_test_only_is_no_refusal(lost: Result, reason: str) -> None:
    def lose(argv: Sequence[str], *, cwd: str | None = None, env: Mapping[str, str] | None = None) -> Result:
        return lost

    estimate = ask_sbatch([], runner=lose)
    assert (estimate.start, estimate.refusal) == (None, None)
    assert reason in estimate.messages[0]


@pytest.mark.parametrize(("start_estimate", "partitions"), [(600.0, []), (900.0, ["debug"]), (None, ["debug"])])
def test_only_what_starts_sooner_than_the_waiting_job_itself_is_suggested(
    start_estimate: float | None, partitions: list[str]
) -> None:
    """A new job like the waiting one would stand behind it, and start later than it does."""
    shown = "JobId=20 Priority=100 NumNodes=1 TimeLimit=00:01:00 Partition=gpu JobState=PENDING\n"

    def answer(argv: Sequence[str], *, cwd: str | None = None, env: Mapping[str, str] | None = None) -> Result:
        if argv[0] == "sbatch":
            start = 600 if "--partition=debug" in argv else 1200
            return Result(0, "", f"sbatch: Job 30 to start at {start} using 1 processors on nodes n1\n")
        texts = {"scontrol": shown, "sinfo": "gpu\ndebug\n", "squeue": ""}
        return Result(0, texts[argv[0]], "")

    record = JobRecord("20", State.PENDING, "squeue", reason="Priority", partition="gpu", start_estimate=start_estimate)
    explained = explain_pending(record, runner=answer)
    assert list(dict.fromkeys(row.partition for row in explained.sooner)) == partitions
    assert bool(explained.fix) == bool(partitions)


@pytest.mark.parametrize(("idle", "remark"), [(1, False), (2, True)])
def test_an_estimate_of_hours_is_explained_while_enough_nodes_are_idle(
    idle: int, remark: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm = Slurm(scontrol="JobId=20 Priority=1 NumNodes=2-2 JobState=PENDING\n", sinfo=f"gpu {idle} idle\n", squeue="")
    record = msgspec.structs.replace(pending("Priority"), start_estimate=time.time() + 14 * 3600)
    print_pending(explain_pending(record, runner=slurm))
    out = capsys.readouterr().out
    assert "Slurm expects it to start in 1" in out
    assert ("(2 nodes are idle now: it may start sooner" in out) is remark


def test_a_job_that_reaches_into_a_maintenance_is_told_its_begin_and_a_time_limit_that_ends_before() -> None:
    begin = int(time.time()) + 7200
    shown = f"ReservationName=upgrade StartTime={begin} EndTime={begin + 999} Flags=MAINT,SPEC_NODES State=INACTIVE\n"
    answer = explain_pending(pending("ReqNodeNotAvail, Reserved for maintenance"), runner=Slurm(scontrol=shown))
    assert "upgrade" in answer.text
    assert answer.fix[0].startswith("scontrol update JobId=20 TimeLimit=01:5")


def test_a_partition_in_which_a_plugin_would_not_leave_the_job_is_not_suggested() -> None:
    shown = "JobId=20 Priority=100 NumNodes=1 TimeLimit=00:01:00 Partition=gpu JobState=PENDING\n"

    def answer(argv: Sequence[str], *, cwd: str | None = None, env: Mapping[str, str] | None = None) -> Result:
        if argv[0] == "sbatch":
            named = next(option.partition("=")[2] for option in argv if option.startswith("--partition="))
            start, partition = {"gpu": (1200, "gpu"), "debug": (600, "other"), "fast": (600, "fast")}[named]
            text = f"sbatch: Job 30 to start at {start} using 1 processors on nodes n1 in partition {partition}\n"
            return Result(0, "", text)
        return Result(0, {"scontrol": shown, "sinfo": "gpu\ndebug\nfast\n", "squeue": ""}[argv[0]], "")

    explained = explain_pending(pending("Priority"), runner=answer)
    assert {row.partition for row in explained.sooner} == {"fast"}
