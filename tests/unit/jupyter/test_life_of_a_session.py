"""A session on this machine from its start to its end, as its user sees it."""

from __future__ import annotations

import http.cookiejar
import json
import os
import pty
import re
import signal
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from commandline import moment, ok, start, within
from imagefile import write_image
from waiting import eventually

STRANGER = """
import os, socket, sys, threading
os.setgid(65534)
os.setuid(65534)
taken = {}


def take():
    for port in set(range(40000, 40032)) - taken.keys():
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
                continue
            except OSError:  # somebody else holds it
                pass
        server = socket.socket()
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("127.0.0.1", port))
            server.listen()
            taken[port] = server
        except OSError:
            server.close()


def repeat():
    while True:
        take()


take()
print("tried", flush=True)
threading.Thread(target=repeat, daemon=True).start()
sys.stdin.read()
for port, server in taken.items():
    server.settimeout(1)
    try:
        print("port", port, server.accept()[0].recv(1000), flush=True)
    except OSError:
        pass
os._exit(0)
"""
"""Listens, as nobody, at each port that somebody holds by bind alone; prints what came there."""
CODE = ("jupyter", "--site", "local", "--code")


def status(url: str, token: str | None = None) -> int:
    headers = {} if token is None else {"Authorization": f"token {token}"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=20) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def processes(run_dir: str) -> list[str]:
    """Command lines that name this run folder."""
    listed = subprocess.run(["ps", "axww", "-o", "args"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if run_dir in line]


def test_jupyterlab_answers_to_its_token_alone_and_stop_leaves_nothing(here: Path, sessions_end: None) -> None:
    folder = here / """it's "my" $(touch x) Ordner, ü"""
    folder.mkdir()
    details = ok("jupyter", "--site", "local", "-t", "1h", "--detach", "--json", "--dir", str(folder)).json
    token, run_dir = details["connection"]["token"], Path(details["run_dir"])
    url = f"http://127.0.0.1:{details['connection']['port']}"
    assert details["url"] == f"{url}/lab?token={token}"
    assert details["tunnel"] is None
    assert abs(moment(details["ends"]) - time.time() - 3600) < 120
    assert status(f"{url}/api/contents", token) == 200
    assert status(f"{url}/api/contents") == 403
    assert status(f"{url}/api/contents?token=wrong") == 403
    assert status(f"{url}/hpcjobs/session") == 403
    (listed,) = ok("jupyter", "list", "--json").json
    assert (listed["job_id"], listed["folder"]) == (details["job_id"], str(folder))
    assert token not in json.dumps(listed)
    assert ok("jupyter", "open", "--json").json["url"] == details["url"]
    holding = [path for path in run_dir.rglob("*") if path.is_file() and token.encode() in path.read_bytes()]
    assert run_dir / "connection.json" in holding
    assert {path.name: path.stat().st_mode & 0o077 for path in holding if path.stat().st_mode & 0o077} == {}
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
    assert processes(str(run_dir))
    assert not [line for line in processes("") if token in line]
    ok("jupyter", "stop")
    assert processes(str(run_dir)) == []
    assert [path for path in run_dir.rglob("*") if path.is_file() and token.encode() in path.read_bytes()] == []
    assert not (run_dir / "connection.json").exists()
    assert not (folder / "x").exists()
    assert ok("jupyter", "list").out == "no sessions (hpcjobs jupyter starts one)\n"


def site_with_image(here: Path, **jupyter: object) -> str:
    """A local site whose image ``torch`` has the Python of the tests; its path."""
    runtime = here / "apptainer"  # in its place: what follows the image runs on this machine
    runtime.write_text(
        f'#!/bin/sh\necho "$@" >>{here}/entered\n'
        'while [ "${1%.sif}" = "$1" ]; do shift; done\nshift\nIMAGE=torch exec "$@"\n'
    )
    runtime.chmod(0o755)
    containers = {"runtime": "apptainer", "program": str(runtime), "python": sys.executable}
    images = {"images": {"torch": str(write_image(here / "torch.sif"))}}
    fields = {"scheduler": "local", "jupyter": jupyter, "containers": containers | images}
    (here / "here.yaml").write_text(json.dumps(fields))
    return "./here.yaml"


def test_the_server_runs_in_the_image_that_is_named(here: Path, code_server: None) -> None:
    site = site_with_image(here)
    details = ok("jupyter", "--site", site, "--container", "torch", "--code", "--detach", "--json").json
    assert status(details["url"]) == 200
    entered = (here / "entered").read_text()
    assert f"{sys.executable} -u {details['run_dir']}/session.pyz serve" in entered
    assert f"--bind {here}" in entered


def test_kernels_are_the_sites_environments_and_images_that_have_ipykernel(
    here: Path, sessions_end: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "bin").mkdir()
    (here / "bin" / "conda").write_text(f'#!/bin/sh\n[ "$4" = torch2 ] && shift 5 && exec {sys.executable} "$@"\n')
    (here / "bin" / "conda").chmod(0o755)
    monkeypatch.setenv("PATH", f"{here}/bin:{os.environ['PATH']}")
    kernels = {"mine": sys.executable, "bare": "/usr/bin/python3", "torch 2": "conda:torch2", "gone": "conda:gone"}
    site = site_with_image(here, kernels=kernels)
    details = ok("jupyter", "--site", site, "--notebook", "--idle", "6s", "--detach", "--json").json
    headers = {"Authorization": f"token {details['connection']['token']}"}
    url = f"http://127.0.0.1:{details['connection']['port']}/api/"
    with urllib.request.urlopen(urllib.request.Request(f"{url}kernelspecs", headers=headers)) as answer:
        specs = json.load(answer)["kernelspecs"]
    names = {spec["spec"]["display_name"]: name for name, spec in specs.items()}
    assert names.keys() >= {"mine", "torch (image)", "torch 2"}
    assert not names.keys() & {"bare", "gone"}
    assert "no kernel bare: /usr/bin/python3 has no ipykernel" in ok("logs", details["job_id"]).out
    expected = json.dumps({"name": names["torch (image)"]}).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{url}kernels", expected, headers)) as answer:
        kernel = json.load(answer)["id"]
    unix = Path("/proc/net/unix")
    eventually(lambda: re.search(rf"/hpcjobs-\w+/kernel-{kernel}-ipc-1$", unix.read_text(), re.MULTILINE))
    assert within("wait", details["job_id"], "--timeout", "120").code == 0
    assert "the session ends" in ok("logs", details["job_id"]).out, "a kernel that does nothing is no activity"
    assert not re.search(rf"kernel-{kernel}", unix.read_text())


def start_together(count: int, *arguments: str) -> list[dict[str, Any]]:
    """Sessions that were all submitted before the first was waited for, as ``open --json`` tells of them."""
    entries = [ok(*arguments, "--no-wait", "--json", "-t", "20m").json for _ in range(count)]
    return [ok("jupyter", "open", "--json", entry["job_id"]).json for entry in entries]


def test_ten_sessions_at_once_have_a_port_each(code_server: None) -> None:
    sessions = start_together(10, *CODE)
    assert len({details["connection"]["port"] for details in sessions}) == 10
    assert len(ok("jupyter", "list", "--json").json) == 10


@pytest.mark.long
def test_twenty_jupyterlabs_at_once_have_a_port_each(code_server: None) -> None:
    sessions = start_together(20, "jupyter", "--site", "local")
    assert len({details["connection"]["port"] for details in sessions}) == 20
    for details in sessions:
        url = f"http://127.0.0.1:{details['connection']['port']}/api/contents"
        codes = [status(url, other["connection"]["token"]) for other in sessions]
        assert codes == [200 if other is details else 403 for other in sessions], "each answers to its own token alone"


def test_a_session_ends_when_nobody_does_anything_and_not_before(code_server: None) -> None:
    details = ok(*CODE, "--idle", "10s", "--detach", "--json").json
    until = time.monotonic() + 12
    while time.monotonic() < until:
        assert status(details["url"]) == 200
        time.sleep(0.2)
    assert len(ok("jupyter", "list", "--json").json) == 1
    assert within("wait", details["job_id"], "--timeout", "240").code == 0
    assert "the session ends" in ok("logs", details["job_id"]).out


@pytest.mark.parametrize(("answer", "left"), [("k", 1), ("", 1), ("c", 0)])
def test_ctrl_c_asks_whether_to_keep_the_session(code_server: None, answer: str, left: int) -> None:
    terminal, inside = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "hpcjobs", *CODE],
        stdin=inside,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(inside)
    assert process.stdout is not None
    assert any("open: " in line for line in process.stdout)
    process.send_signal(signal.SIGINT)
    os.write(terminal, f"{answer}\n".encode())
    out, err = process.communicate(timeout=240)
    os.close(terminal)
    assert process.returncode == 130, (out, err)
    assert ("is cancelled" in err) == (left == 0)
    assert len(ok("jupyter", "list", "--json").json) == left


