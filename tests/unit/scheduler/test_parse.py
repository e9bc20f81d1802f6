"""What Slurm 22.05 printed on a real cluster, and what it might."""

from __future__ import annotations

from pathlib import Path

import pytest
from slurm_rows import accounted_row, queued_row

from hpcjobs.scheduler.base import JobRecord, State
from hpcjobs.scheduler.slurm.estimates import parse_start
from hpcjobs.scheduler.slurm.parse import (
    ACCOUNTED,
    SEPARATOR,
    Table,
    parse_sacct,
    parse_scontrol,
    parse_squeue,
    parse_submitted,
)
from hpcjobs.slurm_commands import list_accounted, list_queue

RECORDED = Path(__file__).resolve().parents[2] / "data" / "slurm"


_BOTH = ("JobID", "JobName", "State", "Reason", "Partition", "NodeList", "NNodes", "Submit", "Start")
_TABLES = {
    "squeue.txt": (queued_row, (*_BOTH, "Elapsed", "TimeLimit", "Command")),
    "sacct.txt": (accounted_row, (*_BOTH, "End", "ElapsedRaw", "SubmitLine", "ExitCode")),
}
"""The columns that a recording has."""


def recorded(name: str) -> str:
    """The recording; of a table in the columns that are requested today."""
    text = (RECORDED / name).read_text(encoding="utf-8")
    if name not in _TABLES:
        return text
    make_row, columns = _TABLES[name]
    pieces, last, rows = text.split(SEPARATOR), len(columns) - 1, list[str]()
    for begin in range(0, len(pieces) - 1, last):  # a line's last value and the next one's first are one piece
        ends = pieces[begin].rpartition("\n")[2], pieces[begin + last].partition("\n")[0]
        values = (ends[0], *pieces[begin + 1 : begin + last], ends[1])
        rows.append(make_row(**dict(zip(columns, values, strict=True))) + "\n")
    return "".join(rows)


def by_id(records: list[JobRecord]) -> dict[str, JobRecord]:
    return {record.job_id: record for record in records}


def test_the_queue_is_read_with_reasons_estimates_and_pending_arrays() -> None:
    jobs = by_id(parse_squeue(recorded("squeue.txt")))
    assert {job_id: (job.name, job.state, job.reason) for job_id, job in jobs.items()} == {
        "250_[1-9%2]": ("pipe|name", State.PENDING, "JobHeldUser"),
        "251": ("नमस्ते", State.RUNNING, None),
        "252": ("new line", State.PENDING, "Dependency"),
        "256": ("waits", State.PENDING, "Resources"),
    }
    waiting, running = jobs["256"], jobs["251"]
    assert (waiting.start_estimate, waiting.started, waiting.elapsed_s, waiting.node_list) == (
        1795437265,
        None,
        None,
        None,
    )
    assert (running.start_estimate, running.started, running.elapsed_s, running.node_list) == (
        None,
        1795264465,
        4,
        "tu[01-02]",
    )
    assert (running.command, running.time_limit_s) == ("/root/j.sh", 2 * 86400)
    held = by_id(parse_squeue(recorded("squeue.txt").replace("Resources", "JobHeldUser")))["256"]
    assert (held.reason, held.start_estimate) == ("JobHeldUser", None)


def test_the_accounting_is_read_with_exit_codes_signals_and_times() -> None:
    jobs = by_id(parse_sacct(recorded("sacct.txt")))
    assert {job_id: (job.state, job.exit_code, job.signal) for job_id, job in jobs.items()} == {
        "250_[1-9%2]": (State.CANCELLED, 0, None),
        "251": (State.CANCELLED, 0, None),
        "252": (State.CANCELLED, 0, None),
        "253": (State.FAILED, 3, None),
        "254": (State.FAILED, 0, 9),
        "255_0": (State.COMPLETED, 0, None),
        "255_1": (State.FAILED, 1, None),
        "255_2": (State.FAILED, 2, None),
        "256": (State.CANCELLED, 0, None),
    }
    assert (jobs["251"].elapsed_s, jobs["251"].nnodes, jobs["251"].node_list) == (4, 2, "tu[01-02]")
    assert (jobs["256"].started, jobs["256"].node_list) == (None, None)


