"""What another user puts into a folder where everybody may write: it stops no verb, and nothing is built on it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from commandline import Answer, hpcjobs, ok, within
from scripted_slurm import answer

ANOTHER = 65534
LOCAL = ("--site", "local", "--launcher", "spawn")

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")


@pytest.fixture
def shared(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, one as /tmp."""
    folder = here / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.chdir(folder)
    return folder


def plant(path: Path, make: Callable[[Path], object], mode: int = 0o777) -> None:
    """As another user."""
    make(path)
    os.chown(path, ANOTHER, ANOTHER, follow_symlinks=False)
    if not path.is_symlink():
        path.chmod(mode)


def refused(answer: Answer, folder: Path) -> None:
    assert answer.code in (3, 5), answer
    assert f"{folder}: it belongs to another user, who could replace what runs as you" in answer.err, answer


def test_no_run_folder_is_made_in_a_folder_that_another_user_made_there_beforehand(shared: Path) -> None:
    plant(shared / "runs", Path.mkdir)
    refused(within("submit", *LOCAL, "true"), shared / "runs")
    refused(within("sweep", "run", *LOCAL, "--set", "lr=1,2", "true"), shared / "runs")
    assert os.listdir(shared / "runs") == []


def test_no_run_folder_is_made_below_a_folder_that_another_user_made_there_beforehand(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As /scratch/$USER, taken before the user came: its owner renames what is made in it."""
    plant(shared / "you", Path.mkdir)
    (shared / "you" / "mine").mkdir()
    monkeypatch.chdir(shared / "you" / "mine")
    refused(within("submit", *LOCAL, "true"), shared / "you")
    refused(within("sweep", "run", *LOCAL, "--set", "lr=1,2", "true"), shared / "you")
    assert os.listdir(shared / "you" / "mine") == []


@pytest.mark.parametrize("there", [True, False])
def test_no_run_folder_is_made_through_a_link_that_another_user_made_there(
    shared: Path, here: Path, there: bool
) -> None:
    """A link to a folder of mine: its owner leads it elsewhere before the job starts."""
    mine = here / "mine"
    if there:
        mine.mkdir()
    plant(shared / "runs", lambda path: path.symlink_to(mine))
    refused(within("submit", *LOCAL, "true"), shared / "runs")
    refused(within("sweep", "run", *LOCAL, "--set", "lr=1,2", "true"), shared / "runs")
    assert not there or os.listdir(mine) == []


@pytest.mark.parametrize("variable", ["XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME"])
def test_no_cache_setting_or_record_is_read_below_a_folder_that_another_user_made_there_beforehand(
    shared: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """Compiled templates and read site files are kept there: who can replace them runs code."""
    plant(shared / "you", Path.mkdir)
    monkeypatch.setenv(variable, str(shared / "you"))
    refused(within("submit", *LOCAL, "true"), shared / "you")
    assert os.listdir(shared / "you") == []


def test_the_sandbox_of_another_user_plays_no_site(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(shared / "sandbox", Path.mkdir)
    record = {"site": "tu-hpc", "slurm_conf": "/evil/slurm.conf", "controller_pid": os.getpid()}
    plant(shared / "sandbox" / "sandbox.json", lambda path: path.write_text(json.dumps(record)))
    monkeypatch.setenv("HPCJOBS_SANDBOX_ROOT", str(shared / "sandbox"))
    answer = within("submit", "--site", "tu-hpc", "--dry-run", "-t", "1h", "true")
    assert "rehearsal" not in answer.out + answer.err


def test_the_folder_of_a_group_is_used_whoever_made_it(shared: Path) -> None:
    plant(shared / "runs", Path.mkdir, 0o2775)
    shared.chmod(0o2775)
    ok("submit", *LOCAL, "--wait", "true")


def test_a_sweep_is_not_made_in_a_folder_of_another_user(shared: Path) -> None:
    ok("submit", *LOCAL, "--wait", "true")
    (shared / "runs").chmod(0o1777)
    plant(shared / "runs" / "sweep-true", Path.mkdir)
    refused(within("sweep", "run", *LOCAL, "--set", "lr=1,2", "true"), shared / "runs" / "sweep-true")
    assert os.listdir(shared / "runs" / "sweep-true") == []


def test_a_link_of_another_user_to_my_project_file_runs_nothing_in_its_folder(
    shared: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its program is a relative name: there it is that of the other user."""
    (here / "hpcjobs.yaml").write_text("program: train.py\n")
    plant(shared / "evil", Path.mkdir)
    plant(shared / "evil" / "hpcjobs.yaml", lambda path: path.symlink_to(here / "hpcjobs.yaml"))
    monkeypatch.chdir(shared / "evil")
    assert "is not trusted as it is now" in within("submit", *LOCAL, "--dry-run").err


@pytest.mark.parametrize("link", ["site_configs", "site_configs/lab.yaml"])
def test_a_site_file_that_i_trust_is_not_trusted_through_a_link_of_another_user(
    shared: Path, here: Path, monkeypatch: pytest.MonkeyPatch, link: str
) -> None:
    mine = here / "site_configs" / "lab.yaml"
    mine.parent.mkdir()
    mine.write_text("extends: local\nsetup: ['. ./env.sh']\n")
    ok("sites", "trust", str(mine))
    monkeypatch.chdir(here)
    ok("submit", "--site", "lab", "--dry-run", "true")
    plant(shared / "evil", Path.mkdir)
    (shared / "evil" / link).parent.mkdir(exist_ok=True)
    plant(shared / "evil" / link, lambda path: path.symlink_to(here / link))
    monkeypatch.chdir(shared / "evil")
    assert "is not trusted as it is now" in within("submit", "--site", "lab", "true").err


@pytest.mark.parametrize("content", ["[[[", "a" * 2_000_000, "program: [}", "{1: 2}", "site: [x]"])
def test_a_project_file_of_another_user_that_cannot_be_used_stops_no_verb(shared: Path, content: str) -> None:
    plant(shared / "hpcjobs.yaml", lambda path: path.write_text(content))
    ok("ps")
    ok("submit", *LOCAL, "--wait", "true")
    assert "is not trusted as it is now" in within("submit", *LOCAL).err, "it is named where it would be used"


def test_site_files_of_another_user_that_cannot_be_used_stop_no_verb(
    shared: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "slurm").mkdir()
    for command in ("sbatch", "squeue", "sacct"):
        answer(here / "slurm", command, ":")
    answer(here / "slurm", "scontrol", "echo 'ClusterName = deep'")
    monkeypatch.setenv("PATH", f"{here}/slurm:/usr/bin:/bin")
    (shared / "site_configs").mkdir()
    plant(shared / "site_configs" / "a.yaml", lambda path: path.write_text("[[["))
    plant(shared / "site_configs" / "b.yaml", os.mkfifo)
    plant(shared / "site_configs" / "c.yaml", lambda path: path.symlink_to("c.yaml"))
    plant(shared / "site_configs" / "d.yaml", lambda path: path.symlink_to("/dev/zero"))
    listed = ok("ps")
    assert f"left out: {shared}/site_configs/a.yaml:2: not valid YAML" in listed.err
    assert f"left out: {shared}/site_configs/b.yaml: cannot be read: it is no file" in listed.err


def test_no_page_or_table_is_written_where_another_user_leads_it(shared: Path, here: Path) -> None:
    program = 'echo \'{"loss": 1}\' > "$HPCJOBS_RUN_DIR/summary.json"'
    ok("sweep", "run", *LOCAL, "--name", "s", "--wait", "--set", "lr=1,2", "--", "sh", "-c", program)
    mine = here / "mine"
    mine.mkdir()
    (mine / "index.html").write_text("mine")
    plant(shared / "s-report", lambda path: path.symlink_to(mine))
    refused(within("report", "sweep", "s"), shared / "s-report")
    (shared / "s-report").unlink()
    plant(shared / "s-report", Path.mkdir)
    refused(within("report", "sweep", "s"), shared / "s-report")
    in_memory = Path(f"/dev/shm/{here.name}-{os.getpid()}.csv")
    try:
        for kind, path in (("csv", shared / "s.csv"), ("parquet", shared / "s.parquet"), ("csv", in_memory)):
            plant(path, lambda path: path.symlink_to(mine / "index.html"))
            ok("sweep", "results", "s", f"--{kind}", str(path))
            assert not path.is_symlink()
    finally:
        in_memory.unlink(missing_ok=True)
    assert (os.listdir(mine), (mine / "index.html").read_text()) == (["index.html"], "mine")
    assert "lr" in hpcjobs("sweep", "results", "s", "--csv", "/dev/stdout").out
    assert os.path.islink("/dev/stdout")