def test_ctrl_c_cancels_where_nobody_can_be_asked(code_server: None) -> None:
    process = start(*CODE, "-o", "dependency=")
    assert process.stderr is not None
    eventually(lambda: within("jupyter", "list", "--json").json)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 130, err
    assert ok("jupyter", "list", "--json").json == []


def test_the_page_is_told_to_save_ahead_of_the_time_limit(code_server: None) -> None:
    # The note comes once the server answers, which takes seconds on a busy machine.
    details = ok(*CODE, "-t", "25s", "--detach", "--json").json
    notice = Path(details["run_dir"]) / "session" / "notice.json"
    eventually(notice.exists)
    notice_values: dict[str, Any] = json.loads(notice.read_text())
    assert "Time limit at" in notice_values["text"]
    assert within("wait", details["job_id"], "--timeout", "240").code != 0
    assert not (Path(details["run_dir"]) / "connection.json").exists()


def test_a_server_that_dies_is_told_with_the_last_lines_of_its_log(code_server: None, tmp_path: Path) -> None:
    program = tmp_path / "bin" / "code-server"
    program.write_text("#!/bin/sh\necho 'the licence has run out'\nexit 7\n")
    answer = within(*CODE, "--detach")
    assert answer.code == 3
    assert "the licence has run out" in answer.err
    assert "exit code 7" in answer.err


