"""The pieces of a sandbox that need no Slurm: its folder, /etc/hosts, daemons, and what a machine lacks."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from commandline import within

from hpcjobs import sandbox
from hpcjobs.errors import HpcJobsError, RequestError
from hpcjobs.sandbox import services
from hpcjobs.sandbox.folder import Daemon, Folder, alive, check_usable, folder_at, lock, recorded_daemons, spawn, until
from hpcjobs.sandbox.layout import Shape
from hpcjobs.sandbox.network import add_block, has_block, remove_block
from hpcjobs.sandbox.sandbox import processes, take_down


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    """A folder with room for daemons; what was started in it is ended."""
    made = Folder(tmp_path / "root")
    for path in (made.root, made.log, made.daemons, made.namespaces):
        path.mkdir()
    yield made
    for daemon in recorded_daemons(made):
        if alive(daemon):
            os.kill(daemon.pid, 9)
        if Path(f"/proc/{daemon.pid}").exists():
            os.waitpid(daemon.pid, 0)


def start(folder: Folder, name: str, *code: str) -> Daemon:
    return spawn(folder, name, [sys.executable, "-c", "\n".join(code)])


@pytest.mark.parametrize("before", [b"127.0.0.1 localhost\n", b"127.0.0.1 localhost", b"", b"# caf\xe9\r\n\n\n"])
def test_etc_hosts_is_the_same_to_the_byte_after_the_block_is_taken_out(tmp_path: Path, before: bytes) -> None:
    """Whatever it held: no newline at the end, other encodings, other line ends."""
    folder, path = Folder(Path("/var/lib/x")), tmp_path / "hosts"
    path.write_bytes(before)
    path.chmod(0o644)
    add_block(folder, {"tu01": "10.78.0.11"}, path=path)
    add_block(folder, {"tu01": "10.78.0.11"}, path=path)
    assert path.read_bytes().count(b"10.78.0.11 tu01\n::ffff:10.78.0.11 tu01\n") == 1
    assert has_block(folder, path=path)
    remove_block(folder, path=path)
    remove_block(folder, path=path)
    assert path.read_bytes() == before
    assert path.stat().st_mode & 0o777 == 0o644


def test_the_block_of_another_folder_is_left_alone(tmp_path: Path) -> None:
    """Each sandbox's lines are marked with its folder."""
    path = tmp_path / "hosts"
    add_block(Folder(Path("/var/lib/x")), {"tu01": "10.78.0.11"}, path=path)
    before = path.read_bytes()
    remove_block(Folder(Path("/var/lib/y")), path=path)
    assert path.read_bytes() == before


def test_a_folder_with_someone_elses_files_is_refused(tmp_path: Path) -> None:
    """``down`` removes the folder: it must be one that ``up`` made."""
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.tex").touch()
    with pytest.raises(RequestError, match="no sandbox put there"), lock(Folder(mine)):
        pass
    assert [path.name for path in mine.iterdir()] == ["thesis.tex"]


def test_the_lock_makes_a_second_command_wait_and_survives_removal(tmp_path: Path) -> None:
    """Who waited for a folder that is gone gets the new one."""
    folder, order = Folder(tmp_path / "root"), []

    def second() -> None:
        with lock(folder):
            order.append("second")
            assert folder.is_ours()

    thread = threading.Thread(target=second)
    with lock(folder):
        thread.start()
        thread.join(0.1)
        order.append("first")
        folder.remove()
    thread.join(10)
    assert order == ["first", "second"]


@pytest.mark.parametrize("root", ["/tmp/x", "/dev/shm/x", "/var/lib/a b", "/var/lib/" + "x" * 60])
def test_a_folder_that_slurm_or_a_host_could_not_use_is_refused(root: str) -> None:
    """A host has /tmp for itself; a socket's path is short; slurm.conf knows no quotes."""
    with pytest.raises(RequestError, match=r"folder has at most|for itself"):
        check_usable(folder_at(Path(root)))


def test_a_daemon_is_recorded_with_its_start_time_and_known_again(folder: Folder) -> None:
    """A later process of the same pid is not the daemon."""
    daemon = start(folder, "napper", "import time", "time.sleep(60)")
    assert recorded_daemons(folder) == [daemon]
    assert alive(daemon)
    assert not alive(msgspec.structs.replace(daemon, start_ticks=daemon.start_ticks - 1))
    assert os.getsid(daemon.pid) == daemon.pid


def test_a_daemon_that_ends_too_early_is_reported_with_the_end_of_its_log(folder: Folder) -> None:
    """The reader sees why, without looking for a file."""
    daemon = start(folder, "moaner", "print('no such key: Fruit')", "raise SystemExit(1)")
    with pytest.raises(HpcJobsError, match=r"moaner ended while waiting for fruit\n  moaner: no such key: Fruit"):
        until(lambda: False, what="fruit", watch=[daemon])


