"""`hpcjobs jupyter --connect` on the laptop, with an ssh that runs everything on this machine."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from commandline import ok, start, within
from waiting import eventually

from hpcjobs.errors import HpcJobsError
from hpcjobs.jupyter.laptop import answers, find_json

# An ssh that is cut while there is a file named cut. A forwarded port is held by a program that copies both ways.
SSH = """#!{python}
import os, signal, socket, subprocess, sys, threading, time

here = {here!r}
words = sys.argv[1:]
with open(here + "/calls", "a") as calls:
    calls.write(" ".join(words) + "\\n")


def forget_signals():  # what the laptop ignores or blocks is no matter of the login node
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


cut = lambda: os.path.exists(here + "/cut")
if cut():
    sys.exit(255)
print("Welcome to the login node {{maintenance on Friday}}", flush=True) if "-L" not in words else None
if "-L" not in words:
    while os.path.exists(here + "/slow"):
        time.sleep(0.05)
    sys.exit(subprocess.run(words[-1], shell=True, start_new_session=True, preexec_fn=forget_signals).returncode)
port, host, to = words[words.index("-L") + 1].split(":")
listening = socket.create_server(("127.0.0.1", int(port)))


def copy(source, target):
    try:
        while data := source.recv(65536):
            target.sendall(data)
    except OSError:
        pass
    finally:
        source.close()
        target.close()


def accept():
    while True:
        near, _ = listening.accept()
        far = socket.create_connection(("127.0.0.1", int(to)))
        for ends in ((near, far), (far, near)):
            threading.Thread(target=copy, args=ends, daemon=True).start()


threading.Thread(target=accept, daemon=True).start()
while not cut():
    time.sleep(0.05)
os._exit(255)
"""


@pytest.fixture
def desk(here: Path, code_server: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A site that is reached by ssh, and a laptop with that ssh and a browser that notes what it is to open."""
    fields = {"scheduler": "local", "login": "front.example", "jupyter": {"hpcjobs": f"{sys.executable} -m hpcjobs"}}
    (here / "afar.yaml").write_text(json.dumps(fields))
    folder = here / "bin"
    folder.mkdir()
    for name, text in (
        ("ssh", SSH.format(python=sys.executable, here=str(here))),
        ("browser", f'#!/bin/sh\necho "$1" >{here}/opened\n'),
    ):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("BROWSER", str(folder / "browser"))
    return here


CONNECT = ("jupyter", "--connect", "--site", "./afar.yaml", "--code")


def read_until(process: subprocess.Popen[str], text: str) -> str:
    assert process.stderr is not None
    lines = ""
    for line in process.stderr:
        lines += line
        if text in line:
            return lines
    raise AssertionError(lines)


