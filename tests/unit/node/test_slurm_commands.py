"""What an attempt asks of Slurm, with recorded answers in Slurm's place."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hpcjobs.node.schedulers import Slurm, outside_job
from hpcjobs.processes.start import Result

START, END = 1_700_000_000, 1_700_003_600
FAILED = Result(1, "", "no such command")
DISABLED = Result(1, "", "Requested operation is presently disabled for job 42")


class Cluster:
    """Results by command; what was asked is kept."""

    def __init__(self, **environ: str) -> None:
        self.environ = {"SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST": "n[1-2]", **environ}
        self.job = (
            f"JobId=42 JobState=RUNNING Reason=None Restarts=0 StartTime={START} EndTime={END} ExcNodeList=(null)"
        )
        self.answers: dict[str, Result | Callable[[], Result]] = {
            "scontrol show hostnames": Result(0, "n1\nn2\n", ""),
            "scontrol requeue": Result(0, "", ""),
            "sbatch --test-only": Result(0, "", ""),
        }
        self.queries: list[list[str]] = []
        self.env: dict[str, dict[str, str]] = {}
        self.monotonic, self.wall = 50.0, float(START)

    def run(self, arguments: list[str], env: dict[str, str]) -> Result:
        self.queries.append(arguments)
        self.env[arguments[0]] = env
        if arguments[:6] == ["scontrol", "--all", "--oneliner", "--local", "show", "job"]:
            return Result(0, self.job + "\n", "")
        line = " ".join(arguments)
        answer = next((self.answers[known] for known in self.answers if line.startswith(known)), FAILED)
        return answer() if callable(answer) else answer

    def sleep(self, seconds: float) -> None:
        self.monotonic += seconds

    @property
    def slurm(self) -> Slurm:
        return Slurm(self.environ, self.run, job_script="/run/job.sh", monotonic=lambda: self.monotonic,
                     wall=lambda: self.wall, sleep=self.sleep)  # fmt: skip

    def commands(self, start: str) -> list[str]:
        return [" ".join(arguments) for arguments in self.queries if " ".join(arguments).startswith(start)]


def controller_says(now: int) -> Result:
    return Result(0, f"*****\nsdiag output at Tue Nov 14 22:13:20 2023 ({now})\nData since ...\n", "")


def test_the_row_of_the_cluster_that_a_job_left_is_no_cause_of_an_earlier_end() -> None:
    cluster = Cluster()
    cluster.answers["sacct"] = Result(0, "NODE_FAIL\nREVOKED\n", "")
    assert cluster.slurm.read_earlier_cause("7") == "node"


def test_a_job_that_runs_on_another_cluster_of_the_federation_is_asked_for_there() -> None:
    """scontrol's first record of it is that of the cluster where it was submitted: it shows neither state nor limit."""
    cluster = Cluster()
    cluster.answers["scontrol --all --oneliner show job"] = Result(0, "JobId=7 JobState=REVOKED Reason=None\n", "")
    assert cluster.slurm.read_cause() == "running"
    assert cluster.slurm.read_limit() is not None
    assert cluster.slurm.start_again([]).decision == "requeued"


def test_a_task_of_an_array_is_named_by_its_array_and_index_even_if_its_raw_id_is_the_arrays_own() -> None:
    cluster = Cluster(SLURM_ARRAY_JOB_ID="42", SLURM_ARRAY_TASK_ID="2")
    slurm = cluster.slurm
    slurm.read_limit()
    slurm.read_earlier_cause(slurm.job_id)
    slurm.start_again(["n1"])
    assert {arguments[-1] for arguments in cluster.queries if arguments[:2] == ["scontrol", "requeue"]} == {"42_2"}
    named = [" ".join(arguments) for arguments in cluster.queries if any("42" in argument for argument in arguments)]
    assert named
    assert all("42_2" in line for line in named), named


