"""A run folder that somebody else wrote is read, and nothing that it names is run or asked."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commandline import hpcjobs, ok, within
from scripted_slurm import answer
from slurm_rows import accounted_row, print_rows
from waiting import eventually

from hpcjobs.scaling.right_size import estimate_starts

SITE = "{cluster: c, partitions: {main: {nodes: 2, node: {cpus: 4, mem: 8G}}}}\n"


_SQUEUE = """for argument; do
  case $argument in
    --format=*) echo "${argument#--format=}" | sed 's/%i/7/; s/%j/true/; s/%T/RUNNING/; s/%N/n1/; s/%[a-zA-Z]//g' ;;
  esac
done"""
"""One running job, by the letters that it is asked for; which script it runs is not known."""


class Hostile:
    """A run folder as a cloned repository or a colleague's archive brings it, and what would run if it was obeyed."""

    def __init__(self, folder: Path, commands: Path, trap: Path) -> None:
        self.folder, self._commands, self._trap = folder, commands, trap

    def edit(self, name: str, change: dict[str, Any], *, within: str | None = None) -> None:
        path = self.folder / name
        content = json.loads(path.read_text())
        (content if within is None else content[within]).update(change)
        path.write_text(json.dumps(content))

    def obeyed(self) -> list[str]:
        """What was run or asked that the folder names."""
        calls = (self._commands / "asked").read_text().splitlines() if (self._commands / "asked").exists() else []
        ran = (self._trap.parent / "ran").read_text().splitlines() if (self._trap.parent / "ran").exists() else []
        return ran + [line for line in calls if str(self._trap.parent) in line]