@pytest.mark.parametrize(
    ("state", "started", "reason"), [("COMPLETED", "1795264464", None), ("CANCELLED by 0", "None", "BeginTime")]
)
def test_why_a_job_once_waited_is_no_reason_for_its_end(state: str, started: str, reason: str | None) -> None:
    row = accounted_row(State=state, Reason="BeginTime", Submit=1795264464, Start=started, End=1795264470)
    (record,) = parse_sacct(row + "\n")
    assert record.reason == reason


@pytest.mark.parametrize(
    ("line", "script"),
    [
        ("sbatch --parsable /r/run 1/job.sh", "/r/run 1/job.sh"),
        ("/usr/bin/sbatch --parsable --dependency=afterany:7 /r/job.sh", "/r/job.sh"),
        ("sbatch --chdir /scratch /r/job.sh", "/scratch /r/job.sh"),
        ("sbatch -p gpu /r/job.sh", None),
        ("sbatch job.sh", None),
        ("sbatch --wrap echo\n3 lines", None),
        ("sbatch --parsable -D / -o /dev/null --wrap sleep 25", None),
        ("", None),
    ],
)
def test_the_script_of_an_accounted_job_is_that_of_its_sbatch(line: str, script: str | None) -> None:
    (record,) = parse_sacct(accounted_row(State="FAILED", SubmitLine=line, ExitCode="3:0") + "\n")
    assert (record.command, record.exit_code) == (script, 3)


def test_the_controllers_own_words_agree_with_the_accounting() -> None:
    shown = by_id(parse_scontrol(recorded("scontrol.txt")))
    accounted = by_id(parse_sacct(recorded("sacct.txt")))
    assert set(shown) == set(accounted) - {"252"}  # the recording of scontrol lacks the second line of its name
    for job_id, job in shown.items():
        assert job.state is accounted[job_id].state
        assert job.exit_code == accounted[job_id].exit_code


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("CANCELLED by 1000", State.CANCELLED),
        ("COMPLETED+", State.COMPLETED),
        ("OUT_OF_MEMORY", State.OUT_OF_MEMORY),
        ("REQUEUE_HOLD", State.PENDING),
        ("SPECIAL_EXIT", State.PENDING),
        ("EXPEDITING", State.PENDING),
        ("SIGNALING", State.RUNNING),
        ("LAUNCH_FAILED", State.LAUNCH_FAILED),
        ("A_STATE_OF_LATER_VERSIONS", State.UNKNOWN),
        ("completed", State.UNKNOWN),
        ("", State.UNKNOWN),
    ],
)
def test_a_state_is_its_first_word_and_a_new_one_is_unknown(text: str, state: State) -> None:
    assert State.parse(text) is state


def test_ended_means_that_nothing_more_is_to_come() -> None:
    going = {
        "PENDING",
        "CONFIGURING",
        "RUNNING",
        "COMPLETING",
        "SUSPENDED",
        "STOPPED",
        "REQUEUED",
        "RESIZING",
        "UNKNOWN",
    }
    assert {state.value for state in State if not state.ended} == going


def test_the_components_of_a_heterogeneous_job_have_the_ids_that_squeue_prints() -> None:
    """scontrol alone names each by a number of its own."""
    leader = "JobId=500 HetJobId=500 HetJobOffset=0 JobName=het.sh HetJobIdSet=500-501 UserId=me(1000)"
    second = leader.replace("JobId=500", "JobId=501", 1).replace("Offset=0", "Offset=1")
    out = f"{leader} JobState=RUNNING NodeList=n1\n{second} JobState=FAILED NodeList=n2\n"
    assert {job_id: job.node_list for job_id, job in by_id(parse_scontrol(out)).items()} == {
        "500+0": "n1",
        "500+1": "n2",
    }


def test_a_name_with_a_newline_does_not_hide_its_job_from_the_controllers_answer() -> None:
    (job,) = parse_scontrol("Welcome\nJobId=9 JobName=new\nline UserId=me(7) JobState=RUNNING ExitCode=0:0\n")
    assert (job.job_id, job.state, job.user) == ("9", State.RUNNING, "me")


def test_what_a_comment_of_the_job_holds_is_not_taken_for_its_state() -> None:
    comment = "Comment=x JobState=TIMEOUT Reason=NodeDown"
    (record,) = parse_scontrol(f"JobId=9 JobName=a JobState=FAILED Reason=None ExitCode=4:0 {comment} Power=")
    assert (record.state, record.reason) == (State.FAILED, None)


