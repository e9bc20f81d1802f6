"""One reader for each file of a run folder: it takes what the shell files write, and refuses everything else."""

from __future__ import annotations

import ast
import json
import math
import os
import re
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from hpcjobs import record
from hpcjobs.files import append_lines
from hpcjobs.record import manifest, metrics, monitor
from hpcjobs.record.control import Continuation, ControlDir
from hpcjobs.record.state import (
    Attempt,
    FirstFailure,
    State,
    StateFile,
    append_attempt,
    read_first_failure,
    read_history,
    read_state_file,
    replace_last,
    write_state,
)
from hpcjobs.run.index import Entry
from hpcjobs.run.job_files import write_submitted

ROOT = Path(__file__).resolve().parents[3]
SHELL = ROOT / "templates" / "shell"
STATE = StateFile("7", State.FAILED, 3, 100.0, 200.0, "n[1-2]", 1, FirstFailure(4, "n2", 3), "c", None)
ATTEMPT = Attempt("7", 100.0, None, "n1", None, "node", 12, 10, "requeued")


def run_shell(run_dir: Path, script: str, **variables: str) -> None:
    environ = {"PATH": os.environ["PATH"], "HPCJOBS_RUN_DIR": str(run_dir), "HPCJOBS_JOB_ID": "7", **variables}
    subprocess.run(["bash", "-c", script], env=environ, check=False, capture_output=True)


@pytest.mark.parametrize(
    ("recorded", "variables", "leaves"),
    [
        ("6", {}, True),
        ("7", {}, False),
        ("6", {"SLURM_RESTART_COUNT": "1"}, False),  # it was at work before the other one was recorded
        ("6", {"HPCJOBS_REQUEST": "/another/run"}, False),  # a user submits the script, from within a job
        ("6", {"HPCJOBS_REQUEST": ""}, False),
        ("5", {"SLURM_ARRAY_JOB_ID": "6", "SLURM_ARRAY_TASK_ID": "3"}, True),
        ("6", {"SLURM_ARRAY_JOB_ID": "6", "SLURM_ARRAY_TASK_ID": "3"}, False),
        (None, {}, False),
    ],
)
def test_a_job_whose_request_came_late_leaves_to_the_one_that_is_recorded(
    tmp_path: Path, recorded: str | None, variables: dict[str, str], leaves: bool
) -> None:
    task = tmp_path / variables.get("SLURM_ARRAY_TASK_ID", "")
    if recorded is not None:
        write_submitted(tmp_path, Entry(recorded, '"job_id":"7"', "mine", "slurm", str(tmp_path), 9.0))
    environ = {"HPCJOBS_REQUEST": str(tmp_path), "SLURM_JOB_NODELIST": "n1", "HPCJOBS_SCHEDULER": "slurm", **variables}
    run_shell(task, f'. {SHELL}/job.bash; echo "request$HPCJOBS_REQUEST" >{tmp_path}/ran', **environ)
    assert (tmp_path / "ran").exists() != leaves
    assert (task / record.STATE).exists() != leaves
    assert leaves or (tmp_path / "ran").read_text() == "request\n"  # jobs that it submits are other ones


@pytest.mark.parametrize("scheduler", ["local", "slurm"])
def test_the_reader_takes_the_state_that_the_job_script_writes(tmp_path: Path, scheduler: str) -> None:
    slurm = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_CLUSTER_NAME": "c", "SLURM_ARRAY_JOB_ID": "5"}
    variables = slurm if scheduler == "slurm" else {}
    job = f". {SHELL}/job.bash; cp $HPCJOBS_RUN_DIR/state.json $HPCJOBS_RUN_DIR/begun"
    run_shell(
        tmp_path,
        f"{job}; echo '3 4 n2' >$HPCJOBS_RUN_DIR/first_failure; exit 1",
        HPCJOBS_SCHEDULER=scheduler,
        **variables,
    )
    begun, ended = read_state_file(tmp_path / "begun"), read_state_file(tmp_path / record.STATE)
    assert (begun.state, begun.exit_code, begun.ended, begun.first_failure) == (State.RUNNING, None, None, None)
    assert (ended.job_id, ended.state, ended.exit_code) == ("7", State.FAILED, 3)
    assert ended.first_failure == read_first_failure(str(tmp_path)) == FirstFailure(4, "n2", 3)
    assert None not in (ended.started, ended.ended)
    if scheduler == "slurm":
        assert (ended.nodes, ended.cluster, ended.array_job_id) == ("n[1-2]", "c", "5")