@pytest.fixture
def hostile(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hostile:
    """A run of this user, copied; each program that its files can name is a trap that notes its call."""
    commands, eve = tmp_path / "slurm", tmp_path / "eve"
    commands.mkdir()
    eve.mkdir()
    (here / "site_configs").mkdir()
    (here / "site_configs" / "mine.yaml").write_text(SITE)
    monkeypatch.setenv("HPCJOBS_SITE", "mine")
    row = accounted_row(JobName="true", State="RUNNING", End="Unknown")
    scripts = {
        "sbatch": "echo 7", "sacct": print_rows(row), "scontrol": "echo ClusterName = c", "squeue": _SQUEUE,
        "scancel": ":", "sinfo": ":", "srun": ":",
    }  # fmt: skip
    for name, script in scripts.items():
        answer(commands, name, f'echo "{name} $SLURM_CONF $*" >>{commands}/asked\n{script}')
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    trap = eve / "trap"
    trap.write_text(f'#!/bin/sh\necho "$0 $*" >>{eve}/ran\n')
    trap.chmod(0o755)
    (eve / "slurm.conf").write_text("Include /eve/slurm.conf\nPluginDir=/eve\n")
    partitions = "{main: {nodes: 2, node: {cpus: 4, mem: 8G}}}"
    site = f"{{slurm_conf: {eve}/slurm.conf, partitions: {partitions}, python: {trap}, setup: [{trap}]}}\n"
    (eve / "site.yaml").write_text(site)
    ok("submit", "true")
    (mine,) = here.glob("runs/true-*")
    folder = eve / mine.name
    shutil.copytree(mine, folder)
    shutil.rmtree(mine)
    own = Hostile(folder, commands, trap)
    named = {"slurm_conf": str(eve / "slurm.conf"), "site_file": str(eve / "site.yaml"), "python": str(trap),
             "node_python": str(trap), "prologue": [str(trap)], "run_root": str(eve)}  # fmt: skip
    own.edit("manifest.json", named, within="job")
    named = {"run_dir": str(folder), "slurm_conf": str(eve / "slurm.conf"), "site": str(eve / "site.yaml")}
    own.edit("submitted.json", named)
    (commands / "asked").unlink(missing_ok=True)
    return own


@pytest.mark.parametrize("arguments", [(), ("--dry-run",), ("--time", "5m"), ("--time", "5m", "--dry-run")])
def test_a_rerun_of_somebody_elses_run_is_printed_and_submitted_only_with_trust(
    hostile: Hostile, here: Path, arguments: tuple[str, ...]
) -> None:
    refused = within("rerun", str(hostile.folder), *arguments)
    assert hostile.obeyed() == []
    assert not list(here.glob("runs/true-*"))
    if "--time" in arguments:
        assert (refused.code, refused.out) == (4, "")
    else:
        assert refused.code == (0 if arguments else 4)
        assert refused.out.startswith("#!/bin/bash")
        assert str(hostile.folder.parent / "trap") in refused.out, "what would run is there to be read"
    if refused.code:
        assert "you have not submitted" in refused.err
        assert "--trust" in refused.err


def test_with_trust_the_run_is_submitted_as_it_says(hostile: Hostile, here: Path) -> None:
    ok("rerun", str(hostile.folder), "--trust")
    (run_dir,) = here.glob("runs/true-*")
    assert str(hostile.folder.parent / "trap") in (run_dir / "job.sh").read_text()
    assert len(list(hostile.folder.parent.glob("true-*"))) == 1


READING = ["show", "show --json", "logs", "why", "why --json", "diff", "monitor", "exec", "shell", "archive",
           "hold", "release", "requeue", "wait --timeout 1", "cancel", "ps", "report jobs", "report scaling",
           "update", "prune", "drill kill-rank", "report advise", "report load"]  # fmt: skip


def test_no_start_is_estimated_with_the_configuration_of_somebody_elses_run_folder(hostile: Hostile) -> None:
    assert estimate_starts(hostile.folder, ["--nodes=1"]) is None
    assert hostile.obeyed() == []


@pytest.mark.parametrize("verb", READING)
def test_no_verb_runs_or_asks_what_somebody_elses_run_folder_names(hostile: Hostile, verb: str) -> None:
    folder = str(hostile.folder)
    arguments = {
        "diff": ("diff", folder, folder), "exec": ("exec", folder, "true"), "ps": ("ps",), "prune": ("prune",),
        "update": ("update", folder, "time=1h"), "report jobs": ("report", "jobs"),
    }.get(verb, (*verb.split(), folder))  # fmt: skip
    answer = within(*arguments)
    assert hostile.obeyed() == [], answer
    assert answer.code != 70, answer


def test_a_folder_that_names_a_job_of_mine_is_no_run_of_mine(hostile: Hostile) -> None:
    hostile.edit("submitted.json", {"job_id": "7", "slurm_conf": None})
    answer = within("rerun", str(hostile.folder))
    assert answer.code == 4, answer
    assert hostile.obeyed() == []


def test_a_folder_that_names_a_job_of_mine_ends_none(here: Path, tmp_path: Path) -> None:
    own = Path(ok("submit", "--site", "local", "--json", "sleep", "600").json["run_dir"])
    eventually(lambda: ok("ps", "--json").json[0]["record"]["state"] == "RUNNING")
    eve = tmp_path / "eve"
    # Files that a job writes beside others, to rename them, come and go under a copy.
    shutil.copytree(own, eve / own.name, ignore=shutil.ignore_patterns(".*"))
    assert within("cancel", str(eve / own.name)).code == 6
    (eve / own.name / "submitted.json").write_bytes((own / "submitted.json").read_bytes())
    assert within("hold", str(eve / own.name)).code == 5
    assert ok("ps", "--json").json[0]["record"]["state"] == "RUNNING"
    (tmp_path / "link").symlink_to(own)
    assert "cancelled L1" in ok("cancel", str(tmp_path / "link")).out
    within("wait", "L1")


@pytest.mark.parametrize(("program", "advised"), [("exit 3", 1), ("kill -9 $$", 0)])
def test_what_is_advised_for_a_copied_folder_works_on_it(
    here: Path, tmp_path: Path, program: str, advised: int
) -> None:
    """The id is of a job that is not known where the copy is, or of another one."""
    own = Path(json.loads(within("submit", "--site", "local", "--json", "--wait", "sh", "-c", program).out)["run_dir"])
    copy = tmp_path / "it's a copy" / own.name
    shutil.copytree(own, copy)
    assert "try: hpcjobs" in ok("why", str(own)).out
    answer = ok("why", str(copy))
    commands = [shlex.split(line[5:], comments=True) for line in answer.out.splitlines() if line.startswith("try: ")]
    assert [command[:1] for command in commands] == [["hpcjobs"]] * advised, answer
    for _, *arguments in commands:
        assert (str(copy) in arguments, within(*arguments).code) == (True, 0), arguments


VERBS = ("show", "why", "logs", "cancel", "wait --timeout 5", "rerun", "archive", "report advise", "diff")


@pytest.mark.parametrize("kind", ["pipe", "huge", "folder", "nonsense"])
def test_files_of_a_strange_folder_that_are_none_stop_no_verb(here: Path, tmp_path: Path, kind: str) -> None:
    """No verb waits for a pipe, reads a file of gigabytes, or ends by an error that nobody foresaw."""
    own = Path(ok("submit", "--site", "local", "--json", "--wait", "true").json["run_dir"])
    eve = tmp_path / "eve" / own.name
    shutil.copytree(own, eve)
    for path in [path for path in eve.rglob("*") if path.is_file()]:
        if kind in ("huge", "nonsense") and path.parent.name == "logs":
            continue  # a log may be as long as it likes
        path.unlink()
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        else:
            path.write_bytes(b'{"job_id": 1e999, "x": \xff}')
        if kind == "huge":
            os.truncate(path, 8 << 30)
    if kind != "folder":
        (eve / "submitted.json").unlink()
        submitted = json.loads((own / "submitted.json").read_text())
        (eve / "submitted.json").write_text(json.dumps({**submitted, "run_dir": str(eve)}))
    for verb in VERBS:
        answer = hpcjobs(*verb.split(), str(eve), *([str(own)] if verb == "diff" else []), timeout_s=60)
        assert answer.code not in (70, -9), (verb, answer)
        assert "Traceback" not in answer.err


_LARGE_LOG = "only its last 8 MiB are read"
_LARGE_SAMPLES = "larger than 256 MiB: only the samples at its end are read"


@pytest.mark.parametrize(
    ("verb", "texts"),
    [
        ("why", ("ValueError: at the end", _LARGE_LOG)),
        ("why --log {log}", ("ValueError: at the end", _LARGE_LOG)),
        ("wait --timeout 5", ()),
        ("logs -n 1", ("ValueError: at the end",)),
        ("logs --since 1h", ("--since: no line in 1 GiB of {log} has a date and a time", "hint: -n N")),
        ("logs --monitor", ("n0  ", _LARGE_SAMPLES)),
        ("logs --monitor --follow", ("n0  ", _LARGE_SAMPLES)),
        ("report load", ("20 %", _LARGE_SAMPLES)),
        ("report advise", ()),
        ("show", ()),
        ("show --json", ()),
    ],
)
def test_the_end_of_huge_logs_and_samples_in_a_strange_folder_is_read(
    here: Path, tmp_path: Path, verb: str, texts: tuple[str, ...]
) -> None:
    own = Path(
        within("submit", "--site", "local", "--json", "--wait", "sh", "-c", "echo begin; exit 1").json["run_dir"]
    )
    eve = tmp_path / "eve" / own.name
    shutil.copytree(own, eve)
    submitted = json.loads((own / "submitted.json").read_text())
    (eve / "submitted.json").write_text(json.dumps({**submitted, "run_dir": str(eve)}))
    (log,) = (eve / "logs").iterdir()
    (eve / "monitor.jsonl").write_text('{"kind": "monitor", "host": "n0", "interval_s": 1, "started_at": 1}\n')
    last_lines = {
        log: "ValueError: at the end",
        eve / "monitor.jsonl": '{"kind": "sample", "time_s": 5, "cpu_percent": 20}',
        eve / "metrics.jsonl": '{"kind": "step", "step": 7, "time_s": 5, "loss": 1}',
    }
    for path, line in last_lines.items():
        path.touch()
        os.truncate(path, 300 << 30)
        with path.open("a") as file:
            file.write(f"\n{line}\n")
    options = [] if "--log" in verb else [str(eve)]
    answer = hpcjobs(*verb.format(log=log).split(), *options, timeout_s=60)
    assert answer.code not in (70, -9), answer
    for text in texts:
        assert text.format(log=log) in answer.out + answer.err


def test_metrics_of_a_strange_job_that_have_a_line_without_end_are_not_held_in_memory(hostile: Hostile) -> None:
    metrics = hostile.folder / "metrics.jsonl"
    metrics.touch()
    os.truncate(metrics, 300 << 30)
    with metrics.open("a") as file:
        file.write('\n{"kind": "step", "step": 7, "time_s": 5, "loss": 1}\n')
    for verb in ("show", "show --json"):
        answer = hpcjobs(*verb.split(), str(hostile.folder), timeout_s=60)
        assert (answer.code, "RUNNING" in answer.out) == (0, True), answer


@pytest.mark.parametrize("verb", ["show", "show --json", "why", "logs", "wait --timeout 1", "archive"])
@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("submitted.json", {"submitted": 1e300}),
        ("submitted.json", {"array": "0-999999999"}),
        ("submitted.json", {"array": "0-3999999"}),
        ("submitted.json", {"job_id": "7;id>PWNED"}),
        ("state.json", {"started": 1e308, "ended": -1e308}),
    ],
    ids=["time", "index", "tasks", "id", "state"],
)
def test_impossible_values_in_a_strange_folder_stop_no_verb(
    hostile: Hostile, name: str, values: dict[str, Any], verb: str
) -> None:
    state = {"job_id": "7", "state": "COMPLETED", "exit_code": 0, "started": 1, "ended": 2, "nodes": "n1"}
    (hostile.folder / "state.json").write_text(json.dumps(state))
    hostile.edit(name, values)
    answer = within(*verb.split(), str(hostile.folder))
    assert answer.code != 70, answer
    if (verb, name) != ("logs", "state.json"):  # which it need not read
        assert f"{hostile.folder / name} cannot be used" in answer.err


