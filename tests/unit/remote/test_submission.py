"""A submission that arrives twice with one token is one job."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import slurm_with_memory
from commandline import await_answer, hpcjobs, ok, start

from hpcjobs.errors import ConfigError
from hpcjobs.files import config_dir, state_dir
from hpcjobs.jupyter.laptop import SharedRemote
from hpcjobs.remote.laptop import Laptop, Target, pack_sites
from hpcjobs.site.library import load_site
from hpcjobs.site.models import Login

SUBMIT = ("submit", "--site", "local", "--parsable", "--time", "5m", "true")


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> str:
    """What a laptop sends along."""
    monkeypatch.setenv("HPCJOBS_SUBMISSION", "0123abcd")
    return "0123abcd"


def claim(**fields: object) -> None:
    """What an earlier submission with the token has recorded."""
    (path := state_dir() / "submissions" / "0123abcd-0.json").parent.mkdir(parents=True)
    known = {"run_dir": "/proc/nowhere", "host": socket.gethostname(), "pid": 1, "started": 1, "when": time.time()}
    path.write_text(json.dumps(known | fields))


def test_the_same_token_finds_the_job_and_another_one_submits(token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = start(*SUBMIT).communicate()[0]
    again = start(*SUBMIT)
    out, err = again.communicate()
    assert (again.returncode, out) == (0, first)
    assert f"job {first.strip()} was submitted at " in err
    monkeypatch.setenv("HPCJOBS_SUBMISSION", "another")
    assert start(*SUBMIT).communicate()[0] != first


def test_a_job_that_submits_does_not_inherit_the_token(token: str) -> None:
    """A chain of jobs would end with its first link."""
    ok("submit", "--site", "local", "--wait", "--time", "5m", "bash", "-c", 'test -z "$HPCJOBS_SUBMISSION"')


def test_a_submission_that_never_came_to_a_job_is_made_now(token: str) -> None:
    claim()
    assert hpcjobs(*SUBMIT).out.startswith("L")


def test_one_that_is_under_way_on_this_host_is_awaited(token: str) -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    stat = Path(f"/proc/{sleeper.pid}/stat").read_text()
    claim(pid=sleeper.pid, started=int(stat.rpartition(")")[2].split()[19]))
    process = start(*SUBMIT)
    assert process.stderr is not None
    assert f"process {sleeper.pid} of this host is submitting this already" in process.stderr.readline()
    assert not list((Path.cwd() / "runs").glob("*"))
    sleeper.kill()
    sleeper.wait()
    assert process.communicate()[0].startswith("L")


def test_one_that_another_login_host_began_just_now_is_not_made_twice(token: str) -> None:
    claim(host="login2")
    answer = hpcjobs(*SUBMIT)
    assert answer.code == 8
    assert "login host login2 began to submit this" in answer.err
    assert "try again: in " in answer.err


def test_two_that_come_at_once_after_one_that_was_killed_make_one_job(
    token: str, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of the two still waits for the answer that there is no job of the killed one."""
    partitions = {"compute": {"nodes": 4, "node": {"cpus": 16}}}
    (here / "stub.yaml").write_text(json.dumps({"partitions": partitions, "run_root": "runs"}))
    slurm = slurm_with_memory.install(monkeypatch, tmp_path / "slurm")
    submit = ("submit", "--site", "./stub.yaml", "--parsable", "true")
    slurm.clear(interruption="KILL")
    killed = await_answer(start(*submit, start_new_session=True), timeout_s=60)
    assert killed.code == -signal.SIGKILL
    slurm.clear()
    squeue = tmp_path / "slurm" / "squeue"
    squeue.write_text(squeue.read_text().replace("\n", "\nsleep 1\n", 1))
    answers = [await_answer(process, timeout_s=60) for process in (start(*submit), start(*submit))]
    assert [(answer.code, answer.out.strip()) for answer in answers] == [(0, *slurm.jobs())] * 2, answers


def test_a_refused_submission_may_be_made_again(token: str, here: Path) -> None:
    (here / "bad.yaml").write_text('{"scheduler": "local", "run_root": "/proc/none"}')
    assert hpcjobs("submit", "--site", "bad.yaml", "true").code == 5
    assert list((state_dir() / "submissions").glob("*.json")) == []


SWEEP = ("sweep", "--site", "local", "--name", "tried", "--set", "x=1,2", "--time", "5m", "--json", "false")