def test_waiting_ends_at_the_deadline(folder: Folder) -> None:
    """And names what was awaited."""
    daemon = start(folder, "napper", "import time", "time.sleep(60)")
    with pytest.raises(HpcJobsError, match="no fruit within 0 s"):
        until(lambda: False, what="fruit", watch=[daemon], timeout_s=0.1)


def test_taking_down_ends_daemons_that_ignore_sigterm_and_their_children(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TERM first, KILL after a while; a child in a session of its own is found by descent."""
    monkeypatch.setattr("hpcjobs.sandbox.sandbox._TERM_S", 0.3)
    code = ("import os, signal, time", "signal.signal(15, signal.SIG_IGN)", "child = os.fork()")
    stubborn = start(folder, "stubborn", *code, "child or os.setsid()", "print('on', flush=True)", "time.sleep(60)")
    until(lambda: Path(stubborn.log).read_text().count("on") == 2, what="both processes")
    assert len(processes(folder)) == 2
    take_down(folder)
    assert processes(folder) == {}
    assert not alive(stubborn)


def test_taking_down_spares_a_process_that_got_a_daemons_pid(folder: Folder) -> None:
    """As after a reboot, when the files are old and the pids are someone else's."""
    other = start(folder, "other", "import time", "time.sleep(60)")
    stale = msgspec.structs.replace(other, start_ticks=other.start_ticks - 100)
    (folder.daemons / "other.json").write_bytes(msgspec.json.encode(stale))
    take_down(folder)
    assert alive(other)
    os.kill(other.pid, 9)
    os.waitpid(other.pid, 0)


def test_a_record_that_cannot_be_read_does_not_stop_taking_down(folder: Folder) -> None:
    """Its daemon is found by namespace."""
    (folder.daemons / "half.json").write_text('{"name": "ha')
    take_down(folder)
    assert recorded_daemons(folder) == []


def test_missing_packages_are_named_with_the_apt_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line can be pasted."""
    monkeypatch.setattr(services, "PACKAGES", ("bash", "slurm-of-tomorrow", "munge-of-tomorrow"))
    monkeypatch.setattr(services, "is_debian", lambda: True)
    with pytest.raises(RequestError) as caught:
        sandbox.up(sandbox.Shape())
    line = "apt-get install -y --no-install-recommends slurm-of-tomorrow munge-of-tomorrow"
    assert caught.value.hint is not None
    assert caught.value.hint.startswith(line)


def test_who_is_not_root_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up and down; status needs no root."""
    monkeypatch.setattr(services, "missing_packages", list)
    monkeypatch.setattr(services, "is_debian", lambda: True)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(RequestError, match="sudo hpcjobs sandbox up"):
        sandbox.up(sandbox.Shape())
    with pytest.raises(RequestError, match="sudo hpcjobs sandbox down"):
        sandbox.down()


def test_another_distribution_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages come by apt."""
    monkeypatch.setattr(services, "is_debian", lambda: False)
    with pytest.raises(RequestError, match="Debian or Ubuntu"):
        sandbox.up(sandbox.Shape())


def test_no_sandbox_has_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """``eval "$(hpcjobs sandbox env)"`` must not point somewhere at random."""
    monkeypatch.setenv("HPCJOBS_SANDBOX_ROOT", "/var/lib/hpcjobs-none")
    assert sandbox.status().state == "down"
    with pytest.raises(RequestError, match="no sandbox is up"):
        sandbox.environment()


@pytest.mark.parametrize("like", ["./mine.yaml", "cluster/slurm.conf", "mine.yaml"])
def test_a_relative_path_of_like_is_recorded_in_full(here: Path, monkeypatch: pytest.MonkeyPatch, like: str) -> None:
    """Other commands of the sandbox, in other folders, read the file again."""
    shapes: list[Shape] = []

    def up(shape: Shape, **_: object) -> None:
        shapes.append(shape)
        raise RequestError("enough")

    monkeypatch.setattr(sandbox, "up", up)
    assert "enough" in within("sandbox", "up", "--like", like).err
    assert [shape.like for shape in shapes] == [str(here / like)]


def test_a_folder_that_another_user_made_for_a_sandbox_is_not_taken_down(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its records could name any process and folder of the machine."""
    marker = folder.root / ".hpcjobs-sandbox"
    marker.touch()
    daemon = start(folder, "theirs", "import time; time.sleep(600)")
    if os.geteuid() == 0:
        os.chown(marker, 1, 1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 4242)
    answer = within("sandbox", "down", "--root", str(folder.root))
    assert answer.code == 5, answer
    assert "holds files that no sandbox put there" in answer.err or "only root" in answer.err
    assert alive(daemon)
    assert marker.exists()


def test_only_root_adds_users(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    recorded = sandbox.Sandbox(root=str(folder.root), site="s", slurm_conf="/x", shape=Shape(), hosts=(), partitions={})
    monkeypatch.setattr("hpcjobs.sandbox.sandbox._recorded_sandbox", lambda _: recorded)
    answer = within("sandbox", "add-user", "daemon", "--root", str(folder.root))
    assert (answer.code, "only root can let users submit to a sandbox" in answer.err) == (5, True), answer
