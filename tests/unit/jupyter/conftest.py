"""Sessions of this machine; what a test starts ends with it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from commandline import within

CODE_SERVER = """#!{python}
# As code-server is started and asked: it listens where its configuration says, and tells when it last heard of anybody.
import http.server, json, socketserver, sys, time

config = dict(line.rstrip().split(": ", 1) for line in open(sys.argv[sys.argv.index("--config") + 1]))
heard = time.time()


class Handler(http.server.BaseHTTPRequestHandler):
    def address_string(self):
        return "a client"  # a client of a socket that is a file has no address

    def do_GET(self):
        global heard
        if self.path != "/healthz":
            heard = time.time()
        body = json.dumps({{"status": "alive", "lastHeartbeat": int(heard * 1000)}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


Server(json.loads(config["socket"]), Handler).serve_forever()
"""


@pytest.fixture
def sessions_end() -> Iterator[None]:
    """No session outlives its test."""
    yield
    within("jupyter", "stop", "--all")


@pytest.fixture
def code_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sessions_end: None) -> None:
    """A program in code-server's place that starts at once."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "code-server"
    program.write_text(CODE_SERVER.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("HPCJOBS_LOCAL_CPUS", "64")
