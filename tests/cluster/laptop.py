"""A laptop: a network of its own from which only the login node can be reached, and that by ssh alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from waiting import eventually

from hpcjobs.sandbox.folder import folder_at, recorded_daemons
from hpcjobs.sandbox.layout import Host
from hpcjobs.sandbox.network import enter

LOGIN = "login.example"
_LOGIN_ADDRESS, _LAPTOP_ADDRESS, _PORT = "10.79.0.1", "10.79.0.2", 2222
_LINK = "hpcjobs-laptop"
ARTEFACTS = Path(__file__).parents[2] / "test-artefacts"
"""Pictures of what the browser saw, kept from the last run of the tests."""
_BROWSER = Path(__file__).parent / "jupyter" / "browser.py"


@dataclass(frozen=True)
class Laptop:
    """What its user types is run in its network, with an ssh that has the user's key and knows the login host."""

    folder: Path

    @property
    def _inside(self) -> list[str]:
        return ["nsenter", f"--net={self.folder / 'net'}", "--"]

    @property
    def _env(self) -> dict[str, str]:
        remaining = {
            name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "HPCJOBS_", "XDG_"))
        }
        return remaining | {"HOME": str(self.folder / "home"), "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}"}

    def start(self, command: str, **options: Any) -> subprocess.Popen[str]:
        """``command``, a line of shell, begun."""
        arguments = [*self._inside, "bash", "-c", f"exec {command}"]
        return subprocess.Popen(arguments, env=self._env, text=True, stdin=subprocess.DEVNULL, **options)

    def status(self, url: str, *, into: str = "/dev/null") -> str:
        """The HTTP status that ``url`` gives, what it holds goes ``into`` a file; 000: nobody answers."""
        arguments = [*self._inside, "curl", "--silent", "--output", into, "--write-out", "%{http_code}", url]
        return subprocess.run(arguments, env=self._env, capture_output=True, text=True).stdout

    def post(self, url: str) -> str:
        """What the server answers to an empty POST."""
        arguments = [*self._inside, "curl", "--silent", "--show-error", "--fail", "--request", "POST", url]
        return subprocess.run(arguments, env=self._env, capture_output=True, text=True, check=True).stdout

    @contextmanager
    def tunnel(self, command: str) -> Iterator[subprocess.Popen[str]]:
        """The printed ``command`` while it is used."""
        port = command.split(" -L ")[1].split(":")[0]
        process = self.start(command)
        try:
            eventually(
                lambda: process.poll() is not None or self.status(f"http://localhost:{port}/api") != "000",
                what="an answer through the tunnel",
            )
            assert process.poll() is None, "the tunnel has ended"
            yield process
        finally:
            process.terminate()
            process.wait(20)

    def browse(self, url: str, *, once_typed: Callable[[], object] = lambda: None, **wishes: object) -> dict[str, Any]:
        """What a headless Chromium sees there; the address goes in by a pipe, for it holds a token.

        ``once_typed`` is called when the browser has typed what it was asked to ``append``.
        """
        arguments = [*self._inside, sys.executable, str(_BROWSER)]
        wished = {"url": url, "failure": str(ARTEFACTS / "failure.png"), **wishes}
        process = subprocess.Popen(
            arguments, env=self._env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stdin is not None
        assert process.stderr is not None
        with process:
            process.stdin.write(json.dumps(wished))
            process.stdin.close()
            process.stdin = None
            line = process.stderr.readline()
            if line == "typed\n":
                once_typed()
            out, err = process.communicate(timeout=240)
        assert process.returncode == 0, line + err
        document: dict[str, Any] = json.loads(out)
        return document


@contextmanager
def laptop(folder: Path, *, login_environment: Mapping[str, str] | None = None) -> Iterator[Laptop]:
    """A laptop beside the sandbox, and an sshd on the sandbox's login node; both are gone afterwards.

    ``login_environment`` is what the login node gives to who logs in.
    """
    _write_keys(folder)
    net = folder / "net"
    net.touch()
    subprocess.run(["unshare", f"--net={net}", "true"], check=True)
    try:
        link = ["ip", "link", "add", _LINK, "type", "veth", "peer", "name", "eth0", "netns", str(net)]
        subprocess.run(link, check=True)
        subprocess.run(["ip", "address", "add", f"{_LOGIN_ADDRESS}/24", "dev", _LINK], check=True)
        subprocess.run(["ip", "link", "set", _LINK, "up"], check=True)
        inside = f"link set lo up\naddress add {_LAPTOP_ADDRESS}/24 dev eth0\nlink set eth0 up\n"
        subprocess.run(["nsenter", f"--net={net}", "ip", "-batch", "-"], input=inside, text=True, check=True)
        with _sshd(folder, "login", _LOGIN_ADDRESS, enter(folder_at(None)), login_environment or {}):
            yield Laptop(folder)
    finally:
        subprocess.run(["ip", "link", "delete", _LINK], check=False)
        subprocess.run(["umount", str(net)], check=True)


@contextmanager
def sshd_on(folder: Path, host: Host, *, environment: Mapping[str, str] | None = None) -> Iterator[None]:
    """An sshd on a node that lets its users in; it sees the node's own /tmp."""
    with _sshd(folder, host.name, host.address, on_node(host.name), environment or {}):
        yield


def on_node(name: str) -> list[str]:
    """The words in front of a command that runs on a node, where it sees the node's own /tmp."""
    (daemon,) = [d for d in recorded_daemons(folder_at(None)) if d.name == f"slurmd-{name}"]
    return ["nsenter", f"--target={daemon.pid}", "--mount", "--net", "--uts", "--"]


@contextmanager
def _sshd(folder: Path, name: str, address: str, inside: list[str], environment: Mapping[str, str]) -> Iterator[None]:
    config = folder / f"sshd_{name}"
    config.write_text(
        f"Port {_PORT}\nListenAddress {address}\nHostKey {folder / 'host_key'}\nPidFile none\nUsePAM no\n"
        f"AuthorizedKeysFile {folder / 'user_key.pub'}\n"
        "PasswordAuthentication no\nPermitRootLogin yes\nStrictModes no\n"
        + ("SetEnv " + " ".join(f"{key}={value}" for key, value in environment.items()) + "\n" if environment else "")
    )
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    with (folder / f"sshd_{name}.log").open("w") as log:
        process = subprocess.Popen([*inside, "/usr/sbin/sshd", "-D", "-e", "-f", str(config)], stderr=log)
    try:
        eventually(lambda: "listening" in (folder / f"sshd_{name}.log").read_text(), what=f"sshd on {name}")
        yield
    finally:
        process.terminate()
        process.wait(20)


def _write_keys(folder: Path) -> None:
    for name in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    (folder / "ssh_config").write_text(
        f"Host {LOGIN}\n  HostName {_LOGIN_ADDRESS}\n"
        f"Host *\n  Port {_PORT}\n  IdentityFile {folder / 'user_key'}\n  IdentitiesOnly yes\n  BatchMode yes\n"
        f"  StrictHostKeyChecking no\n  UserKnownHostsFile {folder / 'known_hosts'}\n  LogLevel ERROR\n"
    )
    (folder / "home").mkdir()
    (folder / "bin").mkdir()
    ssh = folder / "bin" / "ssh"
    ssh.write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {folder / "ssh_config"} "$@"\n')
    ssh.chmod(0o755)