@pytest.mark.parametrize("late_s", [-120, 0, 120])
def test_the_time_left_is_by_the_controllers_clock_whatever_this_hosts_clock_says(late_s: int) -> None:
    cluster = Cluster()
    cluster.answers["sdiag"] = controller_says(START + 30)
    cluster.wall = START + 30 - late_s
    slurm = cluster.slurm
    limit = slurm.read_limit()
    assert limit is not None
    assert (limit.left_s, limit.total_s) == (3570, 3600)
    cluster.monotonic += 100
    cluster.wall += 5000  # somebody sets this host's clock
    cluster.job = cluster.job.replace(str(END), str(START + 600))  # and an administrator shortens the limit
    limit = slurm.read_limit()
    assert limit is not None
    assert (limit.left_s, limit.total_s) == (470, 600)


@pytest.mark.parametrize(("delay_s", "left_s"), [(0, 3600), (45, 3555), (-120, 3600), (3000, 3600)])
def test_without_the_controllers_clock_a_plausible_prolog_counts_and_a_wrong_clock_does_not(
    delay_s: int, left_s: int
) -> None:
    cluster = Cluster()
    cluster.wall = START + delay_s
    limit = cluster.slurm.read_limit()
    assert limit is not None
    assert limit.left_s == left_s


def test_no_limit_and_no_answer_are_two_things() -> None:
    cluster = Cluster()
    cluster.job = f"JobId=42 StartTime={START} EndTime=Unknown TimeLimit=UNLIMITED"
    limit = cluster.slurm.read_limit()
    assert limit is not None
    assert limit.left_s == float("inf")
    cluster.job = "slurm_load_jobs error: Unable to contact slurm controller"
    assert cluster.slurm.read_limit() is None


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        ("JobState=RUNNING Reason=None", "running"),
        ("JobState=SIGNALING Reason=None", "running"),
        ("JobState=SUSPENDED Reason=None", "running"),
        ("JobState=COMPLETING Reason=TimeLimit", "timeout"),
        ("JobState=COMPLETING Reason=NodeDown", "node"),
        ("JobState=COMPLETING Reason=None PreemptTime=None", "cancelled"),
        (f"JobState=COMPLETING Reason=None StartTime={START} PreemptTime={START + 9}", "preempt"),
        (f"JobState=COMPLETING Reason=None StartTime={START} PreemptTime={START - 9}", "cancelled"),
        ("JobState=CANCELLED Reason=None", "cancelled"),
        ("JobState=COMPLETING Reason=BeginTime Restarts=1", "requeued"),
        ("JobState=COMPLETING Reason=JobLaunchFailure ExitCode=0:9", "failed"),
        ("JobState=COMPLETING Reason=NonZeroExitCode ExitCode=1:0", "failed"),
        ("JobState=COMPLETING Reason=RaisedSignal:9(Killed) ExitCode=0:9", "failed"),
        ("JobState=COMPLETING Reason=None ExitCode=0:9", "cancelled"),  # its script was killed after it
        ("slurm_load_jobs error: Invalid job id specified", None),
    ],
)
def test_slurm_knows_why_it_takes_a_job_away(fields: str, cause: str | None) -> None:
    cluster = Cluster()
    cluster.job = fields
    assert cluster.slurm.read_cause() == cause


@pytest.mark.parametrize(
    ("states", "cause"),
    [
        ("NODE_FAIL\nRUNNING\n", "node"),
        ("TIMEOUT\n", "timeout"),
        ("PREEMPTED\nREQUEUED\nPENDING\n", "preempt"),
        ("CANCELLED by 0\n", "preempt"),
        ("", "preempt"),
    ],
)
def test_an_end_that_left_no_line_has_the_cause_of_the_accounting(states: str, cause: str) -> None:
    cluster = Cluster()
    cluster.answers["sacct"] = Result(0, states, "")
    assert cluster.slurm.read_earlier_cause("42") == cause