def test_a_link_that_is_lost_is_made_anew_and_the_session_runs_on(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a proxy variable that leads nowhere, and with a login node that greets everybody."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    process = start(*CONNECT)
    before = read_until(process, "password:")
    assert "open: http://127.0.0.1:" in before
    eventually((desk / "opened").exists, what="the browser")
    (details,) = ok("jupyter", "list", "--json").json
    (desk / "cut").touch()
    read_until(process, "the connection to front.example is lost: it is made anew; the session runs on")
    calls = len((desk / "calls").read_text().splitlines())
    eventually(lambda: len((desk / "calls").read_text().splitlines()) >= calls + 2, what="two more tries")
    assert [s["state"] for s in ok("jupyter", "list", "--json").json] == ["RUNNING"]
    (desk / "cut").unlink()
    read_until(process, "connected again")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert f"job {details['job_id']} is ended" in err
    assert ok("jupyter", "list", "--json").json == []


def test_ctrl_c_while_the_link_is_down_says_that_the_session_runs_on(desk: Path) -> None:
    process = start(*CONNECT)
    read_until(process, "password:")
    (details,) = ok("jupyter", "list", "--json").json
    (desk / "cut").touch()
    read_until(process, "is lost")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert "Traceback" not in err
    assert process.returncode == 3, "the session that Ctrl-C should end has not ended"
    assert f"job {details['job_id']} runs on: front.example cannot be reached by ssh" in err
    assert f"`hpcjobs jupyter stop {details['job_id']}` to end it" in err
    assert ok("jupyter", "list", "--json").json[0]["state"] == "RUNNING"


def test_a_session_that_is_stopped_elsewhere_ends_the_command(desk: Path) -> None:
    process = start(*CONNECT)
    read_until(process, "password:")
    ok("jupyter", "stop")
    (desk / "cut").touch()  # the tunnel of the double knows nothing of the server at its end
    read_until(process, "is lost")
    (desk / "cut").unlink()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "has ended" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_during_the_submission_ends_the_session_that_was_submitted(desk: Path, number: int) -> None:
    (desk / "slow").touch()
    process = start(*CONNECT, start_new_session=True)
    eventually((desk / "calls").exists, what="the ssh that submits")
    os.killpg(process.pid, number)
    (desk / "slow").unlink()
    _, err = process.communicate(timeout=60)
    assert "is ended" in err, err
    assert (process.returncode, ok("jupyter", "list", "--json").json) == (0, [])


def test_a_closed_terminal_whose_signal_comes_twice_ends_the_session(desk: Path) -> None:
    process = start(*CONNECT, start_new_session=True)
    read_until(process, "password:")
    (desk / "slow").touch()
    calls = (desk / "calls").read_text()
    os.killpg(process.pid, signal.SIGHUP)
    eventually(lambda: "jupyter stop" in (desk / "calls").read_text()[len(calls) :], what="the ssh that stops")
    os.killpg(process.pid, signal.SIGHUP)
    (desk / "slow").unlink()
    _, err = process.communicate(timeout=60)
    assert "is ended" in err, err
    assert (process.returncode, ok("jupyter", "list", "--json").json) == (0, [])


def test_a_program_that_takes_the_port_while_the_link_is_down_is_not_taken_for_the_session(desk: Path) -> None:
    process = start(*CONNECT)
    address = re.search(r"127\.0\.0\.1:([0-9]+)", read_until(process, "password:"))
    assert address is not None
    (desk / "cut").touch()
    read_until(process, "is lost")
    with HTTPServer(("127.0.0.1", int(address[1])), BaseHTTPRequestHandler) as stranger:
        threading.Thread(target=stranger.serve_forever, daemon=True).start()
        (desk / "cut").unlink()
        between = read_until(process, f"another program listens at port {address[1]}")
        stranger.shutdown()
    assert "connected again" not in between
    read_until(process, "connected again")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)


def test_what_speaks_no_http_is_no_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            other, _ = server.accept()
            with other:
                other.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
                other.recv(1000)

        threading.Thread(target=greet, daemon=True).start()
        assert not answers(server.getsockname()[1])


def test_a_dry_run_from_the_laptop_shows_the_script_of_the_login_node(desk: Path) -> None:
    answer = within(*CONNECT, "--dry-run")
    assert answer.code == 0, answer
    assert [s["state"] for s in ok("jupyter", "list", "--json").json] == []


def test_a_login_node_that_cannot_be_reached_names_the_way_that_asks_for_a_one_time_token_once(desk: Path) -> None:
    (desk / "cut").touch()
    process = start(*CONNECT)
    _, err = process.communicate(timeout=60)
    assert "front.example cannot be reached by ssh" in err
    assert "a one-time token, use `hpcjobs --remote SITE jupyter`: it asks once" in err


def test_a_token_file_is_read_on_the_laptop(desk: Path) -> None:
    (desk / "mine").write_text("0123456789abcdef-secret\n")
    (desk / "mine").chmod(0o600)
    process = start(*CONNECT, "--token-file", "mine")
    assert "password: 0123456789abcdef-secret" in read_until(process, "password:")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert "0123456789abcdef-secret" not in (desk / "calls").read_text()