NUMBER = "9" * 5000


@pytest.mark.parametrize(
    "line",
    [
        "srun: error: n1: tasks 0-99999999999: Exited with exit code 1",
        "srun: error: n1: tasks 0-3999999: Out Of Memory",
        "srun: error: n1: tasks 5-1: Exited with exit code 1",
        "srun: error: n1: task 1-2-3: Killed",
        f"srun: error: n1: task {NUMBER}: Exited with exit code {NUMBER}",
        f"srun: error: n1: task 0: Exited with exit code {NUMBER}",
        f"[rank{NUMBER}]: x",
        f"[1,{NUMBER}]<stderr>: x",
        f"{NUMBER}: hello",
        f"hpcjobs: first failure: rank {NUMBER} on n1, exit code {NUMBER}",
        f"mpirun noticed that process rank {NUMBER} with PID 1 on node n1 exited on signal {NUMBER}",
        f"sigkill_handler] x exits with return code = -{NUMBER}",
        f"Command terminated by signal {NUMBER}",
        f"=   RANK {NUMBER} PID 1 RUNNING AT n1\n=   KILLED BY SIGNAL: {NUMBER} (Killed)",
        f"=   RANK 0 PID 1 RUNNING AT n1\n=   EXIT CODE: {NUMBER}",
        f"Root Cause (first observed failure):\n  host : n1\n  rank : {NUMBER} (local_rank: 0)\n  exitcode : -{NUMBER}",
        f"Root Cause (first observed failure):\n  host : n1\n  rank : 0\n  exitcode : {NUMBER}",
        "Root Cause (first observed failure):\n  host : n1\n  rank : ²",
        f"MPI_ABORT was invoked on rank {NUMBER}",
    ],
    ids=lambda line: f"{line[:50]}-{line.count(NUMBER)}",
)
def test_a_number_in_a_log_that_cannot_be_stops_no_verb(here: Path, tmp_path: Path, line: str) -> None:
    script = f"printf '%s\\n' '{line}' '0: the last line'; exit 1"
    own = Path(within("submit", "--site", "local", "--json", "--wait", "sh", "-c", script).json["run_dir"])
    eve = tmp_path / "eve" / own.name
    shutil.copytree(own, eve)
    for path in eve.iterdir():  # without state.json and the notes of the end, the log alone says how it ended
        if path.is_file() and path.name not in ("manifest.json", "submitted.json"):
            path.unlink()
    for folder in (own, eve):
        for verb in ("why", "why --json"):
            answer = within(*verb.split(), str(folder))
            assert answer.code == 0, (verb, folder, answer)
        for verb in ("logs --rank 0", "logs --merge"):
            assert "the last line" in ok(*verb.split(), str(folder)).out


