"""code-server itself on a worker node of a real Slurm, in a browser on the laptop."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from commandline import hpcjobs
from laptop import ARTEFACTS, Laptop
from test_session import command, files_with, processes, start
from waiting import eventually

Site = Callable[..., str]


@pytest.fixture
def code_server(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program that tools/code_server has installed, on the PATH of jobs."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~root/.cache").expanduser())
    folder = cache / "hpcjobs/code-server/node_modules/.bin"
    if not (folder / "code-server").exists():
        pytest.skip("code-server is not installed (tools/code_server)")
    assert subprocess.run([folder / "code-server", "--version"], capture_output=True).returncode == 0
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_terminal_of_code_server_is_on_the_worker_node(
    site: Site, desk: Laptop, code_server: None, workdir: Path
) -> None:
    """Two at once, as one user with one home; a wrong password is refused, and nothing is left."""
    project = workdir / "project"
    project.mkdir()
    path = site(idle="1h")
    details, beside = (start(path, "--code", "--dir", str(project)) for _ in range(2))
    ARTEFACTS.mkdir(exist_ok=True)
    for session, name in ((details, "first"), (beside, "second")):
        screenshot = ARTEFACTS / f"code-server-{name}.png"
        screenshot.unlink(missing_ok=True)
        with desk.tunnel(command(session)):
            wishes = {"command": f"hostname >{name}", "makes": name, "screenshot": str(screenshot)}
            seen = desk.browse(session["url"], password=session["connection"]["token"], **wishes)
        assert "Incorrect password" in seen["refused"]
        assert (project / name).read_text() == f"{session['node']}\n"
        token = session["connection"]["token"]
        assert not processes(token)
        assert [place for place in files_with(token, workdir) if place.stat().st_mode & 0o077] == []
    answer = hpcjobs("jupyter", "stop", "--all")
    assert answer.code == 0, answer
    for session in (details, beside):
        eventually(lambda run_dir=session["run_dir"]: not processes(run_dir), what="the end of its processes")
        assert files_with(session["connection"]["token"], Path(session["run_dir"])) == []
    assert hpcjobs("jupyter", "list", "--json").json == []