def test_the_reader_takes_the_control_files_that_a_rank_writes(tmp_path: Path) -> None:
    control = ControlDir(str(tmp_path))
    for folder in ("ends", "started"):
        (tmp_path / "control" / folder).mkdir(parents=True)
    variables = {
        "HPCJOBS_CONTROL_DIR": control.path, "HPCJOBS_SCHEDULER": "slurm", "HPCJOBS_LAUNCHED_BY": "srun",
        "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "2", "HPCJOBS_NTASKS": "2",
        "HPCJOBS_NTASKS_PER_NODE": "2", "SLURMD_NODENAME": "n1",
    }  # fmt: skip
    for rank, program in (("0", "exit 0"), ("1", "kill -KILL $$")):
        run_shell(tmp_path, f"bash {SHELL}/rank.sh -- bash -c '{program}'", SLURM_PROCID=rank, **variables)
    assert (control.ends(), control.completed) == ({0: 0, 1: 137}, True)
    assert control.first_failure == FirstFailure(1, os.uname().nodename, 137)
    assert (control.suspects(), control.started_hosts()) == (["n1"], ["n1"])


def test_the_reader_takes_the_exit_code_that_a_batch_script_writes(tmp_path: Path) -> None:
    control = ControlDir(str(tmp_path))
    (tmp_path / "control" / "ends").mkdir(parents=True)
    wait = "bash -c 'exit 3' & _hj_await_step $!; _hj_record_script_end"
    variables = {"HPCJOBS_CONTROL_DIR": control.path, "HPCJOBS_SCHEDULER": "slurm", "SLURMD_NODENAME": "n1"}
    run_shell(tmp_path, f". {SHELL}/common.bash; . {SHELL}/job.bash; . {SHELL}/batch.bash; {wait}", **variables)
    assert (control.step_code, control.ends()) == (3, {0: 3})
    assert control.first_failure == FirstFailure(0, os.uname().nodename, 3)


def test_the_reader_takes_the_samples_of_both_samplers(tmp_path: Path) -> None:
    head, load = monitor.Head("n1", 1e9, 1.0, "7"), monitor.Load(cpu_percent=50.0)
    path = tmp_path / record.monitor_name(12)
    append_lines(path, [monitor.encode_head(head), monitor.encode_sample(1.0, load._asdict()), monitor.END_LINE])
    for name in ("monitor-2.jsonl", "monitor.jsonl", "monitor-x.jsonl", "monitor.log"):
        (tmp_path / name).touch()
    paths = monitor.find_files(tmp_path)
    assert list(map(os.path.basename, paths)) == ["monitor.jsonl", "monitor-2.jsonl", "monitor-12.jsonl"]
    first, sample, end = path.read_bytes().splitlines()
    assert monitor.decode_head(first) == head
    assert monitor.decode_sample(sample) == monitor.Sample(1.0, *load)
    assert (monitor.is_end(end), monitor.is_end(sample)) == (True, False)


def test_lines_of_metrics_are_read_also_where_a_program_writes_them_in_its_own_way(tmp_path: Path) -> None:
    with closing(metrics.MetricsLog(tmp_path / record.METRICS)) as log:
        log.write("run", schema=metrics.SCHEMA, workload="lm", world_size=2, hosts=["a", "b"], total_steps=9.0)
        log.write("step", step=3.0, epoch=0, loss=math.nan, lr="warm", metrics={"norm": 1})
        log.write("step", step=-1)
        log.write("step", loss=1.0)
    lines = list(metrics.read_lines(tmp_path / record.METRICS))
    run = metrics.RunLine(schema=metrics.SCHEMA, workload="lm", world_size=2, hosts=("a", "b"), total_steps=9)
    assert metrics.decode_run(lines[0]) == run
    step = metrics.decode_step(lines[1])
    assert step is not None
    assert (step.step, step.epoch, step.lr, step.metrics) == (3, 0, None, {"norm": 1})
    assert step.loss is not None
    assert math.isnan(step.loss)
    assert list(map(metrics.decode_step, [lines[0], *lines[2:], lines[1][:-9]])) == [None] * 4


