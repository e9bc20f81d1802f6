"""The same commands from a laptop, over a real sshd of a real Slurm's login host."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import Desk
from laptop import LOGIN, sshd_on
from waiting import eventually

from hpcjobs.sandbox import Sandbox

HOSTILE = ["a b", "it's", '"q"', "$HOME", "`id`", "!x", "\\", "\\n", "*", "", "-n", "--site", "ä", "a\nb", "%h ~"]
PARTITIONS = {"compute": {"nodes": 4, "node": {"cpus": 16}}}
SHOW = "import json, os, sys\n"
SHOW += "print(json.dumps(sys.argv[1:]), os.path.exists('big.bin'))\n"
SHOW += "sys.exit(int(os.environ['END']))\n"


def slurm(sandbox: Sandbox, *argv: str) -> str:
    env = {**os.environ, "SLURM_CONF": sandbox.slurm_conf}
    return subprocess.run(argv, env=env, capture_output=True, text=True, check=True).stdout


def write_code(desk: Desk) -> None:
    """A repository with a program, and a file that git ignores."""
    subprocess.run(["git", "init", "-q", str(desk.code)], check=True)
    (desk.code / ".gitignore").write_text("*.bin\n")
    (desk.code / "big.bin").write_text("data")
    (desk.code / "show.py").write_text(SHOW)


@pytest.mark.timeout(400)
def test_a_job_is_submitted_followed_and_fetched_with_every_argument_as_it_was_typed(desk: Desk) -> None:
    """Its exit code is the program's; the login host gets hpcjobs, and what git does not ignore."""
    write_code(desk)
    answer = desk.hpcjobs(
        "submit", "--site", "far", "--name", "words", "--env", "END=7", "--follow", "show.py", *HOSTILE
    )
    assert answer.code == 7, answer
    assert "/hpcjobs/installed/" in answer.err, "the job gets the environment of hpcjobs alone, and says so"
    assert "which hpcjobs --remote made for hpcjobs alone" in answer.err
    lines = [line for line in answer.out.splitlines() if line.startswith("[")]
    assert lines == [f"{json.dumps(HOSTILE)} False"]
    assert "Welcome" not in answer.out
    assert " words " in desk.hpcjobs("ps", "--site", "far", "--all").out
    assert desk.hpcjobs("wait", "--site", "far", "words").code == 7
    assert "installing" not in desk.hpcjobs("why", "--site", "far", "words").err
    fetched = desk.hpcjobs("fetch", "--site", "far", "words")
    assert fetched.code == 0, fetched
    folder = desk.code / fetched.out.strip()
    assert json.dumps(HOSTILE) in next((folder / "logs").glob("words_*.out")).read_text()
    assert desk.hpcjobs("fetch", "--site", "far", "words", "manifest.json", "--to", "here").code == 0
    assert (desk.code / "here" / "manifest.json").exists()


def test_what_is_removed_on_the_laptop_is_removed_there_and_what_jobs_wrote_stays(desk: Desk) -> None:
    write_code(desk)
    (desk.code / "old.py").write_text("print('old')")
    arguments = ("submit", "--site", "full", "--wait", "bash", "-c")
    assert desk.hpcjobs(*arguments, "test -e old.py && echo 1 >result.csv").code == 0
    (desk.code / "old.py").unlink()
    assert desk.hpcjobs(*arguments, "test ! -e old.py && test -e result.csv").code == 0


@pytest.mark.timeout(400)
def test_a_session_of_jupyter_opens_on_the_laptop_and_ends_there(desk: Desk) -> None:
    urls_file = desk.home / "opened"
    browser = desk.home / "bin" / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" >{urls_file}\n')
    browser.chmod(0o755)
    process = desk.start("jupyter", "--site", "full", env={"BROWSER": str(browser)})
    eventually(lambda: process.poll() is not None or urls_file.exists(), what="the browser")
    assert process.poll() is None, process.communicate()
    assert process.stderr is not None
    url = next(line for line in process.stderr if "open: " in line).split("open: ")[1].strip()
    assert desk.status(url.replace("/lab", "/api/contents")) == "200"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert "is ended" in err
    assert desk.status(url) == "000"
    assert desk.hpcjobs("jupyter", "list", "--site", "full", "--json").json == []


def test_a_page_of_a_report_comes_to_the_laptop(desk: Desk) -> None:
    write_code(desk)
    (desk.code / "measure.sh").write_text('echo \'{"loss": 0.5}\' >"$HPCJOBS_RUN_DIR/summary.json"\n')
    options = ("--site", "full", "--name", "tried", "--set", "x=1,2", "--wait")
    answer = desk.hpcjobs("sweep", *options, "bash", "measure.sh")
    assert answer.code == 0, answer
    page = desk.hpcjobs("--remote", "full", "report", "sweep", "tried")
    assert page.code == 0, page
    assert "fetched results/tried-report" in page.err
    assert "<html" in (desk.code / "results" / "tried-report" / "index.html").read_text()


