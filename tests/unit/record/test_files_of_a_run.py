"""One reader for each file of a run folder: it takes what the shell files write, and refuses everything else."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hpcjobs.files import append_lines
from hpcjobs.record import names
from hpcjobs.record.attempts import Attempt, append_attempt, read_history, replace_last
from hpcjobs.record.control import Continuation, ControlDir
from hpcjobs.record.state import FirstFailure, State, StateFile, read_first_failure, read_state_file, write_state

ROOT = Path(__file__).resolve().parents[3]
SHELL = ROOT / "templates" / "shell"
STATE = StateFile("7", State.FAILED, 3, 100.0, 200.0, "n[1-2]", 1, FirstFailure(4, "n2", 3), "c", None)
ATTEMPT = Attempt("7", 100.0, None, "n1", None, "node", 12, 10, "requeued")


def run_shell(run_dir: Path, script: str, **variables: str) -> None:
    environ = {"PATH": os.environ["PATH"], "HPCJOBS_RUN_DIR": str(run_dir), "HPCJOBS_JOB_ID": "7", **variables}
    subprocess.run(["bash", "-c", script], env=environ, check=False, capture_output=True)


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
    begun, ended = read_state_file(tmp_path / "begun"), read_state_file(tmp_path / names.STATE)
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


def test_every_type_comes_back_as_it_was_written(tmp_path: Path) -> None:
    write_state(str(tmp_path), STATE)
    append_attempt(str(tmp_path), ATTEMPT)
    append_attempt(str(tmp_path), ATTEMPT)
    replace_last(str(tmp_path), ATTEMPT._replace(decision="resubmitted as 8"))
    (tmp_path / "control").mkdir()
    control = ControlDir(str(tmp_path))
    control.write_continued("8", 300.0)
    assert read_state_file(tmp_path / names.STATE) == STATE
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
    path = tmp_path / names.STATE
    path.write_text(json.dumps({**json.loads(path.read_text()), **change, "of_a_newer_version": [1]}))
    with pytest.raises(ValueError, match=re.escape(problem)):
        read_state_file(path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"null", b"[" * 100_000])
def test_any_content_of_another_user_is_a_value_error_and_no_crash(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / names.STATE
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"\w"):
        read_state_file(path)
    append_lines(tmp_path / names.ATTEMPTS, ["{", "[1]", '{"job_id":7}', "[" * 100_000])
    assert read_history(str(tmp_path)).unreadable == 4


def test_pipes_and_devices_in_the_place_of_files_are_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "control").mkdir()
    for name in (names.STATE, names.ATTEMPTS, names.FIRST_FAILURE, "control/continued", "control/steps"):
        os.mkfifo(tmp_path / name)
    control = ControlDir(str(tmp_path))
    assert (control.first_failure, control.continuation(), control.steps) == (None, None, 0)
    for read in (lambda: read_state_file(tmp_path / names.STATE), lambda: read_history(str(tmp_path))):
        with pytest.raises(OSError, match="no regular file"):
            read()


OWN_FILES_OF_THESE_NAMES = {
    "sandbox/folder.py": {"state.json"},
    "trainers/workloads/saved_dataset.py": {"state.json"},  # of the package datasets
    "runtime/checkpoints.py": {"manifest.json"},  # of a checkpoint
}
NOT_MOVED_YET = {
    "runtime/summary.py": {"summary.json", "metrics.jsonl"},
    "runtime/call.py": {"summary.json"},
    "trainers/metrics/monitor.py": {"monitor.jsonl"},
    "trainers/loop/run.py": {"summary.json"},
}


def test_no_module_outside_the_record_names_a_file_of_a_run_folder() -> None:
    known = {value for value in vars(names).values() if isinstance(value, str) and "." in value}
    known = (known | {"first_failure", "monitor.jsonl"}) - {names.JOB_SCRIPT, names.__file__, names.__name__}
    known = {name for name in known if name.endswith((".json", ".jsonl")) or name == "first_failure"}
    assert len(known) == 9, known
    for path in sorted((ROOT / "hpcjobs").rglob("*.py")):
        own = path.relative_to(ROOT / "hpcjobs").as_posix()
        if own.startswith("record/"):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        texts = {
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        named = known & texts
        assert named == OWN_FILES_OF_THESE_NAMES.get(own, NOT_MOVED_YET.get(own, set())), own
