"""A login host that lies about paths writes below one folder of results, and nothing that can be run."""

from __future__ import annotations

import json
import os
import signal
import stat
import time
from pathlib import Path
from subprocess import PIPE, Popen
from threading import Timer, main_thread

import pytest
from commandline import within
from scripted_slurm import answer

from hpcjobs.files import config_dir
from hpcjobs.remote.connection import read_answer
from hpcjobs.run import index
from hpcjobs.sweeps.folder import SweepFolder, remember

RUN_DIR = "/home/you/runs/train-1"


@pytest.fixture
def host(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An ssh whose other side is a folder of scripts here; gives the folder that is its file system."""
    commands, disk = tmp_path / "commands", tmp_path / "disk"
    commands.mkdir()
    disk.mkdir()
    (here / ".git" / "hooks").mkdir(parents=True)
    answer(commands, "ssh", f"""
case "$*" in
*-G*) echo 'controlpath none'; exit ;;
*'-O check'*|*'-O exit'*) exit ;;
*rsync*--server*) while [ "$1" != rsync ]; do shift; done; cd {disk} && eval "exec $*" ;;
esac
for word; do last=$word; done
script=$(printf %s "${{last##* }}" | base64 -d)
case "$script" in
*'hpcjobs-laptop:'*) printf 'hpcjobs-laptop:%s\\n' /data /code yes yes ;;
*'cat -- '*) cat {tmp_path}/outputs ;;
*'[ -d '*) path=${{script#*-d }}; [ -d "{disk}${{path%% ]*}}" ] ;;
*show*|*jupyter*) printf %s "$script" >{tmp_path}/asked; cat {tmp_path}/shown ;;
esac""")  # fmt: skip
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    return disk


def write(path: Path, mode: int = 0o755) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(mode)


@pytest.mark.parametrize("path", ["/code/.git/hooks/pre-commit", "/code/../../.bashrc", "/x/..", "/code/a/../../b",
                                  "/code/x/.GIT/config", "/", "/code/HEAD", "/code/head",
                                  "/code/" + 300 * "a"])  # fmt: skip
def test_outputs_that_lead_elsewhere_are_refused(host: Path, here: Path, tmp_path: Path, path: str) -> None:
    (tmp_path / "outputs").write_text(path + "\n")
    refused = within("--remote", "you@far", "report", "jobs")
    assert refused.code == 3, refused
    assert "not fetched" in refused.err
    assert [str(file) for file in (*here.rglob("*"), *Path.home().rglob("*")) if file.is_file()
            and "remote" not in str(file) and file.name != "ssh_sockets"] == []  # fmt: skip


def test_no_link_of_the_laptop_is_followed(host: Path, here: Path, tmp_path: Path) -> None:
    (tmp_path / "outputs").write_text("/code/hooks/pre-commit\n")
    (here / "results").mkdir()
    (here / "results" / "hooks").symlink_to(here / ".git" / "hooks")
    assert "is a link" in within("--remote", "you@far", "report", "jobs").err
    assert list((here / ".git" / "hooks").iterdir()) == []


def test_nothing_is_written_where_the_folder_of_results_is_a_link(host: Path, here: Path, tmp_path: Path) -> None:
    """A repository can bring one."""
    (tmp_path / "outputs").write_text("/code/pre-commit\n")
    (here / "results").symlink_to(here / ".git" / "hooks")
    assert "results is a link" in within("--remote", "you@far", "report", "jobs").err
    assert list((here / ".git" / "hooks").iterdir()) == []


@pytest.mark.parametrize("name", ["..", ".git"])
def test_fetch_refuses_a_run_folder_whose_name_leads_elsewhere(
    host: Path, here: Path, tmp_path: Path, name: str
) -> None:
    (tmp_path / "shown").write_text(f'{{"entry": {{"run_dir": "/home/you/runs/{name}"}}}}')
    refused = within("--remote", "you@far", "fetch", "1")
    assert (refused.code, "not fetched" in refused.err) == (3, True), refused


@pytest.mark.parametrize(
    "answer",
    ["{}", "[]", '{"entry": null}', '{"entry": [1]}', '{"entry": {"run_dir": 5}}',
     '{"entry": {"run_dir": "/a\\u0000"}}',
     '{"entry": {"run_dir": "/a/\\ud800"}, "job_id": "1\\ud800", "site": "far"}',
     '{"entry": {"run_dir": "/a/\\ud800"}, "job_id": "1\\u0000", "site": "far"}',
     '{"entry": {"run_dir": "/a/\\udcff"}, "job_id": "1", "site": "far", "connection": {"token": "\\udcff"}}',
     '{"a":' * 20_000 + "1" + "}" * 20_000, '{"n": ' + "9" * 9000 + "}"],
    ids=["empty", "list", "null", "entry", "number", "nul", "half", "id", "token", "deep", "digits"],
)  # fmt: skip
@pytest.mark.parametrize("verb", [("fetch", "1"), ("jupyter", "open")])
def test_an_answer_of_wrong_types_is_an_error_with_a_message(
    host: Path, tmp_path: Path, verb: tuple[str, ...], answer: str
) -> None:
    (tmp_path / "shown").write_text(answer)
    refused = within("--remote", "you@far", *verb)
    assert refused.code == 3, refused
    assert "the login " in refused.err


def test_what_is_fetched_has_neither_links_nor_execute_bits_nor_a_repository(
    host: Path, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(host / RUN_DIR[1:] / "tool", 0o4755)
    write(host / RUN_DIR[1:] / "logs" / "a.out", 0o777)
    write(host / RUN_DIR[1:] / "logs" / ".git" / "config")
    write(host / RUN_DIR[1:] / "logs" / ".GIT" / "config")
    write(host / RUN_DIR[1:] / "logs" / "HEAD")  # of a bare repository
    (host / RUN_DIR[1:] / "link").symlink_to("/etc/passwd")
    monkeypatch.setattr("hpcjobs.remote.connection.LoginConnection.path_there", lambda _, path: f"{host}{path}")
    monkeypatch.setattr("hpcjobs.jupyter.laptop.SharedRemote.ask", lambda *_: {"entry": {"run_dir": RUN_DIR}})
    answer = within("--remote", "you@far", "fetch", "1")
    assert answer.code == 0, answer
    fetched = {str(path.relative_to(here / "runs" / "train-1")) for path in (here / "runs" / "train-1").rglob("*")}
    assert fetched == {"tool", "logs", "logs/a.out"}
    for path in (here / "runs").rglob("*"):
        assert stat.S_IMODE(path.lstat().st_mode) == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.parametrize(
    ("verb", "stream"),
    [(("report", "jobs"), "1"), (("report", "jobs"), "2"), (("fetch", "1"), "1"), (("jupyter", "open"), "1")],
)
def test_an_answer_without_end_is_not_held_in_memory(
    host: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: tuple[str, ...], stream: str
) -> None:
    monkeypatch.setattr("hpcjobs.remote.connection._LONGEST_ANSWER", 1 << 20)
    monkeypatch.setattr("hpcjobs.jupyter.laptop._LONGEST_JSON", 1 << 20)
    answer(tmp_path / "commands", "cat", f"while echo no end of it; do :; done >&{stream}")
    refused = within("--remote", "you@far", *verb)
    assert (refused.code, "you@far answered with more than 1M: not read" in refused.err) == (3, True), refused


def test_an_interrupt_waits_for_nobody_who_holds_the_pipe_of_ssh() -> None:
    """A shared connection, or a program of ProxyCommand, outlives the ssh that started it."""
    with Popen(["sh", "-c", "sleep 20 & echo $!; exec sleep 20"], stdout=PIPE) as process:
        assert process.stdout is not None
        holder = int(process.stdout.readline())
        try:
            interrupt = Timer(0.3, signal.pthread_kill, [main_thread().ident, signal.SIGINT])
            interrupt.start()
            began = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                read_answer(process, "far")
            assert time.monotonic() - began < 10
        finally:
            os.kill(holder, signal.SIGKILL)
            process.kill()


@pytest.fixture
def own_folders(host: Path, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run and a sweep of the laptop's own; a login host with a run folder of any name."""
    index.add(index.Entry("1", "mine", "local", "local", str(here / "runs" / "mine-1"), 1.0))
    remember("sw", SweepFolder(here / "runs" / "sweep-sw"))
    for name in ("mine-1", "sweep-sw", "other", "Sweep-SW"):
        write(host / "theirs" / name / "sweep.json")
        write(host / "theirs" / name / "chunks" / "0001" / "shell" / "job.bash")
    write(host / "code" / "sweep-sw")
    monkeypatch.setattr("hpcjobs.remote.connection.LoginConnection.path_there", lambda _, path: f"{host}{path}")


@pytest.mark.parametrize("is_there", [True, False], ids=["there", "removed"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sweep-sw", ()), ("mine-1", ()), ("Sweep-SW", ()),
        ("other", ("--to", "runs/sweep-sw")), ("other", ("--to", "runs/mine-1/logs")), ("other", ("--to", ".")),
        ("other", ("sweep.json", "--to", "runs/sweep-sw")), ("other", ("--to", "by-link/sweep-sw")),
    ],
)  # fmt: skip
def test_nothing_is_fetched_into_a_folder_of_the_users_own_jobs(
    own_folders: None, here: Path, tmp_path: Path, name: str, options: tuple[str, ...], *, is_there: bool
) -> None:
    """The sweep's next `resume`, or its waiting tasks, would run what the login host sent."""
    if is_there:
        (here / "runs" / "sweep-sw").mkdir(parents=True)
    (here / "by-link").symlink_to("runs")
    (tmp_path / "shown").write_text(json.dumps({"entry": {"run_dir": f"/theirs/{name}"}}))
    job, *to = ("1", *options)
    refused = within("--remote", "you@far", "fetch", job, *to)
    assert (refused.code, "have submitted on this machine" in refused.err) == (3, True), refused
    assert "--to FOLDER" in refused.err
    assert [path for path in here.rglob("*") if path.is_file()] == []


def test_an_output_is_not_put_into_a_sweep_of_the_users_own(own_folders: None, here: Path, tmp_path: Path) -> None:
    remember("sw", SweepFolder(here / "results" / "sweep-sw"))
    (tmp_path / "outputs").write_text("/code/sweep-sw\n")
    refused = within("--remote", "you@far", "report", "jobs")
    assert (refused.code, "not fetched" in refused.err) == (3, True), refused
    assert [path for path in here.rglob("*") if path.is_file()] == []


def test_a_second_fetch_of_a_job_brings_what_is_new_into_the_same_folder(
    own_folders: None, host: Path, here: Path, tmp_path: Path
) -> None:
    (tmp_path / "shown").write_text(json.dumps({"entry": {"run_dir": "/theirs/other"}}))
    for options in ((), ("--to", "elsewhere")):
        assert within("--remote", "you@far", "fetch", "1", *options).code == 0
        write(host / "theirs" / "other" / f"new{len(options)}")
        assert within("--remote", "you@far", "fetch", "1", *options).code == 0
    assert (here / "runs" / "other" / "new0").exists()
    assert (here / "elsewhere" / "new2").exists()


def test_a_job_with_a_nul_in_its_results_is_fetched(own_folders: None, host: Path, here: Path, tmp_path: Path) -> None:
    answer = {"entry": {"run_dir": "/theirs/other"}, "results": {"label": "a\0b", "half": "\ud800"}}
    (tmp_path / "shown").write_text(json.dumps(answer))
    assert within("--remote", "you@far", "fetch", "1").code == 0
    assert (here / "runs" / "other").is_dir()


def test_a_path_with_a_nul_is_an_error_with_a_message(host: Path, tmp_path: Path) -> None:
    (tmp_path / "outputs").write_text("/x\0y/page\n")
    refused = within("--remote", "you@far", "report", "jobs")
    assert (refused.code, "which is no path" in refused.err) == (3, True), refused


@pytest.mark.parametrize("site", ["far", "./far.yaml"])
def test_fetch_asks_for_a_job_of_the_site_that_was_named(host: Path, here: Path, tmp_path: Path, site: str) -> None:
    partitions = {"compute": {"nodes": 2, "node": {"cpus": 4}}}
    (config_dir() / "site_configs").mkdir(parents=True)
    for path in (config_dir() / "site_configs" / "far.yaml", here / "far.yaml"):
        path.write_text(json.dumps({"partitions": partitions, "login": "you@far"}))
    (tmp_path / "shown").write_text("{}")
    within("--remote", "you@far", "fetch", "4711", "--site", site)
    assert "show 4711 --site far --json" in (tmp_path / "asked").read_text()