def test_suspects_are_left_out_under_slurms_names_and_only_where_the_job_remains_possible() -> None:
    cluster = Cluster()
    cluster.job = cluster.job.replace("(null)", "n9")
    cluster.answers = {"scontrol show hostnames n9": Result(0, "n9\n", ""), **cluster.answers}
    assert cluster.slurm.start_again(["n2.cluster.example", "n2", "stranger"]).decision == "requeued"
    assert cluster.commands("scontrol update") == ["scontrol update JobId=42 ExcNodeList=n9,n2"]
    cluster.answers["sbatch --test-only"] = Result(1, "", "Requested node configuration is not available")
    cluster.queries.clear()
    assert cluster.slurm.start_again(["n2"]).decision == "requeued"
    assert cluster.commands("scontrol update") == []


def test_where_too_few_nodes_are_left_the_oldest_suspicion_is_given_up_and_never_what_the_user_excluded() -> None:
    cluster = Cluster()
    cluster.job = cluster.job.replace("(null)", "n[8-9]")
    impossible = Result(1, "", "Requested node configuration is not available")
    cluster.answers = {
        "scontrol show hostnames n[8-9]": Result(0, "n8\nn9\n", ""),
        "sbatch --test-only --exclude=n9,n8,n2": impossible,
        **cluster.answers,
    }
    cluster.slurm.start_again(["n8", "n2"])  # n8 was suspected before, and n9 is the user's
    assert cluster.commands("scontrol update") == ["scontrol update JobId=42 ExcNodeList=n9,n2"]


@pytest.mark.parametrize(
    "out",
    ["77\n", "77;tu-hpc\n", "Welcome to Slurm 22\n77\nYour quota: 12 of 400\n", "banner 1234\n77;tu-hpc\n"],
)
def test_the_id_of_a_resubmission_is_a_line_of_its_own_whatever_a_site_prints(out: str) -> None:
    cluster = Cluster()
    cluster.answers["scontrol requeue"] = DISABLED
    cluster.answers["sbatch --parsable"] = Result(0, out, "sbatch: 5 jobs left today\n")
    continuation = cluster.slurm.start_again([])
    assert (continuation.decision, continuation.job_id) == ("resubmitted as 77", "77")
    assert "--dependency=afterany:42" in cluster.commands("sbatch --parsable")[0]


def queue_of(*jobs: str) -> Result:
    return Result(0, "".join(f"{each}\n" for each in ("7 /elsewhere/job.sh", "41 /run/job.sh", *jobs)), "")


@pytest.mark.parametrize(
    "lost",
    [
        Result(124, "", "sbatch did not answer within 30 s"),
        Result(1, "", "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"),
        Result(0, "Welcome to the cluster\n", ""),
        Result(-9, "", ""),
        Result(1, "77\n", "sbatch: error: the wrapper of this site failed"),
    ],
)
def test_a_resubmission_whose_answer_was_lost_is_found_in_the_queue_and_not_sent_again(lost: Result) -> None:
    cluster = Cluster()
    cluster.answers |= {"scontrol requeue": DISABLED, "squeue": queue_of("42 /run/job.sh")}

    def sbatch() -> Result:
        cluster.answers["squeue"] = queue_of("42 /run/job.sh", "77 /run/job.sh", "78_[1-3] /run/job.sh")
        return lost

    cluster.answers["sbatch --parsable"] = sbatch
    continuation = cluster.slurm.start_again([])
    assert (continuation.decision, continuation.job_id) == ("resubmitted as 77", "77")
    assert len(cluster.commands("sbatch --parsable")) == 1
    assert cluster.commands("scancel") == []