def test_a_path_with_blanks_and_the_time_that_a_job_ran_are_read_from_the_controllers_answer() -> None:
    out = (
        "JobId=9 JobName=two words UserId=me(7) GroupId=me(7) MCS_label=N/A JobState=FAILED Reason=None "
        "RunTime=00:01:05 NumNodes=1 CPUs/Task=1 ReqB:S:C:T=0:0:*:* "
        "Command=/home/Zoë O'Neil/a b=c/job.sh WorkDir=/home/Zoë O'Neil Power= "
    )
    (job,) = parse_scontrol(out)
    assert (job.name, job.command, job.elapsed_s) == ("two words", "/home/Zoë O'Neil/a b=c/job.sh", 65)
    assert (job.user, job.state, job.nnodes) == ("me", State.FAILED, 1)


@pytest.mark.parametrize("parse", [parse_squeue, parse_sacct, parse_scontrol])
@pytest.mark.parametrize("out", ["", "\n", "garbage", "1\x1f2\x1f3\n", "JobId=3", "slurm_load_jobs error: nothing"])
def test_output_of_another_shape_gives_no_records(parse: object, out: str) -> None:
    assert callable(parse)
    assert parse(out) == []


def test_a_banner_and_a_line_cut_off_do_not_hide_the_jobs_beside_them() -> None:
    first, second = (accounted_row(JobID=job_id, State="RUNNING", End="Unknown") for job_id in (7, 9))
    out = f"Welcome, 2 jobs of yours run\n{first}\n8{SEPARATOR}b{SEPARATOR}RUN\n{second}\nBye\n"
    assert [record.job_id for record in parse_sacct(out)] == ["7", "9"]


@pytest.mark.parametrize("name", ["None", "Unknown", "N/A"])
def test_a_job_may_have_a_word_for_nothing_as_its_name(name: str) -> None:
    (record,) = parse_squeue(queued_row(JobName=name, State="PENDING") + "\n")
    assert record.name == name


def test_an_answer_in_blocks_gives_the_records_of_the_answer_in_one_piece() -> None:
    text = recorded("sacct.txt")
    for size in (1, 7, 100):
        records, rest = list[str](), ""
        for begin in range(0, len(text), size):
            split = ACCOUNTED.split(rest + text[begin : begin + size])
            records, rest = records + split.records, split.rest
        assert (records, rest) == (ACCOUNTED.split(text).records, "")


def test_one_table_asks_for_its_columns_by_either_command() -> None:
    table = Table(("JobID", "State", "Submit"), "|")
    assert list_accounted(*table, jobs=["7"])[-3:] == ["--format=JobID,State,Submit", "--allocations", "--jobs=7"]
    assert list_queue(*table, mine=True)[-2:] == ["--format=%i|%T|%V", "--me"]


@pytest.mark.parametrize("name", ["squeue.txt", "sacct.txt"])
def test_output_cut_short_anywhere_loses_rows_but_never_invents_any(name: str) -> None:
    parse = parse_squeue if name == "squeue.txt" else parse_sacct
    text = recorded(name)
    complete = {record.job_id for record in parse(text)}
    for end in range(0, len(text), 7):
        assert {record.job_id for record in parse(text[:end])} <= complete


def test_values_that_nobody_knows_are_none() -> None:
    times = {"Submit": "Unknown", "Start": "N/A", "End": "0", "ElapsedRaw": ""}
    row = accounted_row(JobName="(null)", State="PENDING", NodeList="None assigned", **times, ExitCode="")
    (record,) = parse_sacct(row)
    nothing = (record.name, record.reason, record.node_list, record.submitted, record.started, record.ended)
    assert nothing == (None,) * 6
    assert (record.exit_code, record.signal, record.elapsed_s) == (None, None, None)