@pytest.fixture
def slow_sbatch(far: Path) -> Any:
    """An sbatch of the login host that submits, and then waits for the file ``go`` before it prints the id."""
    wrapper = far / "bin" / "sbatch"
    wrapper.write_text(
        f'#!/bin/bash\n/usr/bin/sbatch "$@" >{far}/id && touch {far}/submitted\n'
        f"while [ ! -e {far}/go ]; do sleep 0.1; done\ncat {far}/id\n"
    )
    wrapper.chmod(0o755)
    yield far
    for name in ("bin/sbatch", "id", "submitted", "go"):
        (far / name).unlink(missing_ok=True)


def ssh_processes(desk: Desk) -> dict[str, int]:
    """The laptop's ssh processes: the one that runs the command, and the connection that it shares."""
    seen = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (folder / "cmdline").read_bytes().decode().split("\0")
        except OSError:  # it has ended
            continue
        if str(desk.home / "ssh_config") in arguments and "-O" not in arguments and arguments[0].endswith("ssh"):
            seen["command" if "exec bash" in arguments[-2] else "connection"] = int(folder.name)
        elif arguments[0].startswith(("ssh: ", str(desk.home))) and "[mux]" in arguments[0]:
            seen["connection"] = int(folder.name)
    return seen


@pytest.mark.timeout(400)
@pytest.mark.parametrize("killed", ["command", "connection"])
def test_a_connection_that_breaks_after_sbatch_has_submitted_leaves_one_job(
    desk: Desk, slow_sbatch: Path, sandbox: Sandbox, killed: str
) -> None:
    process = desk.start("submit", "--site", "full", "--name", f"once-{killed}", "sleep", "300")
    eventually((slow_sbatch / "submitted").exists, what="the submission")
    os.kill(ssh_processes(desk)[killed], signal.SIGKILL)
    assert process.stderr is not None
    assert any("is lost; trying again" in line for line in process.stderr)
    (slow_sbatch / "go").touch()
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    job_id = slurm(sandbox, "squeue", "-h", "-o", "%i", "--name", f"once-{killed}").split()
    assert len(job_id) == 1
    assert f"job {job_id[0]} " in out
    assert f"job {job_id[0]} was submitted" in err
    assert desk.hpcjobs("cancel", "--site", "full", job_id[0]).code == 0


@pytest.mark.timeout(400)
def test_a_command_typed_again_after_the_laptop_died_finds_the_job_and_typed_a_third_time_submits_anew(
    desk: Desk, slow_sbatch: Path, sandbox: Sandbox
) -> None:
    arguments = ("submit", "--site", "full", "--name", "twice", "--parsable", "sleep", "300")
    process = desk.start(*arguments)
    eventually((slow_sbatch / "submitted").exists, what="the submission")
    for pid in (process.pid, *ssh_processes(desk).values()):
        os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=60)
    (slow_sbatch / "go").touch()
    again = desk.hpcjobs(*arguments)
    assert again.code == 0, again
    ids = slurm(sandbox, "squeue", "-h", "-o", "%i", "--name", "twice").split()
    assert ids == [again.out.strip()]
    assert "got no answer" in again.err
    third = desk.hpcjobs(*arguments).out.strip()
    ids = slurm(sandbox, "squeue", "-h", "-o", "%i", "--name", "twice").split()
    assert sorted(ids) == sorted([again.out.strip(), third])
    assert desk.hpcjobs("cancel", "--site", "full", *ids).code == 0


@pytest.mark.timeout(400)
def test_a_sweep_whose_connection_breaks_after_sbatch_has_submitted_is_one_array(
    desk: Desk, slow_sbatch: Path, sandbox: Sandbox
) -> None:
    arguments = ("--site", "full", "--name", "swept", "--set", "x=1,2", "bash", "-c", "sleep 300")
    process = desk.start("sweep", *arguments)
    eventually((slow_sbatch / "submitted").exists, what="the submission")
    os.kill(ssh_processes(desk)["command"], signal.SIGKILL)
    assert process.stderr is not None
    assert any("is lost; trying again" in line for line in process.stderr)
    (slow_sbatch / "go").touch()
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    (array,) = {*slurm(sandbox, "squeue", "-h", "-o", "%F", "--name", "swept").split()}
    assert f"arrays {array}" in out
    assert "sweep swept was submitted at " in err
    slurm(sandbox, "scancel", array)