def test_of_jobs_that_a_repeated_sbatch_made_the_first_one_stays() -> None:
    """The controller takes up a request after it has answered a later question."""
    cluster = Cluster()
    cluster.answers |= {"scontrol requeue": DISABLED, "squeue": queue_of()}
    lost = Result(1, "", "sbatch: error: Batch job submission failed: Zero Bytes were transmitted or received")

    def sbatch() -> Result:
        if len(cluster.commands("sbatch --parsable")) == 1:
            return lost
        cluster.answers["squeue"] = queue_of("79 /run/job.sh", "77 /run/job.sh", "78 /run/job.sh")
        return Result(0, "79\n", "")

    cluster.answers["sbatch --parsable"] = sbatch
    assert cluster.slurm.start_again([]).job_id == "77"
    assert cluster.commands("scancel") == ["scancel --quiet 78 79"]


def test_a_resubmission_that_a_killed_process_made_is_taken_over() -> None:
    cluster = Cluster()
    cluster.answers |= {"scontrol requeue": DISABLED, "squeue": queue_of("77 /run/job.sh")}
    assert cluster.slurm.start_again([]).job_id == "77"
    assert cluster.commands("sbatch --parsable") == []


def test_a_lost_answer_is_not_sent_again_where_the_queue_cannot_be_read() -> None:
    cluster = Cluster()
    cluster.answers |= {"scontrol requeue": DISABLED, "sbatch --parsable": Result(-9, "", "")}
    assert cluster.slurm.start_again([]).decision == f"ended: {DISABLED.err}; no job id from sbatch"
    assert len(cluster.commands("sbatch --parsable")) == 1


def test_a_resubmitted_job_gets_the_locale_and_time_format_of_its_user_and_not_those_of_our_questions() -> None:
    cluster = Cluster(LC_ALL="de_DE.UTF-8")
    cluster.answers["scontrol requeue"] = DISABLED
    cluster.slurm.start_again([])
    assert cluster.env["scontrol"]["LC_ALL"] == "C"
    assert cluster.env["sbatch"] == {"LC_ALL": "de_DE.UTF-8"}


@pytest.mark.parametrize("comment", ["Comment=Restarts=7", "Comment=x JobState=TIMEOUT AdminComment=y Restarts=x"])
def test_what_a_comment_of_the_job_holds_is_not_taken_for_its_state(comment: str) -> None:
    cluster = Cluster()
    cluster.job += f" WorkDir=/home {comment} Power="
    assert cluster.slurm.read_cause() == "running"


def test_a_refusal_of_both_ends_the_job_with_both_reasons() -> None:
    cluster = Cluster()
    cluster.answers["scontrol requeue"] = Result(1, "", "Requested operation is presently disabled for job 42\n")
    cluster.answers["sbatch --parsable"] = Result(0, "Welcome, user 12\n", "")
    decision = cluster.slurm.start_again([]).decision
    assert decision == "ended: Requested operation is presently disabled for job 42; Welcome, user 12"


def test_a_controller_that_restarts_is_asked_again() -> None:
    cluster = Cluster()
    answers = iter([Result(1, "", "slurm_requeue error: Unable to contact slurm controller (connect failure)")] * 3)
    cluster.answers["scontrol requeue"] = lambda: next(answers, Result(0, "", ""))
    assert cluster.slurm.start_again([]).decision == "requeued"
    assert cluster.commands("sbatch") == []