@pytest.mark.parametrize(
    "text",
    [
        "sbatch: Job 9 to start at 1795437265 using 4 processors on nodes n[1-2] in partition p",
        "sbatch: Job 9 to start at 1795437265 using 4 processors on n1",
        "sbatch: lua: welcome\nsbatch: Job 9 to start at 1795437265 using 4 processors on nodes n1 in partition p\n",
        "Job 9 would start at 1795437265, as the queue stands.",
        "sbatch: JobId=9 StartTime=1795437265 Nodes=n1",
        "sbatch: Job 9 expected start time: 1795437265",
    ],
)
def test_an_estimated_start_is_read_in_several_wordings(text: str) -> None:
    assert parse_start(text) == 1795437265


def test_a_text_without_an_estimate_gives_none() -> None:
    assert parse_start("sbatch: jobs start at night\nallocation failure: Requested node is busy") is None


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        (["REVOKED", "RUNNING"], [State.RUNNING]),
        (["RUNNING", "REVOKED"], [State.RUNNING]),
        (["PENDING", "PENDING"], [State.PENDING]),
        (["PENDING", "CONFIGURING"], [State.CONFIGURING]),
        (["CANCELLED", "PENDING"], [State.PENDING]),  # put back by a requeue
        (["PENDING", "CANCELLED"], [State.PENDING]),
        (["COMPLETING", "PENDING"], [State.PENDING]),  # the same, while the nodes of the first start are cleaned up
        (["NODE_FAIL", "COMPLETED"], [State.COMPLETED]),
        (["REVOKED"], []),
    ],
)
def test_a_job_of_a_federation_is_where_it_runs_and_not_where_it_was_revoked(
    states: list[str], expected: list[State]
) -> None:
    submits = range(1764000000, 1764000000 + len(states))
    rows = "".join(
        queued_row(JobID=67108865, State=state, NodeList="n1", Submit=submit, Start=1764000100, Elapsed="1:00") + "\n"
        for submit, state in zip(submits, states, strict=True)
    )
    assert [record.state for record in parse_squeue(rows, lists_ended=True)] == expected
    alone = [State.RUNNING]  # the cluster that has it does not answer
    assert [record.state for record in parse_squeue(rows)] == (expected or alone)
    shown = "".join(
        f"JobId=67108865 JobName=train UserId=me(1) JobState={state} SubmitTime={submit}\n"
        for submit, state in zip(submits, states, strict=True)
    )
    assert [record.state for record in parse_scontrol(shown)] == expected


@pytest.mark.parametrize("clusters", [("REQUEUED", "TIMEOUT"), ("NODE_FAIL", "TIMEOUT"), ("PREEMPTED", "TIMEOUT")])
@pytest.mark.parametrize("order", [1, -1])
def test_of_a_job_that_ran_on_two_clusters_of_a_federation_the_last_start_is_accounted(
    clusters: tuple[str, str], order: int
) -> None:
    rows = [
        accounted_row(State=state, Submit=at, Start=at + 1, End=at + 9, SubmitLine="sbatch /r/job.sh")
        for at, state in zip((1764000000, 1764000100), clusters, strict=True)
    ]
    text = "".join(f"{row}\n" for row in rows[::order])
    assert [record.state for record in parse_sacct(text)] == [State.TIMEOUT]


def test_the_accounting_of_two_clusters_has_both_jobs_of_one_id_and_a_late_row_hides_no_end() -> None:
    times = {"Start": 1764000001, "End": 1764000009}
    first = accounted_row(Submit=1764000000, SubmitLine="sbatch /a/job.sh", **times)
    other = accounted_row(State="FAILED", Submit=1764000500, SubmitLine="sbatch /b/job.sh", **times)
    late = accounted_row(State="PENDING", Submit=1764000003, SubmitLine="sbatch /a/job.sh", **times)
    for row, expected in ((other, ["COMPLETED", "FAILED"]), (late, ["COMPLETED", "PENDING"])):
        text = f"{first}\n{row}\n"
        assert [record.state.value for record in parse_sacct(text)] == expected


@pytest.mark.parametrize(
    ("out", "expected"),
    [
        ("100\n", ("100", None)),
        ("welcome to 2 clusters\n100;alpha\nhours left: 5\n", ("100", "alpha")),
        ("100\n100\n", ("100", None)),
        ("100\nRemaining core hours:\n48211\n", None),  # either may be the job: its script tells
        ("nothing\n", None),
    ],
)
def test_the_id_of_a_submission_is_the_one_line_that_can_be_one(
    out: str, expected: tuple[str, str | None] | None
) -> None:
    assert parse_submitted(out) == expected