@pytest.mark.parametrize("verb", ["show", "show --json", "why", "logs", "monitor", "wait --timeout 0", "archive"])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("container", ["a"]),
        ("argv", 3),
        ("resources", []),
        ("sources", {"nodes": 1}),
        ("nodes", "many"),
        ("python", {}),
    ],
)
def test_a_job_of_wrong_types_in_a_strange_folder_stops_no_verb(
    hostile: Hostile, verb: str, field: str, value: object
) -> None:
    hostile.edit("manifest.json", {field: value}, within="job")
    answer = within(*verb.split(), str(hostile.folder))
    assert answer.code != 70, answer
    assert hostile.obeyed() == []


@pytest.mark.parametrize("name", ["code.patch", "job.sh"])
def test_a_pipe_in_the_place_of_code_or_script_stops_no_comparison(hostile: Hostile, here: Path, name: str) -> None:
    hostile.edit("manifest.json", {"code": {"commit": "a", "dirty": True, "untracked": [], "missing": None}})
    (hostile.folder / name).unlink(missing_ok=True)
    os.mkfifo(hostile.folder / name)
    for verb in (("diff", str(hostile.folder), str(hostile.folder)), ("report", "advise", str(hostile.folder))):
        answer = hpcjobs(*verb, timeout_s=60)
        assert answer.code != 70, answer


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.write_bytes(b"\xff"), None])
def test_a_file_that_is_no_study_is_refused(here: Path, make: Callable[[Path], object] | None) -> None:
    path = here / "s.study.json"
    if make is None:
        path.write_text("[" * 100_000)
    else:
        make(path)
    refused = hpcjobs("report", "scaling", "s", timeout_s=60)
    assert (refused.code, "s.study.json is no study" in refused.err) == (4, True), refused