def test_a_manifest_is_read_also_where_it_is_of_an_earlier_version(tmp_path: Path) -> None:
    job = {"argv": ["a"], "nodes": 2, "ntasks_per_node": 4, "resources": {"time": None}, "of_a_newer_version": []}
    code = manifest.RecordedCode("c0ffee", True, ["b"])
    manifest.write_manifest(tmp_path, manifest.Manifest(job, "hpcjobs submit a", ["sbatch"], 1.0, code=code))
    read = manifest.read_manifest(tmp_path)
    assert (read.job, read.code, read.created) == (job, code, 1.0)
    assert (read.request.nodes, read.request.max_nodes, read.request.argv) == (2, None, ["a"])
    (tmp_path / record.MANIFEST).write_text('{"job": {"nodes": "two"}}')
    with pytest.raises(ValueError, match=re.escape('nodes is "two", expected int')):
        _ = manifest.read_manifest(tmp_path).request


def test_every_type_comes_back_as_it_was_written(tmp_path: Path) -> None:
    write_state(str(tmp_path), STATE)
    append_attempt(str(tmp_path), ATTEMPT)
    append_attempt(str(tmp_path), ATTEMPT)
    replace_last(str(tmp_path), ATTEMPT._replace(decision="resubmitted as 8"))
    (tmp_path / "control").mkdir()
    control = ControlDir(str(tmp_path))
    control.write_continued("8", 300.0)
    assert read_state_file(tmp_path / record.STATE) == STATE
    assert [each.decision for each in read_history(str(tmp_path)).attempts] == ["requeued", "resubmitted as 8"]
    assert control.continuation() == Continuation("8", 300.0)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"state": "SAD"}, "SAD"),
        ({"started": "soon"}, 'started is "soon", expected float'),
        ({"exit_code": True}, "exit_code is true, expected int"),
        ({"job_id": 7}, "job_id is 7, expected str"),
        ({"first_failure": []}, "first_failure is [], expected an object"),
        ({"first_failure": {"rank": 1}}, "host is missing"),
    ],
)
def test_a_state_of_another_type_is_refused_by_the_name_of_its_field(
    tmp_path: Path, change: dict[str, Any], problem: str
) -> None:
    write_state(str(tmp_path), STATE)
    path = tmp_path / record.STATE
    path.write_text(json.dumps({**json.loads(path.read_text()), **change, "of_a_newer_version": [1]}))
    with pytest.raises(ValueError, match=re.escape(problem)):
        read_state_file(path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"null", b"[" * 100_000])
def test_any_content_of_another_user_is_a_value_error_and_no_crash(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / record.STATE
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"\w"):
        read_state_file(path)
    append_lines(tmp_path / record.ATTEMPTS, ["{", "[1]", '{"job_id":7}', "[" * 100_000])
    assert read_history(str(tmp_path)).unreadable == 4


def test_pipes_and_devices_in_the_place_of_files_are_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "control").mkdir()
    for name in (record.STATE, record.ATTEMPTS, record.FIRST_FAILURE, "control/continued", "control/steps"):
        os.mkfifo(tmp_path / name)
    control = ControlDir(str(tmp_path))
    assert (control.first_failure, control.continuation(), control.steps) == (None, None, 0)
    for read in (lambda: read_state_file(tmp_path / record.STATE), lambda: read_history(str(tmp_path))):
        with pytest.raises(OSError, match="no regular file"):
            read()


OWN_FILES_OF_THESE_NAMES = {
    "sandbox/folder.py": {"state.json"},
    "trainers/workloads/base.py": {"state.json"},  # of the package datasets
    "runtime/checkpoints.py": {"manifest.json"},  # of a checkpoint
}


def test_no_module_outside_the_record_names_a_file_of_a_run_folder() -> None:
    known = {value for name, value in vars(record).items() if name.isupper() and "." in value}
    known = (known | {"first_failure", "monitor.jsonl"}) - {record.JOB_SCRIPT, record.__file__, record.__name__}
    known = {name for name in known if name.endswith((".json", ".jsonl")) or name == "first_failure"}
    assert len(known) == 11, known
    for path in sorted((ROOT / "hpcjobs").rglob("*.py")):
        own = path.relative_to(ROOT / "hpcjobs").as_posix()
        if own.startswith("record/"):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        texts = {
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        named = known & texts
        assert named == OWN_FILES_OF_THESE_NAMES.get(own, set()), own