@pytest.mark.parametrize(
    ("fields", "requests", "decision"),
    [
        ("COMPLETING Reason=None", 1, "ended: the job was cancelled"),
        ("COMPLETING Reason=BeginTime", 1, "requeued"),
        ("RUNNING", 2, "requeued"),
        ("COMPLETING Reason=NodeDown", 2, "requeued"),
    ],
)
@pytest.mark.parametrize(
    "lost", [Result(1, "", "slurm_requeue error: Socket timed out on send/recv operation"), Result(-9, "", "")],
    ids=["timed out", "killed"],
)  # fmt: skip
def test_a_requeue_whose_answer_was_lost_is_not_repeated_for_a_job_that_was_cancelled_since(
    lost: Result, fields: str, requests: int, decision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster()
    answers = iter([lost])

    def requeue() -> Result:
        cluster.job = "slurm_load_jobs error: Unable to contact slurm controller"
        return next(answers, Result(0, "", ""))

    def sleep(seconds: float) -> None:
        if cluster.monotonic > 59:
            cluster.job = f"JobId=42 JobState={fields} Restarts={int('BeginTime' in fields)} StartTime={START}"
        cluster.monotonic += seconds

    monkeypatch.setattr(cluster, "sleep", sleep)
    cluster.answers["scontrol requeue"] = requeue
    assert cluster.slurm.start_again([]).decision == decision
    assert len(cluster.commands("scontrol requeue")) == requests


LOST = [
    Result(124, "", "sbatch did not answer within 30 s"),
    Result(1, "", "sbatch: error: Unable to contact slurm controller (connect failure)"),
    Result(-9, "", ""),
]


@pytest.mark.parametrize("lost", LOST)
def test_a_lost_answer_to_the_check_without_a_suspect_is_no_refusal(lost: Result) -> None:
    cluster = Cluster()
    answers = iter([lost] * 3)
    cluster.answers["sbatch --test-only"] = lambda: next(answers, Result(0, "", ""))
    assert cluster.slurm.start_again(["n2"]).decision == "requeued"
    assert cluster.commands("scontrol update") == ["scontrol update JobId=42 ExcNodeList=n2"]


def test_while_slurm_does_not_answer_whether_the_job_can_do_without_a_suspect_nothing_is_excluded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cluster = Cluster()
    cluster.answers["sbatch --test-only"] = LOST[1]
    assert cluster.slurm.start_again(["n1", "n2"]).decision == "requeued"
    assert cluster.commands("scontrol update") == []
    assert "too few nodes" not in capsys.readouterr().err
    assert cluster.monotonic < 50 + 310


def test_a_lost_answer_about_the_nodes_that_the_user_excludes_does_not_allow_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster()
    answers = iter([Result(1, "", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)")] * 2)
    cluster.answers["scontrol show hostnames"] = Result(0, "n9\n", "")
    cluster.job = cluster.job.replace("(null)", "n9")
    answered = cluster.run

    def run(arguments: list[str], env: dict[str, str]) -> Result:
        is_question = arguments[:6] == ["scontrol", "--all", "--oneliner", "--local", "show", "job"]
        return next(answers, answered(arguments, env)) if is_question else answered(arguments, env)

    monkeypatch.setattr(cluster, "run", run)
    cluster.answers = {"scontrol show hostnames n[1-2]": Result(0, "n1\nn2\n", ""), **cluster.answers}
    cluster.slurm.start_again(["n2"])
    assert cluster.commands("scontrol update") == ["scontrol update JobId=42 ExcNodeList=n9,n2"]


def test_what_slurm_requeued_itself_is_requeued() -> None:
    cluster = Cluster()
    cluster.answers["scontrol requeue"] = Result(1, "", "Job is pending execution for job 42")
    assert cluster.slurm.start_again([]).decision == "requeued"


def test_commands_get_neither_the_jobs_nor_the_users_defaults_of_slurm() -> None:
    environ = {"SLURM_CONF": "/c", "SLURM_JOB_ID": "1", "SQUEUE_FORMAT": "%i", "SBATCH_HOLD": "1", "PATH": "/bin"}
    assert outside_job(environ) == {"SLURM_CONF": "/c", "PATH": "/bin"}


def test_a_job_that_is_cancelled_while_it_is_submitted_again_is_not_continued() -> None:
    cluster = Cluster()
    cluster.answers |= {"scontrol requeue": DISABLED, "squeue": queue_of("42 /run/job.sh")}

    def submit() -> Result:
        cluster.job = cluster.job.replace("RUNNING", "COMPLETING")
        return Result(0, "77\n", "")

    cluster.answers["sbatch --parsable"] = submit
    outcome = cluster.slurm.start_again([])
    assert (outcome.decision, outcome.job_id) == ("ended: the job was cancelled", None)
    assert cluster.commands("scancel") == ["scancel --quiet 77"]
