"""Careless words and hostile surroundings: one line and an exit code, never a traceback."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commandline import Answer, hpcjobs, ok, within
from slurm_rows import accounted_row, print_rows

import hpcjobs as package
from hpcjobs.run import index
from hpcjobs.run.index import Entry

SITE = "{description: two nodes, partitions: {main: {nodes: 2, node: {cpus: 4, mem: 8G}}}}\n"


@pytest.fixture
def cluster(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Slurm's commands on PATH, job 42 ended with code 3; gives the folder of the commands."""
    (here / "site_configs").mkdir()
    (here / "site_configs" / "mine.yaml").write_text(SITE)
    monkeypatch.setenv("HPCJOBS_SITE", "mine")
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # what is left to the end is written as users have it
    commands = tmp_path / "slurm"
    commands.mkdir()
    row = accounted_row(JobID=42, JobName="true", State="FAILED", ExitCode="3:0")
    for name, script in {"sbatch": "echo 42", "sacct": print_rows(row)}.items():
        stub(commands, name, script)
    for name in ("squeue", "scontrol", "scancel", "sinfo"):
        stub(commands, name, ":")
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    return commands


def stub(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def explained(answer: Answer) -> None:
    """Success, or an exit code other than 0 and a message; never a traceback, never an unforeseen error."""
    assert "Traceback" not in answer.out + answer.err, answer
    assert answer.code != 70, answer
    assert answer.code == 0 or answer.err, answer


def test_an_unforeseen_error_is_one_line_that_names_the_file_with_its_details(
    cluster: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise ZeroDivisionError("nobody thought\nof this")

    monkeypatch.setattr("hpcjobs.run.index.index_dir", broken)
    monkeypatch.delenv("HPCJOBS_DEBUG", raising=False)
    answer = within("ps")
    assert (answer.code, answer.out) == (70, "")
    (line,) = answer.err.splitlines()
    assert line.startswith("hpcjobs: unexpected ZeroDivisionError: nobody thought (details in ")
    place = Path(line.rpartition("details in ")[2].rstrip(")"))
    assert "in broken" in place.read_text()
    assert "command: ['hpcjobs', 'ps']" in place.read_text()
    assert "Traceback" in within("--debug", "ps").err


def test_details_go_to_the_temporary_folder_where_the_state_folder_cannot_be_made(
    cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise ValueError("x")

    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("hpcjobs.run.index.index_dir", broken)
    answer = within("ps")
    assert answer.code == 70
    place = Path(answer.err.strip().rpartition("details in ")[2].rstrip(")"))
    assert place.is_file()
    place.unlink()


def test_where_the_state_folder_cannot_be_made_jobs_are_submitted_and_sweeps_refused(
    cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert "name it by its run folder" in ok("submit", "true").err
    refused = within("sweep", "--set", "x=1,2", "true")
    assert (refused.code, "without it nobody could cancel or resume" in refused.err) == (5, True), refused
    assert not list(Path("runs").glob("*/sweep.json"))


SUBMIT = ("submit", "--dry-run")
VALUES = ("", " ", "0", "-1", "1e9", "９", "x" * 5000, "a\nb", "'", "\\", "\udcff", "∞", "%s{{x}}", "--help")
FLAGS = ("-p", "-N", "--mem", "-t", "-A", "--array", "--after", "--launcher", "--name", "--template", "-D", "--retries",
         "--container", "--spec", "--site", "--env", "-o")  # fmt: skip


@pytest.mark.parametrize("flag", FLAGS)
def test_a_careless_value_of_a_submission_is_explained(cluster: Path, flag: str) -> None:
    for value in VALUES:
        explained(within(*SUBMIT, flag, value, "true"))
        if flag == "-o":
            for key in ("time", "mem", "nodes", "comment", "gres", "signal", "array", "nice", "exclusive"):
                explained(within(*SUBMIT, flag, f"{key}={value}", "true"))
        if flag == "--env":
            explained(within(*SUBMIT, flag, f"A={value}", "true"))


@pytest.mark.parametrize("verb", ["show", "logs", "wait", "cancel", "sweep status", "report show",
                                  "sites show", "drill kill", "container check", "jupyter open",
                                  "scale", "nodes", "cloud render", "sweep results"])  # fmt: skip
def test_a_careless_name_for_any_verb_is_explained(cluster: Path, verb: str) -> None:
    ok("submit", "true")
    for value in (*VALUES, "42", "42_0", "1-9999999999", "L1", ".", "/", "/dev/null"):
        explained(within(*verb.split(), value))


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("-o", "time=2h", "-t", "1h"), 5, "time has been given by its own flag too"),
        (("-o", "chdir="), 5, "use --chdir"),
        (("-o", "name="), 5, "use --name"),
        (("-o", "job-name=x"), 5, "use --name"),
        (("-o", "site=x"), 5, "no sbatch option that -o can set"),
    ],
)
def test_an_option_said_twice_or_in_the_wrong_place_is_refused(
    cluster: Path, arguments: tuple[str, ...], code: int, message: str
) -> None:
    ok("submit", "true")
    answer = within(*SUBMIT, *arguments, "true")
    assert (answer.code, message in answer.err) == (code, True), answer


def test_show_of_an_empty_name_is_an_error(cluster: Path) -> None:
    ok("submit", "true")
    for verb in ("show", "logs"):
        assert (within(verb, "").code, "no job named ''" in within(verb, "").err) == (6, True)


@pytest.mark.parametrize("columns", ["abc", "-5", "0", "1", "９", ""])
def test_a_strange_width_of_the_terminal_is_no_matter(
    cluster: Path, columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ok("submit", "true")
    monkeypatch.setenv("COLUMNS", columns)
    assert ok("ps").out


def test_a_job_that_its_user_cancelled_has_no_first_failure(cluster: Path, here: Path) -> None:
    ok("submit", "true")
    (run_dir,) = (here / "runs").glob("true-*")
    failure = {"rank": 1, "host": "n1", "exit_code": 143}
    state = {"job_id": "42", "state": "CANCELLED", "exit_code": 143, "started": 2, "ended": 4, "nodes": "n1"}
    (run_dir / "state.json").write_text(json.dumps({**state, "restarts": 0, "first_failure": failure}))
    stub(cluster, "sacct", (cluster / "sacct").read_text().partition("\n")[2].replace("FAILED", "CANCELLED by 0"))
    assert "first failure" not in within("wait", "42").err
    assert "first failure" not in ok("show", "42").out


def test_a_full_disk_while_the_code_is_copied_is_explained_and_leaves_nothing(
    cluster: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: Path, target: Path, **_: object) -> None:
        raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr(shutil, "copy2", full)
    answer = within("submit", "--snapshot", "true")
    assert answer.code == 5
    assert "No space left on device" in answer.err
    assert not list((here / "runs").glob("true-*"))


VERBS = (("ps",), ("sites",), ("submit", "--dry-run", "true"), ("submit", "true"), ("show", "42"), ("wait", "42"))


def test_a_deleted_working_folder_is_explained(cluster: Path, here: Path, tmp_path: Path) -> None:
    missing = tmp_path / "gone"
    missing.mkdir()
    ok("submit", "true")
    os.chdir(missing)
    missing.rmdir()
    try:
        for arguments in (*VERBS, ("cancel", "42"), ("--help",), ("--version",)):
            answer = within(*arguments)
            explained(answer)
            if answer.code != 0 and "hpcjobs" in answer.err:
                assert "Traceback" not in answer.err
        assert "the current folder does not exist any more" in within("submit", "true").err
    finally:
        os.chdir(here)


def test_a_user_without_a_home_folder_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs under a number that no user has."""
    for name in ("HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    answered = within("ps")
    assert answered.code == 3
    assert answered.err == "hpcjobs: this user has no home folder: set HOME to a folder that is yours\n"


def test_no_folder_is_made_that_everybody_may_write_to(here: Path) -> None:
    """What lies there, such as the record of trusted files, decides what runs as the user."""
    before = os.umask(0)
    try:
        ok("submit", "--site", "local", "--wait", "true")
    finally:
        os.umask(before)
    made = [
        *Path.home().glob(".*"),
        *Path.home().glob(".*/**/hpcjobs"),
        *Path.home().glob(".*/**/hpcjobs/*"),
        here / "runs",
    ]
    assert [str(path) for path in made if path.is_dir() and path.stat().st_mode & 0o002] == []
    assert len(made) > 4


def test_a_working_folder_whose_name_is_no_utf8_is_explained(cluster: Path, here: Path, tmp_path: Path) -> None:
    odd = os.fsencode(tmp_path) + b"/caf\xe9"
    os.mkdir(odd)
    os.chdir(odd)
    try:
        for arguments in VERBS:
            explained(within("submit", "--site", str(here / "site_configs" / "mine.yaml"), "true"))
            explained(within(*arguments))
    finally:
        os.chdir(here)


@pytest.mark.parametrize(
    "locale",
    [{"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}, {"PYTHONIOENCODING": "ascii"}],
    ids=["locale", "terminal"],
)
def test_a_terminal_without_utf8_shows_every_job(cluster: Path, here: Path, locale: dict[str, str]) -> None:
    run_dir = here / "runs" / "नमस्ते-∞"
    run_dir.mkdir(parents=True)
    index.add(
        Entry(job_id="42", name="नमस्ते", site="mine", scheduler="slurm", run_dir=str(run_dir), submitted=time.time())
    )
    for arguments in (("ps",), ("show", "42"), ("submit", "--dry-run", "--name", "x", "echo", "∞é")):
        answer = hpcjobs(*arguments, env=locale)
        assert "Traceback" not in answer.err, answer
        assert answer.code in (0, 5), answer


def test_a_reader_that_goes_away_is_no_error(cluster: Path, here: Path) -> None:
    ok("submit", "true")
    for arguments in (("ps",), ("show", "42"), ("submit", "--dry-run", "true"), ("submit", "true")):
        reader, writer = os.pipe()
        os.close(reader)
        try:
            command = [sys.executable, "-m", "hpcjobs", *arguments]
            done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
        finally:
            os.close(writer)
        assert "Error" not in done.stderr, done
        assert "Traceback" not in done.stderr, done


def test_an_output_that_is_closed_or_full_is_explained(cluster: Path) -> None:
    ok("submit", "true")
    command = f"{sys.executable} -m hpcjobs show 42"
    for redirection, code in (("2>&- >&-", 0), (">/dev/full", 70)):
        done = subprocess.run(["bash", "-c", f"{command} {redirection}"], capture_output=True, text=True)
        assert done.returncode == code, done
        assert "Traceback" not in done.stderr
        assert "Exception ignored" not in done.stderr
        assert code == 0 or "No space left on device" in done.stderr


def test_on_a_login_node_without_a_site_nothing_is_trained(
    here: Path, cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HPCJOBS_SITE")
    (here / "site_configs" / "mine.yaml").unlink()
    (conf := tmp_path / "slurm.conf").touch()
    monkeypatch.setenv("SLURM_CONF", str(conf))
    answer = within("submit", "true")
    assert answer.code == 4
    assert "this machine belongs to a Slurm cluster, and no site is named" in answer.err
    hints = answer.err.partition("hint: ")[2]
    assert hints.startswith("`hpcjobs sites init` writes a site file for this cluster"), answer
    assert not (here / "runs").exists()
    assert "mine" not in ok("ps").out
    (here / "site_configs" / "mine.yaml").write_text(SITE)
    assert ok("submit", "true").out.splitlines()[0] == "job 42  true on site mine"
    (here / "site_configs" / "second.yaml").write_text(SITE)
    assert within("submit", "true").code == 4


def test_of_several_clusters_with_one_home_the_site_of_the_one_that_is_here_is_chosen(
    here: Path, cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the ClusterName that its file states, and never the site of another one."""
    monkeypatch.delenv("HPCJOBS_SITE")
    (conf := tmp_path / "slurm.conf").write_text("ClusterName=Beta\n")
    monkeypatch.setenv("SLURM_CONF", str(conf))
    (here / "site_configs" / "mine.yaml").write_text(SITE.replace("{", "{cluster: alpha, ", 1))
    answer = within("submit", "true")
    assert answer.code == 4
    assert "this machine belongs to the Slurm cluster beta, and no site is named" in answer.err
    (here / "site_configs" / "second.yaml").write_text(SITE.replace("{", "{cluster: Beta, ", 1))
    assert ok("submit", "true").out.splitlines()[0] == "job 42  true on site second"
    assert ok("submit", "--site", "mine", "true").out.splitlines()[0] == "job 42  true on site mine"


def test_the_packages_of_slurm_alone_make_no_login_node(
    here: Path, cluster: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub(cluster, "scontrol", "echo 'scontrol: fatal: Could not establish a configuration source' >&2; exit 1")
    monkeypatch.delenv("HPCJOBS_SITE")
    assert package.plan(["true"]).job.site == "local"


def test_combinations_of_flags_and_environment_are_explained(cluster: Path) -> None:
    """Pairs of careless flags under environments as users have them."""
    arguments = "-N 2,-a 0-1,--snapshot,--retries on,--preflight,--spare 1,--min-nodes 1,--signal-before 5m,--explain"
    flags = [flag.split() for flag in (*arguments.split(","), "--launcher torchrun")]
    settings: list[dict[str, str]] = [
        {"SBATCH_PARTITION": "x"},
        {"SLURM_CLUSTERS": "a,b"},
        {"HOME": "/proc/nowhere"},  # root too cannot make it
        {"XDG_STATE_HOME": "rel"},
        {"TERM": "dumb"},
        {"PATH": "/nowhere"},
    ]
    for (one, other), setting in zip(itertools.combinations(flags, 2), itertools.cycle(settings), strict=False):
        with pytest.MonkeyPatch.context() as patch:
            for name, value in setting.items():
                patch.setenv(name, value)
            explained(within(*SUBMIT, *one, *other, "true"))


YAML_VALUES = ("", "[]", "{}", "-1", "1e400", "!!int abc", "9" * 5000, "'a\\nb'", "2026-13-45", "[a, {b: c}]", "{1: 2}",
               "*x", "!!python/object:os.system x", ".nan", "0x", "1:2:3", "~")  # fmt: skip
SPEC_KEYS = ("program", "name", "env", "template", "retries", "spare", "container", "nothing", "resources")
RESOURCE_KEYS = ("nodes", "time", "mem", "gres", "array", "exclusive", "signal", "nodelist", "dependency")


@pytest.mark.parametrize("key", [*SPEC_KEYS, *(f"resources: {{{key}" for key in RESOURCE_KEYS)])
def test_a_careless_value_of_a_spec_file_is_explained(cluster: Path, here: Path, key: str) -> None:
    for value in YAML_VALUES:
        program = "" if key == "program" else "program: ['true']\n"
        (here / "spec.yaml").write_text(f"{program}{key}: {value}{'}' if '{' in key else ''}\n")
        explained(within(*SUBMIT, "--spec", "spec.yaml"))


@pytest.mark.parametrize("name", ["state.json", "accounting.json", "summary.json", "manifest.json", "submitted.json"])
def test_a_damaged_file_of_a_run_folder_is_explained(cluster: Path, here: Path, name: str) -> None:
    ok("submit", "true")
    (run_dir,) = (here / "runs").glob("true-*")
    for content in (b"", b"[]", b"{}", b'{"state": 1}', b"\xff\xfe", b"[" * 3000):
        (run_dir / name).write_bytes(content)
        for arguments in (("ps",), ("show", "42"), ("logs", "42"), ("cancel", "42")):
            explained(within(*arguments))
    (run_dir / name).unlink(missing_ok=True)
    (run_dir / name).mkdir()
    for arguments in (("ps",), ("show", "42"), ("logs", "42"), ("cancel", "42")):
        explained(within(*arguments))


def test_a_state_folder_that_cannot_be_made_is_explained(cluster: Path) -> None:
    (Path.home() / ".local").write_text("in its place")
    for arguments in (
        ("ps",),
        ("submit", "true"),
        ("submit", "--site", "local", "true"),
        ("nodes",),
        ("sweep", "status", "x"),
    ):
        explained(within(*arguments))
    assert "the queue of this machine cannot be written" in within("submit", "--site", "local", "true").err