def write_session(folder: Path, job_id: str) -> None:
    """The files of a session that answers, on a host whose name is an option of ssh."""
    settings = {
        "kind": "lab",
        "folder": "/",
        "ssh_to_nodes": False,
        "user": "you",
        "relay": [],
        "srun": None,
        "slurm_conf": None,
        "idle_s": None,
        "limit_s": None,
        "warn_s": 1,
        "token": None,
        "kernels": [],
        "in_image": False,
        "hidden": {},
        "login": f"-oProxyCommand=touch {folder}/ran",
    }
    connection = {
        "schema": 2,
        "job_id": job_id,
        "kind": "lab",
        "host": "n1",
        "socket": "/s",
        "port": 4444,
        "token": "a-token",
        "path": "/lab",
        "python": "python3",
        "started": time.time(),
        "ends": None,
    }
    (folder / "session.json").write_text(json.dumps(settings))
    (folder / "connection.json").write_text(json.dumps(connection))


@pytest.mark.parametrize("verb", [("jupyter", "open"), ("jupyter", "open", "--browser"), ("jupyter", "stop")])
def test_a_session_in_somebody_elses_run_folder_names_no_ssh_to_type_and_writes_nowhere(
    hostile: Hostile, verb: tuple[str, ...]
) -> None:
    hostile.edit("submitted.json", {"scheduler": "local", "job_id": "L99"})
    write_session(hostile.folder, "L99")
    mine = Path.home() / ".bashrc"
    mine.write_text("mine\n")
    (hostile.folder / "open.html").symlink_to(mine)
    answer = within(*verb, str(hostile.folder))
    assert answer.code == 5, answer
    assert "you have not submitted" in answer.err
    assert "ProxyCommand" not in answer.out + answer.err
    assert mine.read_text() == "mine\n"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")