def test_what_a_node_lacks_is_said_within_seconds(here: Path, sessions_end: None) -> None:
    (here / "bare.yaml").write_text("scheduler: local\njupyter: {python: python3}\n")
    bare = start("jupyter", "--site", "bare.yaml", "--detach", env={"PATH": "/usr/bin:/bin"})
    _, err = bare.communicate(timeout=200)  # far less than a session may take to start
    assert bare.returncode == 3, err
    assert "has no jupyterlab" in err
    assert "pip install" in err


def test_a_password_of_ones_own_configuration_works_and_what_a_session_needs_stands_above_it(
    here: Path, sessions_end: None
) -> None:
    from jupyter_server.auth import passwd

    settings = Path.home() / ".jupyter"
    settings.mkdir()
    hashed = passwd("my own password", algorithm="sha1")
    (settings / "jupyter_server_config.json").write_text(
        json.dumps({"PasswordIdentityProvider": {"hashed_password": hashed}})
    )
    (settings / "jupyter_lab_config.py").write_text("c.ServerApp.port = 1\nc.ServerApp.base_url = '/elsewhere'\n")
    details = ok("jupyter", "--site", "local", "--detach", "--json").json
    url = f"http://127.0.0.1:{details['connection']['port']}"
    assert status(f"{url}/api/contents", details["connection"]["token"]) == 200
    cookies = http.cookiejar.CookieJar()
    browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(cookies))
    with browser.open(f"{url}/login") as page:
        form = page.read().decode()
    sessions = re.search(r'name="_xsrf" value="([^"]+)"', form)
    assert sessions is not None
    fields = urllib.parse.urlencode({"_xsrf": sessions.group(1), "password": "my own password"}).encode()
    browser.open(f"{url}/login", fields).close()
    with browser.open(f"{url}/api/contents") as answer:
        assert answer.status == 200