def test_a_command_without_a_terminal_ends_there_when_it_is_ended_here(desk: Desk, sandbox: Sandbox) -> None:
    job = desk.hpcjobs("submit", "--site", "full", "--name", "long", "--parsable", "sleep", "300").out.strip()
    process = desk.start("wait", "--site", "full", job, start_new_session=True)
    assert process.stderr is not None
    assert any("RUNNING" in line or "PENDING" in line for line in process.stderr)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    process.communicate(timeout=60)
    listed = ["ps", "axww", "-o", "args"]
    pattern = f"hpcjobs wait --site full {job}"
    eventually(
        lambda: pattern not in subprocess.run(listed, capture_output=True, text=True).stdout, what="the end there"
    )
    assert desk.hpcjobs("cancel", "--site", "full", job).code == 0


def test_a_host_behind_another_is_reached_by_the_users_own_configuration(desk: Desk, sandbox: Sandbox) -> None:
    inner = sandbox.hosts[0]
    desk.write_ssh_config(f"Host inner\n  HostName {inner.address}\n  ProxyJump {LOGIN}\n")
    desk.write_site(
        "inner",
        partitions=PARTITIONS,
        slurm_conf=sandbox.slurm_conf,
        login={"host": "inner", "command": f"{sys.executable} -m hpcjobs"},
    )
    with sshd_on(desk.keys, inner, environment={"HOME": str(desk.far)}):
        answer = desk.hpcjobs("ps", "--site", "inner")
        assert answer.code == 0, answer
        desk.close()


def test_a_passphrase_is_asked_for_in_the_terminal(desk: Desk) -> None:
    key = desk.home / "locked"
    key.write_bytes((desk.keys / "user_key").read_bytes())
    key.chmod(0o600)
    subprocess.run(["ssh-keygen", "-q", "-p", "-P", "", "-N", "open sesame", "-f", str(key)], check=True)
    desk.write_ssh_config(f"Host {LOGIN}\n  IdentityFile {key}\n  IdentityAgent none\n")
    (desk.home / "ssh_config").write_text(
        (desk.home / "ssh_config").read_text().replace(f"  IdentityFile {desk.keys / 'user_key'}\n", "")
    )
    ours, theirs = pty.openpty()
    process = desk.start("ps", "--site", "full", stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
                         preexec_fn=take_terminal)  # fmt: skip
    os.close(theirs)
    shown = read_until(ours, b"passphrase")
    os.write(ours, b"open sesame\n")
    shown += read_until(ours, None)
    assert process.wait(60) == 0, shown
    assert b"no jobs" in shown or b"JOB" in shown


def take_terminal() -> None:
    """In the child: its standard input is its terminal."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def read_until(descriptor: int, text: bytes | None) -> bytes:
    shown = b""
    while text is None or text not in shown:
        try:
            more = os.read(descriptor, 4096)
        except OSError:  # the other side has ended
            break
        if not more:
            break
        shown += more
    return shown


def test_a_host_whose_key_has_changed_is_not_talked_to(desk: Desk) -> None:
    other = (desk.keys / "user_key.pub").read_text().split()[:2]
    (desk.home / "known_hosts").write_text(f"[{LOGIN}]:2222,[10.79.0.1]:2222 {' '.join(other)}\n")
    answer = desk.hpcjobs("ps", "--site", "full")
    assert answer.code == 3
    assert "REMOTE HOST IDENTIFICATION HAS CHANGED" in answer.err
    assert f"{LOGIN} cannot be reached by ssh" in answer.err
    assert "Traceback" not in answer.err


def test_a_host_that_nobody_knows_is_named_at_once(desk: Desk) -> None:
    answer = desk.hpcjobs("--remote", "nobody@nowhere.invalid", "submit", "true", timeout_s=60)
    assert answer.code == 3
    assert "nobody@nowhere.invalid cannot be reached by ssh" in answer.err
    assert "trying again" not in answer.err


def test_a_login_host_without_python_is_named_with_what_to_do(desk: Desk, sandbox: Sandbox) -> None:
    desk.write_site("bare", partitions=PARTITIONS, slurm_conf=sandbox.slurm_conf, login=LOGIN)
    (desk.far / "tools").mkdir(exist_ok=True)
    for name in ("mkdir", "mktemp", "base64", "tar", "mv", "rm", "cat", "ln"):
        if not (desk.far / "tools" / name).exists():
            (desk.far / "tools" / name).symlink_to(f"/usr/bin/{name}")
    (desk.far / "profile").write_text(f"export PATH={desk.far}/tools XDG_DATA_HOME={desk.far}/bare\n")
    answer = desk.hpcjobs("ps", "--site", "bare")
    assert answer.code == 3
    assert f"{LOGIN} has no Python 3.10 or newer" in answer.err
    assert "login: {python: " in answer.err