@pytest.mark.parametrize("taken", ["folder", "link"])
def test_a_session_whose_run_folder_another_user_has_taken_is_named_and_its_files_are_not_used(
    here: Path, tmp_path: Path, taken: str
) -> None:
    program = ("sh", "-c", "touch begun; exec sleep 600")
    run_dir = Path(ok("submit", "--site", "local", "--json", *program).json["run_dir"])
    eventually((here / "begun").exists)  # its script needs the folder no more
    run_dir.rename(tmp_path / "away")
    if taken == "folder":
        shutil.copytree(tmp_path / "away", run_dir)
    else:
        run_dir.symlink_to(tmp_path / "away")
    write_session(run_dir, "L1")
    os.chown(run_dir, 54321, 54321, follow_symlinks=False)
    verbs = {"list": 0, "list --json": 0, "open": 5, "open --json L1": 5, "stop": 5, "stop L1": 5, "stop --all": 0}
    for verb, code in verbs.items():
        answer = within("jupyter", *verb.split())
        assert (answer.code, "belongs to another user" in answer.err) == (code, True), (verb, answer)
        assert "ProxyCommand" not in answer.out + answer.err
        assert "a-token" not in answer.out + answer.err
    assert ok("ps", "--json").json[0]["record"]["state"] == "RUNNING"
    assert "cancelled L1" in ok("cancel", "L1").out
    within("wait", "L1")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")
@pytest.mark.parametrize("files", ["none", "another id", "the id of my other job"])
def test_who_has_taken_the_folder_of_a_session_cannot_hide_that_it_runs(here: Path, files: str) -> None:
    ok("submit", "--site", "local", "-n1", "sleep", "600")
    run_dir = Path(ok("submit", "--site", "local", "--json", "-n1", "sleep", "600").json["run_dir"])
    eventually(lambda: {row["record"]["state"] for row in ok("ps", "--json").json} == {"RUNNING"})
    if files != "none":
        write_session(run_dir, "L2")
        (run_dir / "control").mkdir(exist_ok=True)
        (run_dir / "control" / "continued").write_text(f"{'L1' if files != 'another id' else 'L999'} {time.time()}\n")
    os.chown(run_dir, 54321, 54321)
    answer = within("jupyter", "list")
    assert (answer.code, "job L2 is left out" in answer.err, "hpcjobs cancel L2" in answer.err) == (0, True, True), (
        answer
    )
    os.chown(run_dir, os.getuid(), os.getgid())
    shutil.rmtree(run_dir / "control", ignore_errors=True)
    ok("cancel", "L1", "L2")


@pytest.mark.parametrize("content", ["[[[", "{}", "[]", "9" * 9000])
@pytest.mark.parametrize("name", ["session.json", "connection.json"])
def test_a_damaged_file_of_a_session_is_named(here: Path, name: str, content: str) -> None:
    run_dir = Path(ok("submit", "--site", "local", "--json", "--wait", "true").json["run_dir"])
    (run_dir / "session.json").write_text(json.dumps({"kernels": []}))
    (run_dir / name).write_text(content)
    answer = within("jupyter", "stop", "L1")
    assert (answer.code, f"{run_dir}/" in answer.err, "damaged" in answer.err) == (3, True, True), answer


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")
def test_a_session_whose_folder_another_user_took_is_named_whatever_its_files_say(here: Path) -> None:
    folder = Path(ok("submit", "--site", "local", "--json", "sleep", "60").json["run_dir"])
    eventually(lambda: (folder / "state.json").exists())
    shutil.copytree(folder, taken := folder.with_name("taken"), ignore=shutil.ignore_patterns(".*"))
    folder.rename(folder.with_name("away"))
    taken.rename(folder)
    (folder / "session.json").write_text('{"kind": "lab"}')
    end = {"job_id": "L1", "state": "COMPLETED", "source": "sacct", "name": "sleep", "exit_code": 0}
    (folder / "accounting.json").write_text(json.dumps([end]))
    os.chown(folder, 54321, 54321)
    listed = hpcjobs("jupyter", "list")
    assert (listed.code, "job L1 is left out" in listed.err) == (0, True), listed
    ok("cancel", "L1")
