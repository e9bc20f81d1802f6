"""The end of a job is reported: by a webhook, by a command, by Slurm's mail; with and without attempts."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from commandline import hpcjobs, ok, within

import hpcjobs as package


class Receiver(ThreadingHTTPServer):
    """A real HTTP server of this machine, which keeps what is posted to it."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.posts: list[tuple[str, dict[str, Any]]] = []
        self.answer = 200

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/hooks/s3cret"


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        assert self.headers["Content-Type"] == "application/json"
        self.server.posts.append((self.path, json.loads(body)))
        self.send_response(self.server.answer)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Tests print nothing."""


@pytest.fixture
def receiver(here: Path) -> Iterator[Receiver]:
    """The server, whose address a private file holds."""
    with Receiver() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        (here / "hook").write_text(server.address + "\n")
        (here / "hook").chmod(0o600)
        yield server
        server.shutdown()


@pytest.mark.parametrize("retries", [(), ("--retries", "on")])
def test_a_webhook_and_a_command_hear_of_the_end(here: Path, receiver: Receiver, retries: tuple[str, ...]) -> None:
    arguments = ("--notify", "webhook:hook", "--notify", 'command:cat >told; echo "$HPCJOBS_EVENT" >>events', *retries)
    assert hpcjobs("submit", "--site", "local", "-J", "good", "--wait", *arguments, "true").code == 0
    assert hpcjobs("submit", "--site", "local", "-J", "bad", "--wait", *arguments, "false").code == 1
    events = [(path, post["event"], post["state"], post["exit_code"], post["name"]) for path, post in receiver.posts]
    assert events == [("/hooks/s3cret", "end", "COMPLETED", 0, "good"), ("/hooks/s3cret", "fail", "FAILED", 1, "bad")]
    last = receiver.posts[-1][1]
    assert last["text"] == f"job {last['job_id']} (bad) on local: FAILED, exit code 1"
    assert Path(last["run_dir"]).is_dir()
    assert ((here / "events").read_text(), json.loads((here / "told").read_text())) == ("end\nfail\n", last)


def test_a_requeue_is_reported_and_then_the_end(here: Path, receiver: Receiver) -> None:
    (here / "once.sh").write_text("#!/bin/bash\n[ -e again ] && exit 0\ntouch again\nexit 3\n")
    (here / "once.sh").chmod(0o755)
    arguments = ("--retries", "error=1", "--notify", "webhook:hook")
    assert hpcjobs("submit", "--site", "local", "--wait", *arguments, "./once.sh").code == 0
    assert [post["event"] for _, post in receiver.posts] == ["requeue", "end"]


def test_only_the_events_that_were_named_are_reported(here: Path, receiver: Receiver) -> None:
    arguments = ("--notify", "webhook:hook", "--notify-on", "fail")
    assert hpcjobs("submit", "--site", "local", "--wait", *arguments, "true").code == 0
    assert hpcjobs("submit", "--site", "local", "--wait", *arguments, "false").code == 1
    assert [post["event"] for _, post in receiver.posts] == ["fail"]


def test_the_address_is_in_no_file_and_no_output_of_the_job(here: Path, receiver: Receiver) -> None:
    receiver.answer = 500
    done = hpcjobs(
        "submit", "--site", "local", "--wait", "--notify", "webhook:hook", "--notify", "webhook:$HOOK", "true",
        env={"HOOK": receiver.address},
    )  # fmt: skip
    assert (done.code, len(receiver.posts)) == (0, 2)
    texts = [path.read_text(errors="replace") for path in (here / "runs").rglob("*") if path.is_file()]
    assert not [text for text in texts if "s3cret" in text]
    assert "s3cret" not in done.out + done.err
    log = ok("logs").out
    assert f"notify: webhook of file:{here}/hook:" in log
    assert "notify: webhook of env:HOOK:" in log
    assert "500" in log


def test_without_curl_python_posts(here: Path, receiver: Receiver) -> None:
    (here / "bin").mkdir()
    for folder in ("/bin", "/usr/bin"):
        for path in Path(folder).iterdir():
            link = here / "bin" / path.name
            if path.name != "curl" and not link.is_symlink():
                link.symlink_to(path)
    env = {"PATH": str(here / "bin")}
    assert hpcjobs("submit", "--site", "local", "--wait", "--notify", "webhook:hook", "true", env=env).code == 0
    assert [post["event"] for _, post in receiver.posts] == ["end"]


def test_a_cancelled_job_is_reported(here: Path, receiver: Receiver) -> None:
    handle = package.submit(package.plan(["sleep", "600"], "local", notify=["webhook:hook"]))
    handle.cancel()
    handle.wait()
    assert [post["state"] for _, post in receiver.posts] in (["CANCELLED"], [])  # none, where it had not begun


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--notify pigeon", "hint: write mail, mail:ADDRESS, command:TEXT or webhook:FILE"),
        ("--notify command:", "lacks what follows the colon"),
        ("--notify webhook:https://x.org/s3cret", "the address itself is on the command line"),
        ("--notify webhook:none", "{here}/none: No such file or directory"),
        ("--notify webhook:open", "{here}/open can be read by others\nhint: chmod 600"),
        ("--notify webhook:plain", "holds no https:// address in its first line"),
        ("--notify webhook:$NONE", "NONE is not set here"),
        ("--notify mail", "site local has no Slurm that sends it"),
        ("--notify-on end", "nothing says how to report it"),
        ("--notify webhook:hook --notify-on ned", "--notify-on ned: no event\nhint: did you mean 'end'?"),
    ],
)
def test_a_report_that_cannot_be_made_is_refused_before_anything_is_queued(
    here: Path, receiver: Receiver, arguments: str, message: str
) -> None:
    for name, text, mode in (("open", receiver.address, 0o644), ("plain", "http://example.org/s3cret", 0o600)):
        (here / name).write_text(text)
        (here / name).chmod(mode)
    answer = within("submit", "--site", "local", *arguments.split(), "true")
    assert (answer.code, message.format(here=os.getcwd()) in answer.err) == (5, True), answer
    assert "s3cret" not in answer.err


def test_mail_is_sent_by_slurm_where_the_user_says_nothing_else(here: Path) -> None:
    (here / "c.yaml").write_text("{partitions: {batch: {nodes: 2, node: {cpus: 4, mem: 8G}}}}")

    def sent(*arguments: str) -> list[str]:
        script = ok("submit", "--site", "./c.yaml", "--dry-run", *arguments, "true").out
        return [
            line.removeprefix("#SBATCH --mail-") for line in script.splitlines() if "--mail" in line and "#S" in line
        ]

    assert sent("--notify", "mail") == ["type=END,FAIL,REQUEUE"]
    assert sent("--notify", "mail:me@x.org", "--notify-on", "fail") == ["type=FAIL", "user=me@x.org"]
    assert sent("--notify", "mail", "--mail-type", "BEGIN") == ["type=BEGIN"]