def test_a_sweep_that_is_sent_twice_does_not_submit_again_what_has_failed_meanwhile(
    token: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = hpcjobs(*SWEEP).json
    assert first["cells"] == 2
    hpcjobs("wait", *first["arrays"])
    again = hpcjobs(*SWEEP)
    assert again.code == 0, again
    assert again.json["arrays"] == first["arrays"]
    assert "sweep tried was submitted at " in again.err
    chunks = here / "runs" / "sweep-tried" / "chunks"
    assert len(list(chunks.iterdir())) == 1
    monkeypatch.setenv("HPCJOBS_SUBMISSION", "another")
    assert hpcjobs(*SWEEP).json["arrays"] != first["arrays"]
    assert len(list(chunks.iterdir())) == 2


def test_a_sweep_that_was_cut_short_is_completed_by_the_same_command(token: str, here: Path) -> None:
    claim(run_dir=str(here / "runs" / "sweep-tried"))
    assert hpcjobs(*SWEEP).json["cells"] == 2


def test_a_sweep_that_another_login_host_began_just_now_is_not_submitted_here(token: str, here: Path) -> None:
    claim(run_dir=str(here / "runs" / "sweep-tried"), host="login2")
    answer = hpcjobs(*SWEEP)
    assert answer.code == 8
    assert "login host login2 began to submit this" in answer.err
    assert not list((here / "runs" / "sweep-tried").glob("chunks/*"))


SSH = """#!/bin/bash
# An ssh whose other side is this machine. While the file `lose` is there, what submits is done, and its answer is lost.
case " $* " in
*" -G "*) exit 0 ;;
*" -O check "*) [ ! -e {folder}/down ]; exit ;;
*" -N "*) rm -f {folder}/down; exit 0 ;;
esac
remote="${{@: -1}}"
if [ -e {folder}/lose ] && base64 -d <<<"${{remote##* }}" | grep -q -- --no-wait; then
    bash -c "$remote" >{folder}/lost
    rm {folder}/lose; touch {folder}/down; exit 255
fi
exec bash -c "$remote"
"""


@pytest.fixture
def far(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an ssh that leads to this machine."""
    folder = tmp_path / "ssh"
    folder.mkdir()
    (folder / "ssh").write_text(SSH.format(folder=folder))
    (folder / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def test_a_session_whose_answer_is_lost_is_one_job_also_when_it_is_typed_again(far: Path) -> None:
    messages: list[str] = []
    login = Login(host="far", command=f"{sys.executable} -m hpcjobs")
    arguments = ["jupyter", "--site", "local", "--time", "5m", "--no-wait", "--json"]
    (far / "lose").touch()
    answer = SharedRemote(Laptop(Target(login, None, None), say=messages.append)).submit(arguments)
    try:
        assert json.loads((far / "lost").read_text())["job_id"] == answer["job_id"]
        assert any("is lost; trying again" in line for line in messages)
        assert [row["job_id"] for row in hpcjobs("jupyter", "list", "--json").json] == [answer["job_id"]]
    finally:
        hpcjobs("jupyter", "stop", "--all")


SITE = "partitions: {main: {nodes: 2, node: {cpus: 4}}}\n"


def sites_there(named: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the files that are sent with ``named`` be on the search path, as on the login host."""
    folder.mkdir()
    subprocess.run(["tar", "-x", "-C", folder], input=pack_sites(named).content, check=True)
    monkeypatch.setenv("HPCJOBS_USER_SITES", f"{folder}/named:{folder}/user")


def test_what_a_site_file_extends_beside_it_is_sent_along(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "far.yaml").write_text("extends: base\nmodules: [mine]\n")
    (here / "base.yaml").write_text(f"{SITE}env: {{FROM: beside}}\n")
    (folder := config_dir() / "site_configs").mkdir(parents=True)
    (folder / "base.yaml").write_text(f"{SITE}env: {{FROM: user}}\n")
    (folder / "far.yaml").write_text(SITE)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    sites_there(here / "far.yaml", tmp_path / "sent", monkeypatch)
    shutil.rmtree(here)
    shutil.rmtree(config_dir())
    site = load_site("far")
    assert site.modules == ("mine",)
    assert site.env == {"FROM": "beside"}


def test_a_file_that_extends_the_users_own_of_its_name_does_so_there_too(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "far.yaml").write_text("extends: far\nmodules: [mine]\n")
    (folder := config_dir() / "site_configs").mkdir(parents=True)
    (folder / "far.yaml").write_text(f"{SITE}env: {{FROM: user}}\n")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    sites_there(here / "far.yaml", tmp_path / "sent", monkeypatch)
    shutil.rmtree(config_dir())
    assert load_site("far").env == {"FROM": "user"}


def test_a_projects_file_that_is_named_by_its_path_is_not_sent_as_the_users_own(here: Path) -> None:
    """On the login host it would act without trust."""
    (here / "site_configs").mkdir()
    (here / "site_configs" / "evil.yaml").write_text(f"{SITE}setup: [evil]\n")
    with pytest.raises(ConfigError, match="not trusted"):
        pack_sites(Path("site_configs/evil.yaml"))