@pytest.mark.parametrize(
    "output",
    [
        '{"job_id": "7"}',
        '{\n{"job_id": "7"}',
        '{"a": 1 \n{"job_id": "7"}',
        'Welcome!\n{"job_id": "7"}\n',
        '{maintenance}\n{"job_id": "7"}\nbye {"job_id": "8"}\n',
        '{"load": [\n{"job_id": "7"}\n',
        '{"n": ' + "1" * 5000 + '}\n{"job_id": "7"}\n',
        '{"a":' * 3000 + '\n{"job_id": "7"}\n{bye}\n',
        "{ \n    local x\n}\n" * 101 + '{"job_id": "7"}\n',
    ],
)
def test_an_answer_is_found_between_what_a_profile_prints(output: str) -> None:
    assert find_json(output) == {"job_id": "7"}


def test_no_answer_at_all_is_an_error_that_shows_what_came() -> None:
    with pytest.raises(HpcJobsError, match="no answer of hpcjobs in what the login node printed: 'Welcome!'"):
        find_json("Welcome!\n")


@pytest.mark.parametrize(
    "output",
    [
        "\n" * (1 << 20), "{\n" * 100_000, '\n{"a": [' * 90 + "0," * 200_000, '{"a":\n' * 50_000, '{"a": 0,\n' * 50_000,
        '\n{"a": [' + "[]," * 200_000,
    ],
    ids=["lines", "starts", "numbers", "depth", "fields", "list"],
)  # fmt: skip
def test_an_answer_made_to_be_slow_costs_little_time_and_memory(output: str) -> None:
    tracemalloc.start()
    began = time.process_time()
    try:
        with pytest.raises(HpcJobsError, match="no answer of hpcjobs"):
            find_json(output)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()
    assert time.process_time() - began < 5


@pytest.mark.parametrize("way", [
    {"options": ["-N"], "to": "127.0.0.1:1", "host": ["front.example", "-oProxyCommand=touch ran"]},
    {"options": ["-N"], "to": "127.0.0.1:1", "host": ["-oProxyCommand=touch ran", "front.example"]},
    {"options": ["-oProxyCommand=touch ran"], "to": "127.0.0.1:1", "host": ["front.example"]},
    {"options": ["-N", "-J", "x`touch ran`"], "to": "/a", "host": ["you@node"]},
    {"options": ["-N", "-J", "front.example"], "to": "/a", "host": ["you@$(touch ran)"]},
    {"options": ["-N"], "to": "127.0.0.1:1"},
    "no way",
])  # fmt: skip
def test_a_login_host_that_lies_gives_ssh_no_option(desk: Path, way: object) -> None:
    """An option of ssh runs programs on the laptop, also behind the name of the host."""
    lie(desk, way)
    refused = within(*CONNECT)
    assert (refused.code, "names no way to a session" in refused.err) == (3, True), refused
    assert " -L " not in (desk / "calls").read_text()


@pytest.mark.parametrize("way", [
    {"options": [], "to": "/a", "host": ["you@third.example", "touch ran"]},
    {"options": ["-N"], "to": "/a", "host": ["third.example"]},
    {"options": ["-N", "-J", "third.example"], "to": "/a", "host": ["you@node"]},
])  # fmt: skip
def test_a_login_host_that_lies_leads_ssh_to_no_third_host(desk: Path, way: object) -> None:
    """The laptop's keys open other hosts of the user too, and a command in the answer would run there."""
    lie(desk, way)
    assert within(*CONNECT).code == 3
    (tunnel,) = [call for call in (desk / "calls").read_text().splitlines() if " -L " in call]
    assert "third.example" not in tunnel
    assert "front.example" in tunnel


def lie(desk: Path, way: object) -> None:
    """Have the login host answer everything with a session that is reached by this ``way``."""
    fields = ["schema", "job_id", "kind", "host", "socket", "port", "token", "path", "python", "started", "ends"]
    connection = {**dict.fromkeys(fields), "path": "/"}
    answer = {"job_id": "1", "site": "afar", "connection": connection, "way": way}
    lying = desk / "lying"
    lying.write_text(f"#!/bin/sh\necho '{json.dumps(answer)}'\n")
    lying.chmod(0o755)
    fields_of_site = {"scheduler": "local", "login": "front.example", "jupyter": {"hpcjobs": str(lying)}}
    (desk / "afar.yaml").write_text(json.dumps(fields_of_site))
