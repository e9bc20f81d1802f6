"""Jupyter on a worker node of a real Slurm, reached from a laptop by the commands that were printed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import commandline
import pytest
from commandline import hpcjobs
from laptop import ARTEFACTS, LOGIN, Laptop, on_node, sshd_on
from waiting import eventually

from hpcjobs.files import user_name
from hpcjobs.sandbox import Sandbox
from hpcjobs.sandbox.folder import folder_at

Site = Callable[..., str]
STRANGER = Path(__file__).parent / "stranger.py"
NOBODY = 65534
WHERE_AM_I = """import os, socket, subprocess
print("this is", socket.gethostname())
line = "srun --overlap -N 2 --ntasks-per-node 2 hostname | sort"
print(subprocess.run(line, shell=True, capture_output=True, text=True))
print(sorted(name for name in os.environ if name.startswith(("SLURM_", "HPCJOBS_"))))
"""


def notebook(folder: Path, cell: str) -> Path:
    """A notebook of one cell that was never run."""
    path = folder / "hello.ipynb"
    made = {"cell_type": "code", "id": "c", "metadata": {}, "execution_count": None, "outputs": [], "source": cell}
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    path.write_text(json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": metadata, "cells": [made]}))
    return path


def start(site: str, *arguments: str) -> dict[str, Any]:
    """A session that answers, as ``--json`` tells of it."""
    answer = hpcjobs("jupyter", "--site", site, "--detach", "--json", *arguments, timeout_s=200)
    assert answer.code == 0, answer
    document: dict[str, Any] = answer.json
    return document


def stop(details: dict[str, Any]) -> None:
    """End it; then there is no job, no process and no file with its token."""
    answer = hpcjobs("jupyter", "stop", details["job_id"])
    assert answer.code == 0, answer
    eventually(lambda: not processes_of(details["run_dir"]), what="the end of its processes")
    assert files_with(details["connection"]["token"], Path(details["run_dir"])) == []
    assert hpcjobs("jupyter", "list", "--json").json == []


def command(details: dict[str, Any]) -> str:
    """The line for the laptop: also in the run folder, for its owner."""
    line = shlex.join(details["tunnel"])
    path = Path(details["run_dir"], "port_forwarding_command")
    assert path.read_text() == line + "\n"
    assert path.stat().st_mode & 0o077 == 0
    return line


def processes(text: str) -> list[str]:
    """Command lines of this machine, and so of all hosts of the sandbox, that hold ``text``."""
    listed = subprocess.run(["ps", "axww", "-o", "args"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if text in line]


def processes_of(run_dir: str) -> list[str]:
    """Ids of the processes that have this folder in their command line or environment: server and kernels too."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if run_dir.encode() in (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes():
                pids.append(folder.name)
    return pids


def files_with(token: str, folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and token.encode() in path.read_bytes()]


def page(details: dict[str, Any], path: str = "/api/contents", *, token: str | None = None) -> str:
    port = details["url"].split(":")[2].split("/")[0]
    return f"http://127.0.0.1:{port}{path}?token={token or details['connection']['token']}"


def sockets_on(node: str) -> list[str]:
    """Paths of the sockets in private folders of sessions, as every user of the node may read them."""
    arguments = [*on_node(node), "cat", "/proc/net/unix"]
    listed = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout
    return sorted(set(re.findall(r"/\S*/hpcjobs-(?!sandbox)\w+/\S+", listed)))


def slurm(sandbox: Sandbox, *argv: str) -> str:
    env = {**os.environ, "SLURM_CONF": sandbox.slurm_conf}
    return subprocess.run(argv, env=env, capture_output=True, text=True, check=True).stdout


@pytest.mark.timeout(300)
def test_a_cell_runs_on_the_worker_node_through_the_printed_tunnel(
    site: Site, desk: Laptop, sandbox: Sandbox, workdir: Path
) -> None:
    """And can start tasks on both nodes; when the job is about to be ended, what was typed is saved."""
    document = notebook(workdir, WHERE_AM_I)
    details = start(site(), "-N", "2", "-c", "2")
    token = details["connection"]["token"]
    ARTEFACTS.mkdir(exist_ok=True)
    screenshot = ARTEFACTS / "jupyterlab.png"
    screenshot.unlink(missing_ok=True)

    def warn() -> None:
        assert not processes(token), "nobody's command line holds the token while it is used"
        slurm(sandbox, "scancel", "--batch", "--signal=USR1", details["job_id"])

    with desk.tunnel(command(details)):
        wishes = {"notebook": document.name, "screenshot": str(screenshot), "append": "# typed by hand"}
        seen = desk.browse(details["url"], once_typed=warn, **wishes)
    assert seen["output"].startswith(f"this is {details['node']}\n")
    hosts = slurm(sandbox, "squeue", "-h", "-o", "%N", "-j", details["job_id"]).strip()
    names = slurm(sandbox, "scontrol", "show", "hostnames", hosts).split()
    assert "\\n".join(sorted(names * 2)) in seen["output"]
    assert "returncode=0" in seen["output"]
    assert "SLURM_JOB_ID" in seen["output"]
    for name in ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_CPUS_PER_TASK", "HPCJOBS_RUN_DIR"):
        assert name not in seen["output"], "a cell is no task of the session's job"
    assert "has been saved" in seen["notice"]
    assert "# typed by hand" in document.read_text()
    assert screenshot.stat().st_size > 10_000
    assert token not in slurm(sandbox, "scontrol", "show", "job", details["job_id"])
    assert token not in hpcjobs("logs", details["job_id"]).out
    folders = [workdir, folder_at(None).node(details["node"])]  # the node's own /tmp and spool are in the second
    readable = [p for folder in folders for p in files_with(token, folder) if p.stat().st_mode & 0o077]
    assert readable == []
    stop(details)


