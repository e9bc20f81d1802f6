"""How Slurm is asked: which command, how often, and what is made of its refusals."""

from __future__ import annotations

import errno
import itertools
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from slurm_rows import queued_row

import hpcjobs
from hpcjobs.errors import CommandMissingError, HpcJobsWarning, SchedulerDownError, SchedulerError
from hpcjobs.job.models import Plan
from hpcjobs.processes.programs import Result, clean_env, run
from hpcjobs.run import folder, index
from hpcjobs.run.index import Entry, entries, index_dir
from hpcjobs.run.job_files import write_submitted
from hpcjobs.run.submission import adopt_job, begin, read_begun
from hpcjobs.run.submit import submit
from hpcjobs.scheduler.slurm.client import SlurmScheduler
from hpcjobs.scheduler.slurm.parse import SEPARATOR

TIMED_OUT = Result(1, "", "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation\n")
REFUSED_CONNECTION = Result(1, "", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n")
NOBODY = Result(0, "", "")


class Recorded:
    """Answers in the place of Slurm's commands, and what was asked."""

    def __init__(self, **answers: list[Result]) -> None:
        self.answers = answers
        self.queries: list[str] = []
        self.commands: list[list[str]] = []
        self.env: Mapping[str, str] = {}
        self.cwd: str | None = None
        self.paused: list[float] = []

    def __call__(self, argv: Sequence[str], *, cwd: str | None = None, env: Mapping[str, str] | None = None) -> Result:
        self.queries.append(argv[0])
        self.commands.append(list(argv))
        self.env, self.cwd = env or {}, cwd
        left = self.answers.get(argv[0], [NOBODY])
        return left.pop(0) if len(left) > 1 else left[0]

    def slurm(self, slurm_conf: str | None = None) -> SlurmScheduler:
        return SlurmScheduler(slurm_conf, runner=self, pause=self.paused.append)


@pytest.fixture
def plan() -> Plan:
    return hpcjobs.plan(["true"], site=replace(hpcjobs.load_site("sandbox"), node_local=()))


def queued(plan: Plan, *ids: str) -> Result:
    job = {"JobName": "x", "State": "PENDING", "Submit": 1, "Command": plan.command[-1]}
    return Result(0, "".join(queued_row(JobID=job_id, **job) + "\n" for job_id in ids), "")


@pytest.mark.parametrize(
    ("message", "job_id", "cluster"),
    [
        ("12\n", "12", None),
        ("12;east\n", "12", "east"),
        ("note\n7\n", "7", None),
        ("7\nThank you, project 1234 has 10 hours left.\n\n", "7", None),
        ("----\r\n12;east\r\n2026 quotas: see the wiki\r\n", "12", "east"),
    ],
)
def test_a_submission_is_one_sbatch_from_the_jobs_folder(
    plan: Plan, message: str, job_id: str, cluster: str | None, tmp_path: Path
) -> None:
    recorded = Recorded(sbatch=[Result(0, message, "")])
    (other := tmp_path / "other.conf").touch()
    taken = recorded.slurm(str(other)).submit(plan)
    assert (taken.job_id, taken.cluster) == (job_id, cluster)
    assert (recorded.queries, recorded.cwd) == (["sbatch"], plan.job.chdir)
    assert recorded.env["SLURM_CONF"] == str(other)


def test_what_the_centre_says_of_an_accepted_job_reaches_the_user(plan: Plan) -> None:
    """sbatch prints there what job_submit.lua has to say: a job that was moved to another partition, say."""
    recorded = Recorded(sbatch=[Result(0, "12\n", "sbatch: lua: moved to partition long\n\n")])
    with pytest.warns(HpcJobsWarning, match=r"\Asbatch: lua: moved to partition long\Z"):
        submit(plan, scheduler=recorded.slurm())


def test_an_sbatch_that_prints_a_banner_and_no_id_is_looked_for_in_the_queue(plan: Plan) -> None:
    banner = Result(0, "Welcome! 3 jobs of yours wait.\n", "")
    assert Recorded(sbatch=[banner], squeue=[queued(plan, "41")]).slurm().submit(plan).job_id == "41"
    with pytest.raises(SchedulerDownError, match="no job id") as caught:
        submit(plan, scheduler=Recorded(sbatch=[banner], squeue=[NOBODY]).slurm())
    assert caught.value.maybe_taken
    assert plan.run_dir.exists()


@pytest.mark.parametrize("is_writable_again", [True, False])
def test_a_job_that_may_have_been_accepted_is_found_though_its_submission_could_not_be_noted(
    plan: Plan, is_writable_again: bool
) -> None:
    banner = Result(0, "Welcome!\n", "")
    recorded = Recorded(sbatch=[banner], squeue=[NOBODY])
    obstacle = index_dir() / "begun"
    obstacle.parent.mkdir(parents=True)
    obstacle.touch()

    def run(argv: Sequence[str], **more: Any) -> Result:
        if is_writable_again:
            obstacle.unlink(missing_ok=True)
        return recorded(argv, **more)

    slurm = SlurmScheduler(runner=run, pause=recorded.paused.append)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(SchedulerDownError, match="no job id"):
            submit(plan, scheduler=slurm)
    texts = [str(warning.message) for warning in caught]
    if is_writable_again:
        assert [begun.run_dir for begun in read_begun()] == [str(plan.run_dir)]
        assert texts == []
    else:
        assert len(texts) == 1
        assert f"its run folder is {plan.run_dir}" in texts[0]


def test_the_job_of_a_killed_submitter_is_listed_though_the_list_could_not_be_written_at_first(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.create(plan, None)
    begin(plan)
    entry = Entry("41", plan.job.name, plan.job.site, plan.job.scheduler, str(plan.run_dir), 1.0)
    write_submitted(plan.run_dir, entry)  # and killed

    def fail(entry: Entry) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for _ in range(2):
        with monkeypatch.context() as full:
            full.setattr("hpcjobs.run.index.add", fail)
            assert adopt_job(plan.run_dir, Recorded().slurm()) == entry
        assert len(read_begun()) == 1
    assert adopt_job(plan.run_dir, Recorded().slurm()) == entry
    assert (entries(), read_begun()) == ([entry], [])


def test_a_job_that_only_the_list_knows_keeps_its_submit_time_when_it_is_named_by_its_folder(plan: Plan) -> None:
    """Found in the queue again, it would have the time of that look, and no record of the accounting would fit it."""
    folder.create(plan, None)
    for job_id, submitted in (
        ("7", 1.0),
        ("41", 2.0),
    ):  # submitted.json could not be written; 7 had a folder of this name
        index.add(Entry(job_id, plan.job.name, plan.job.site, plan.job.scheduler, str(plan.run_dir), submitted))
    adopted = adopt_job(plan.run_dir, Recorded(squeue=[queued(plan, "41")]).slurm())
    assert adopted is not None
    assert (adopted.job_id, adopted.submitted) == ("41", 2.0)


def test_the_earlier_job_of_a_folder_that_was_made_anew_is_not_taken_for_its_job(plan: Plan) -> None:
    index.add(Entry("7", plan.job.name, plan.job.site, plan.job.scheduler, str(plan.run_dir), 1.0))
    folder.create(plan, None)
    begin(plan)
    adopted = adopt_job(plan.run_dir, Recorded(squeue=[queued(plan, "41")]).slurm())
    assert adopted is not None
    assert adopted.job_id == "41"
    assert adopted.submitted > 1.0


def test_an_id_of_a_wrapper_that_fails_afterwards_is_looked_for_in_the_queue(plan: Plan) -> None:
    recorded = Recorded(sbatch=[Result(1, "41\n", "quota: command not found\n")], squeue=[queued(plan, "41")])
    assert recorded.slurm().submit(plan).job_id == "41"
    assert recorded.queries == ["sbatch", "squeue"]


def test_a_cluster_whose_configuration_is_gone_is_not_waited_for(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm's own commands look for it for a minute."""
    recorded = Recorded()
    with pytest.raises(SchedulerDownError, match=r"no Slurm to ask: its configuration /gone/slurm\.conf is not there"):
        recorded.slurm("/gone/slurm.conf").submit(plan)
    monkeypatch.setenv("SLURM_CONF", "/gone/too.conf")
    with pytest.raises(SchedulerDownError, match=r"its configuration /gone/too\.conf is not there"):
        recorded.slurm().queue()
    assert (recorded.queries, recorded.paused) == ([], [])


@pytest.mark.parametrize(
    ("message", "hint"),
    [
        (
            "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified",
            "-A",
        ),
        ("sbatch: error: invalid partition specified: x", "sinfo"),
        ("sbatch: error: Batch job submission failed: Invalid qos specification", "-q QOS"),
        ("sbatch: error: Requested node configuration is not available", "no node has all of this"),
    ],
)
def test_a_refusal_is_final_quoted_and_explained(plan: Plan, message: str, hint: str) -> None:
    recorded = Recorded(sbatch=[Result(1, "", message + "\n")])
    with pytest.raises(SchedulerError) as caught:
        submit(plan, scheduler=recorded.slurm())
    assert message in str(caught.value)
    assert hint in str(caught.value)
    assert (recorded.queries, caught.value.exit_code) == (["sbatch"], 7)
    assert not plan.run_dir.exists()


def test_a_controller_that_is_away_is_asked_again_with_growing_pauses(plan: Plan) -> None:
    recorded = Recorded(sbatch=[REFUSED_CONNECTION, REFUSED_CONNECTION, Result(0, "5\n", "")])
    assert recorded.slurm().submit(plan).job_id == "5"
    assert recorded.queries == ["sbatch"] * 3
    assert recorded.paused == sorted(recorded.paused)
    assert len(recorded.paused) == 2


def test_a_controller_that_stays_away_is_given_up_and_the_run_folder_taken_back(plan: Plan) -> None:
    recorded = Recorded(sbatch=[REFUSED_CONNECTION])
    with pytest.raises(SchedulerDownError, match="4 tries") as caught:
        submit(plan, scheduler=recorded.slurm())
    assert (caught.value.maybe_taken, plan.run_dir.exists()) == (False, False)
    assert recorded.queries == ["sbatch"] * 4


def test_what_slurm_itself_has_tried_for_long_is_not_tried_four_times(plan: Plan) -> None:
    """Without a slurmctld, one command takes up to twice MessageTimeout: 10 s by default, at many sites 30 s."""
    recorded = Recorded(squeue=[REFUSED_CONNECTION], sbatch=[REFUSED_CONNECTION])
    times = itertools.count(0.0, 60.0)
    slurm = SlurmScheduler(runner=recorded, pause=recorded.paused.append, clock=lambda: next(times))
    with pytest.raises(SchedulerDownError, match=r"no answer from Slurm \(squeue, 1 try\)"):
        slurm.queue()
    with pytest.raises(SchedulerDownError, match=r"no answer from Slurm \(sbatch, 1 try\)"):
        slurm.submit(plan)
    assert (recorded.queries, recorded.paused) == (["squeue", "sbatch"], [])


def test_after_a_lost_answer_the_queue_is_searched_before_asking_again(plan: Plan) -> None:
    recorded = Recorded(sbatch=[TIMED_OUT], squeue=[queued(plan, "41")])
    assert recorded.slurm().submit(plan).job_id == "41"
    assert recorded.queries == ["sbatch", "squeue"]


def test_a_job_taken_twice_is_cancelled_once(plan: Plan) -> None:
    folder.create(plan, None)
    recorded = Recorded(
        sbatch=[TIMED_OUT, Result(0, "42\n", "")], squeue=[*[NOBODY] * 4, queued(plan, "42", "41")], scancel=[NOBODY]
    )
    assert recorded.slurm().submit(plan).job_id == "41"
    assert recorded.queries == ["sbatch", *["squeue"] * 4, "sacct", "sbatch", "squeue", "scancel"]


def test_a_request_that_a_busy_controller_takes_up_after_the_queue_was_read_is_not_sent_again(plan: Plan) -> None:
    recorded = Recorded(sbatch=[TIMED_OUT], squeue=[NOBODY, NOBODY, queued(plan, "41")])
    assert recorded.slurm().submit(plan).job_id == "41"
    assert recorded.queries == ["sbatch", "squeue", "squeue", "squeue"]


def test_a_second_request_that_is_taken_up_late_is_cancelled(plan: Plan) -> None:
    folder.create(plan, None)
    recorded = Recorded(
        sbatch=[TIMED_OUT], squeue=[*[NOBODY] * 4, queued(plan, "41"), queued(plan, "41", "42")], scancel=[NOBODY]
    )
    assert recorded.slurm().submit(plan).job_id == "41"
    assert recorded.queries[-2:] == ["squeue", "scancel"]


def test_a_job_in_a_folder_with_a_chinese_name_is_found_in_the_accounting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """slurmdbd stores a question mark for each byte outside Latin-1."""
    (tmp_path / "实验").mkdir()
    monkeypatch.chdir(tmp_path / "实验")
    plan = hpcjobs.plan(["true"], site=replace(hpcjobs.load_site("sandbox"), node_local=()))
    folder.create(plan, None)
    assert "实验" in plan.command[-1]
    stored = " ".join(plan.command).replace("实验", "??????")
    recorded = Recorded(sbatch=[TIMED_OUT], sacct=[Result(0, SEPARATOR.join(["41", stored]) + "\n", "")])
    assert recorded.slurm().submit(plan).job_id == "41"


@pytest.mark.parametrize("queue", [NOBODY, REFUSED_CONNECTION])
def test_a_submission_nobody_knows_the_fate_of_keeps_its_run_folder(plan: Plan, queue: Result) -> None:
    recorded = Recorded(sbatch=[TIMED_OUT], squeue=[queue])
    with pytest.raises(SchedulerDownError) as caught:
        submit(plan, scheduler=recorded.slurm())
    assert caught.value.maybe_taken
    assert (plan.run_dir / "job.sh").exists()


def test_a_cluster_without_accounting_is_asked_through_its_controller() -> None:
    shown = "JobId=9 JobName=a JobState=FAILED ExitCode=4:0\nJobId=10 JobName=b JobState=RUNNING ExitCode=0:0\n"
    for refusal in (Result(1, "", "Slurm accounting storage is disabled\n"), REFUSED_CONNECTION):
        recorded = Recorded(sacct=[refusal], scontrol=[Result(0, shown, "")])
        (record,) = recorded.slurm().account(["9"])
        assert (record.job_id, record.exit_code, record.source) == ("9", 4, "scontrol")


def test_without_accounting_only_the_jobs_in_question_are_shown() -> None:
    forgotten = Result(1, "", "slurm_load_jobs error: Invalid job id specified\n")
    known = Result(0, "JobId=9 JobName=a JobState=FAILED ExitCode=4:0\n", "")
    recorded = Recorded(sacct=[Result(1, "", "Slurm accounting storage is disabled\n")], scontrol=[forgotten, known])
    (record,) = recorded.slurm().account(["8", "9_0", "9_1"])
    assert record.job_id == "9"
    shown = [argv[-3:] for argv in recorded.commands if argv[0] == "scontrol"]
    assert shown == [["show", "job", "8"], ["show", "job", "9"]]


def test_a_disabled_accounting_is_none_and_one_that_is_away_is_one() -> None:
    disabled = Result(1, "", "Slurm accounting storage is disabled\n")
    answers = {False: disabled, True: REFUSED_CONNECTION}
    assert all(Recorded(sacct=[answer]).slurm().has_accounting() is expected for expected, answer in answers.items())


def test_jobs_in_hidden_partitions_are_asked_for_too() -> None:
    no_accounting = Result(1, "", "Slurm accounting storage is disabled\n")
    recorded = Recorded(squeue=[NOBODY], sacct=[no_accounting], scontrol=[NOBODY])
    recorded.slurm().queue()
    recorded.slurm().account(["9"])
    assert all("--all" in argv for argv in recorded.commands if argv[0] != "sacct")


def test_a_job_does_not_inherit_how_slurm_is_asked(plan: Plan) -> None:
    """sbatch hands its environment on: squeue in the job would print seconds since 1970."""
    recorded = Recorded(sbatch=[Result(0, "12\n", "")], squeue=[NOBODY])
    recorded.slurm().submit(plan)
    assert "SLURM_TIME_FORMAT" not in recorded.env
    assert recorded.env["HPCJOBS_REQUEST"] == str(plan.run_dir)  # by which a job knows that its request came late
    recorded.slurm().queue()
    assert recorded.env["SLURM_TIME_FORMAT"] == "%s"


def test_a_users_defaults_for_slurms_commands_do_not_reach_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SCANCEL_STATE=PENDING would leave a running job alone, SQUEUE_PARTITION would hide it."""
    defaults = {"SQUEUE_PARTITION": "x", "SACCT_FORMAT": "x", "SCANCEL_STATE": "PENDING", "SINFO_FORMAT": "x"}
    for name, value in defaults.items():
        monkeypatch.setenv(name, value)
    for command in ("squeue", "git"):
        (tmp_path / command).write_text("#!/bin/sh\nenv\n")
        (tmp_path / command).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert not defaults.keys() & {line.split("=")[0] for line in run(["squeue"]).out.splitlines()}
    assert defaults.keys() <= {line.split("=")[0] for line in run(["git"]).out.splitlines()}


def test_asking_about_no_jobs_asks_nobody() -> None:
    recorded = Recorded()
    assert recorded.slurm().account([]) == []
    recorded.slurm().cancel([])
    assert recorded.queries == []


def test_without_slurm_the_missing_command_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CommandMissingError, match="squeue: not found on PATH"):
        SlurmScheduler().queue()


def test_commands_run_without_what_an_enclosing_job_left() -> None:
    left = {
        "SLURM_JOB_ID": "1",
        "SLURM_CPU_BIND": "x",
        "SBATCH_ACCOUNT": "y",
        "SRUN_X": "1",
        "RANK": "3",
        "PMIX_RANK": "3",
    }
    remaining = {"SLURM_CONF": "/c", "SLURM_CLUSTERS": "east", "PATH": "/bin", "RANKING": "1", "MASTER": "m"}
    assert clean_env(left | remaining) == remaining


def test_settings_of_open_mpi_reach_the_job_but_not_what_mpirun_gave_an_enclosing_one() -> None:
    settings = {"OMPI_MCA_btl": "tcp,self", "PMIX_MCA_psec": "native", "OMPI_MCA_plm_rsh_agent": "ssh"}
    assert clean_env(settings) == settings
    task = {
        "OMPI_COMM_WORLD_RANK": "3",
        "OMPI_MCA_orte_hnp_uri": "1.0;tcp://node",
        "OMPI_MCA_ess_base_jobid": "1",
        "PMIX_NAMESPACE": "1",
    }
    assert clean_env(settings | task) == settings