def test_a_token_that_was_given_is_in_no_file_after_the_end(here: Path, code_server: None) -> None:
    token = "0123456789abcdef-secret"
    file = here.parent / "token"
    file.write_text(token)
    file.chmod(0o600)
    details = ok(*CODE, "--detach", "--json", "--token-file", str(file)).json
    assert details["connection"]["token"] == token
    assert ok("jupyter", "stop", details["job_id"]).out == f"stopped {details['job_id']}\n"
    holding = [p for p in Path(details["run_dir"]).rglob("*") if p.is_file() and token.encode() in p.read_bytes()]
    assert holding == []
    assert ok("jupyter", "stop", details["job_id"]).out == f"had ended already: {details['job_id']}\n"


def test_long_names_of_folders_leave_room_for_the_sockets_of_kernels(
    here: Path, sessions_end: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel's socket has 67 bytes more than the folder for temporary files, of 107 that a path may have."""
    folder = Path("/tmp", "x" * 40)
    folder.mkdir(exist_ok=True)
    monkeypatch.setenv("TMPDIR", str(folder))
    try:
        details = ok("jupyter", "--site", "local", "--detach", "--json").json
        assert details["connection"]["socket"].startswith("/tmp/hpcjobs-")
        headers = {"Authorization": f"token {details['connection']['token']}"}
        url = f"http://127.0.0.1:{details['connection']['port']}/api/kernels"
        with urllib.request.urlopen(urllib.request.Request(url, b"", headers)) as answer:
            kernel = json.load(answer)["id"]
        eventually(lambda: f"/kernel-{kernel}-ipc-1\n" in Path("/proc/net/unix").read_text())
        ok("jupyter", "stop")
    finally:
        folder.rmdir()


def test_a_session_of_an_earlier_version_is_listed_and_stopped(code_server: None) -> None:
    details = ok(*CODE, "--detach", "--json").json
    for name, changes in {"session.json": {"bind": "address", "tls": False}, "connection.json": {"schema": 1}}.items():
        file = Path(details["run_dir"], name)
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    (listed,) = ok("jupyter", "list", "--json").json
    assert (listed["job_id"], listed["state"]) == (details["job_id"], "RUNNING")
    assert ok("jupyter", "stop", "--all").out == f"stopped {details['job_id']}\n"
    assert ok("jupyter", "list", "--json").json == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has a second user to try it as")
def test_another_user_of_the_machine_gets_neither_the_port_nor_the_token(
    here: Path, code_server: None, tmp_path: Path
) -> None:
    """In a network of few ports, where that user listens at each port that somebody else holds."""
    program = tmp_path / "bin" / "code-server"
    mark = here / "begun"
    begun = f"import os\nopen({str(mark)!r}, 'w')\nwhile os.path.exists({str(mark)!r}): time.sleep(0.05)\n"
    program.write_text(program.read_text().replace("heard = ", f"{begun}heard = ", 1))
    inside = 'ip link set lo up; echo 40000 40031 >/proc/sys/net/ipv4/ip_local_port_range; exec "$@"'
    arguments = [sys.executable, "-m", "hpcjobs", *CODE, "--json"]
    session = subprocess.Popen(
        ["unshare", "--net", "sh", "-ec", inside, "sh", *arguments],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    enter = ["nsenter", f"--target={session.pid}", "--net", "--"]
    eventually(lambda: session.poll() is not None or mark.exists(), what="the start of the server")
    assert session.poll() is None, session.communicate()
    stranger = subprocess.Popen(
        [*enter, sys.executable, "-c", STRANGER],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert stranger.stdout is not None
    assert stranger.stdout.readline() == "tried\n"
    mark.unlink()
    assert session.stdout is not None
    eventually(lambda: any(one.get("node") for one in ok("jupyter", "list", "--json").json), what="an answer")
    details = ok("jupyter", "open", "--json").json
    curl = [*enter, "curl", "--silent", "--max-time", "20", "--header", "Authorization: token of-its-user"]
    answer = subprocess.run([*curl, details["url"]], capture_output=True, text=True)
    assert '"alive"' in answer.stdout
    assert stranger.communicate(timeout=60)[0] == "", "what came to the stranger"
    session.send_signal(signal.SIGINT)
    session.communicate(timeout=240)