@pytest.fixture
def node(sandbox: Sandbox, desk: Laptop) -> Iterator[str]:
    """A node that lets users in by ssh."""
    with sshd_on(desk.folder, sandbox.hosts[0]):
        yield sandbox.hosts[0].name


def test_no_other_user_of_the_node_reads_reaches_or_replaces_a_session(site: Site, desk: Laptop, node: str) -> None:
    """A second user sees what everybody sees of sockets and processes, and after the end listens at the same names,
    where the tunnel of the laptop still leads."""
    details = start(site(ssh_to_nodes=True), "-o", f"nodelist={node}")
    with desk.tunnel(command(details)):
        assert desk.status(page(details)) == "200"
        assert desk.status(page(details, token="wrong")) == "403"
        kernel = json.loads(desk.post(page(details, "/api/kernels")))["id"]
        eventually(lambda: any(kernel in name for name in sockets_on(node)), what="the kernel's sockets")
        names = sockets_on(node)
        pids = processes_of(details["run_dir"])
        programs = " ".join(Path("/proc", pid, "cmdline").read_text() for pid in pids)
        assert all(name in programs for name in ("session.pyz", "jupyterlab", "ipykernel"))
        seen = subprocess.run(
            [*on_node(node), "/usr/bin/python3", str(STRANGER), "look", details["run_dir"], *pids],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert json.loads(seen.stdout) == []
        assert details["connection"]["socket"] not in names
        stop(details)
        arguments = [*on_node(node), "/usr/bin/python3", str(STRANGER), "take", *names]
        stranger = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == "listening\n"
        assert desk.status(page(details)) == "000"
        assert stranger.communicate(timeout=60)[0] == ""


def test_where_nobody_may_ssh_to_a_node_a_step_of_the_job_carries_the_connection(
    site: Site, desk: Laptop, workdir: Path, folder_of_another_user: Path
) -> None:
    content = os.urandom(3_000_000)
    (workdir / "big.bin").write_bytes(content)
    details = start(site(), "--dir", str(workdir))
    socket = Path(details["tunnel"][details["tunnel"].index("-L") + 1].partition(":")[2])
    with desk.tunnel(command(details)):
        assert socket.stat().st_mode & 0o077 == 0
        assert socket.parent.stat().st_mode & 0o077 == 0
        assert folder_of_another_user not in socket.parents
        assert desk.status(page(details)) == "200"
        assert desk.status(page(details, token="wrong")) == "403"
        fetched = workdir / "fetched.bin"
        assert desk.status(page(details, "/files/big.bin"), into=str(fetched)) == "200"
        assert fetched.read_bytes() == content
        assert processes(" carry ")
    eventually(lambda: not processes(" carry ") and not processes(" relay "), what="the end of the relay")
    assert not socket.exists()
    assert hpcjobs("jupyter", "list", "--json").json[0]["state"] == "RUNNING"
    stop(details)


@pytest.fixture
def folder_of_another_user() -> Iterator[Path]:
    """On the login host, by the name under which a folder of this user might be looked for in /tmp."""
    folder = Path("/tmp", f"hpcjobs-{user_name()}")
    folder.mkdir(exist_ok=True)
    os.chown(folder, NOBODY, NOBODY)
    yield folder
    folder.rmdir()


def test_a_session_from_the_laptop_ends_there_with_its_tunnel(site: Site, desk: Laptop, workdir: Path) -> None:
    python = shlex.join(["env", f"HOME={workdir / 'home'}", commandline.sys.executable, "-m", "hpcjobs"])
    path = site(hpcjobs=f"cd {shlex.quote(str(workdir))} && {python}")
    urls_file = desk.folder / "opened"
    browser = desk.folder / "bin" / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" >{urls_file}\n')
    browser.chmod(0o755)
    arguments = [commandline.sys.executable, "-m", "hpcjobs", "jupyter", "--connect", "--site", path]
    line = f"env BROWSER={browser} {shlex.join(arguments)}"
    process = desk.start(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    eventually(lambda: process.poll() is not None or urls_file.exists(), what="the browser")
    assert process.poll() is None, process.communicate()
    (details,) = hpcjobs("jupyter", "list", "--json").json
    assert urls_file.read_text().startswith("file://")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert f"job {details['job_id']} is ended" in err
    eventually(lambda: not processes(details["run_dir"]), what="the end of its processes")
    eventually(lambda: not processes(f"{LOGIN} "), what="the end of the way to the login node")
    assert hpcjobs("jupyter", "list", "--json").json == []


COUNTED = "try:\n    count += 1\nexcept NameError:\n    count = 1\nprint('count', count)"


@pytest.mark.long  # ssh takes 45 s to notice a link that is silent
@pytest.mark.timeout(600)
def test_a_kernel_keeps_its_variables_while_the_link_is_cut_and_the_login_host_restarts(
    site: Site, desk: Laptop, workdir: Path
) -> None:
    """Cut for 10 s, which nobody notices; for two minutes, in which ssh gives up; a login host whose connections end
    at once; and cut for good: Ctrl-C then ends the laptop's command, and the session is reached from elsewhere."""
    python = shlex.join(["env", f"HOME={workdir / 'home'}", commandline.sys.executable, "-m", "hpcjobs"])
    greeting = "echo Welcome {to} the login node"
    path = site(hpcjobs=f"{greeting}; cd {shlex.quote(str(workdir))} && {python}")
    document = notebook(workdir, COUNTED)
    arguments = [commandline.sys.executable, "-m", "hpcjobs", "jupyter", "--connect", "--site", path]
    line = f"env BROWSER=true http_proxy=http://127.0.0.1:9 {shlex.join(arguments)}"
    process = desk.start(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stderr is not None
    url = next(text for text in process.stderr if "open: " in text).split("open: ")[1].strip()
    assert desk.browse(url, notebook=document.name)["output"].strip() == "count 1"
    with link_cut():
        time.sleep(10)
    assert desk.browse(url, notebook=document.name, run=2)["output"].strip() == "count 2"
    with link_cut():
        began = time.monotonic()
        assert any("is lost: it is made anew" in text for text in process.stderr)
        time.sleep(max(0, 120 - (time.monotonic() - began)))
    assert any("connected again" in text for text in process.stderr)
    assert desk.browse(url, notebook=document.name, run=3)["output"].strip() == "count 3"
    for pid in connections_of_login(desk):
        os.kill(pid, signal.SIGTERM)
    assert any("connected again" in text for text in process.stderr)
    assert desk.browse(url, notebook=document.name, run=4)["output"].strip() == "count 4"
    with link_cut():
        assert any("is lost: it is made anew" in text for text in process.stderr)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=240)
    (details,) = hpcjobs("jupyter", "list", "--json").json
    assert details["state"] == "RUNNING"
    assert process.returncode == 3
    assert f"job {details['job_id']} runs on: root@{LOGIN} cannot be reached by ssh" in err
    assert f"hpcjobs jupyter open {details['job_id']}" in err
    again = hpcjobs("jupyter", "open", details["job_id"], "--json").json
    with desk.tunnel(shlex.join(again["tunnel"])):
        assert desk.browse(again["url"], notebook=document.name, run=5)["output"].strip() == "count 5"
    stop(again)


@contextmanager
def link_cut() -> Iterator[None]:
    """Nothing passes between the laptop and the login node, and nobody is told."""
    for state in ("down", "up"):
        subprocess.run(["ip", "link", "set", "hpcjobs-laptop", state], check=True)
        if state == "down":
            try:
                yield
            except BaseException:
                subprocess.run(["ip", "link", "set", "hpcjobs-laptop", "up"], check=True)
                raise


def connections_of_login(desk: Laptop) -> list[int]:
    """Processes of the login node's sshd that hold a connection each."""
    pids = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        parent = stat.read_text().rpartition(")")[2].split()[1]
        command = Path(f"/proc/{parent}/cmdline")
        if command.exists() and str(desk.folder / "sshd_login") in command.read_text().replace("\0", " "):
            pids.append(int(stat.parent.name))
    return pids


def test_what_a_node_lacks_is_said_within_seconds_of_its_start(site: Site) -> None:
    path = site(python="python3")
    env = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    answer = hpcjobs("jupyter", "--site", path, env=env, timeout_s=200)  # far less than a session may take to start
    assert answer.code == 3
    assert "has no jupyterlab" in answer.err
    assert "pip install" in answer.err
    refused = hpcjobs("jupyter", "--site", site(python="/usr/bin/python3"))
    assert refused.code == 5
    assert "has no jupyterlab" in refused.err


def test_ctrl_c_in_the_queue_cancels_the_job(site: Site, sandbox: Sandbox) -> None:
    process = commandline.start("jupyter", "--site", site(), "-o", "hold")
    assert process.stderr is not None
    line = next(text for text in process.stderr if "PENDING" in text)
    assert "(JobHeldUser)" in line
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 130, (out, err)
    assert "is cancelled" in err
    assert slurm(sandbox, "squeue", "-h", "--me", "--name=jupyter") == ""
