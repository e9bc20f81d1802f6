"""What a real bash and a real zsh complete behind options and verbs of `hpcjobs`."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commandline import within

from hpcjobs.files import state_dir
from hpcjobs.run import index
from hpcjobs.run.index import Entry
from hpcjobs.sweeps.folder import SweepFolder, remember

SITE = """description: x
qos: {long: 2-00:00:00, short: 01:00:00}
partitions:
  batch: {nodes: 2, node: {cpus: 4, mem: 8G}, accounts: [physics, biology]}
  gpu: {nodes: 2, node: {cpus: 4, mem: 8G}}
"""
PRESS_TAB = """
eval "$(hpcjobs completion bash)"
read -r _ _ function _ < <(complete -p hpcjobs | sed 's/.*-F/x x/')
for line in "$@"; do
    IFS=' ' read -ra COMP_WORDS <<<"hpcjobs $line"
    [[ $line == *' ' ]] && COMP_WORDS+=('')
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMP_LINE=$line COMPREPLY=()
    "$function" hpcjobs
    printf '%s ' "${COMPREPLY[@]}"
    printf '\n'
done
"""
LIMIT_S = 240


def offered(*lines: str) -> list[list[str]]:
    """What bash offers for the last word of each line; it prints nothing else."""
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", PRESS_TAB, "bash", *lines], capture_output=True, text=True, env=env, timeout=LIMIT_S
    )
    assert (done.returncode, done.stderr) == (0, ""), done
    return [line.split() for line in done.stdout.splitlines()]


class Typist:
    """A shell in a terminal, at whose keyboard the test sits."""

    def __init__(self, *shell: str) -> None:
        self.child, self.terminal = pty.fork()
        if self.child == 0:
            os.environ |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "TERM": "dumb"}
            os.execvp(shell[0], shell)
        self.screen = ""

    def type(self, text: str, *, until: str) -> str:
        """What appears from the typing of ``text`` on, until the regular expression ``until`` is there."""
        self.screen = ""
        os.write(self.terminal, text.encode())
        deadline = time.monotonic() + LIMIT_S
        while not re.search(until, self.screen):
            assert time.monotonic() < deadline, f"no {until!r} in {self.screen!r}"
            if select.select([self.terminal], [], [], 1)[0]:
                self.screen += os.read(self.terminal, 65536).decode("utf-8", "replace")
        return self.screen

    def close(self) -> None:
        os.close(self.terminal)
        os.waitpid(self.child, 0)


@pytest.fixture(autouse=True)
def site(here: Path) -> None:
    """A site, a job and a sweep of it."""
    (here / "site_configs").mkdir()
    (here / "site_configs" / "mine.yaml").write_text(SITE)
    (here / "study-a.study.json").write_text("{}")
    index.add(Entry(job_id="4711", name="resnet", site="mine", scheduler="slurm", run_dir="/r", submitted=1.0))
    remember("rates", SweepFolder(here / "rates"))


OFFERED = {
    "hel": ["help"],
    "comp": ["completion"],
    "help su": ["submit"],
    "submit --site mi": ["mine"],
    "submit --site = mi": ["mine"],  # how bash splits --site=mi
    "submit --site mine --partition ": ["batch", "gpu"],
    "submit --site mine --partition batch,g": ["batch,gpu"],
    "submit --site mine --qos ": ["long", "short"],
    "submit --site mine --account ph": ["physics"],
    "submit --site mine --launcher sr": ["srun"],
    "submit --after 47": ["4711"],
    "submit dd": ["ddp", "ddp_scratch"],
    "submit ddp --epo": ["--epochs"],
    "submit ddp --precision ": ["fp32", "bf16", "fp16"],
    "submit train.py --no": [],
    "sweep --swe": ["--sweep"],
    "sweep results ra": ["rates"],
    "report scaling st": ["study-a"],
    "sites show mi": ["mine"],
    "ps --site mi": ["mine"],
    "ps --state COMPLETE": ["COMPLETED"],
    "container build pytorch_": ["pytorch_cuda"],
    "nosuch 4": [],
}


def test_bash_completes_names_and_values() -> None:
    assert dict(zip(OFFERED, offered(*OFFERED), strict=True)) == OFFERED


@pytest.mark.parametrize(
    "verb",
    [
        *("logs", "show", "why", "wait", "cancel", "hold", "release", "requeue", "rerun", "archive", "shell", "exec"),
        *("update", "diff", "jupyter open", "jupyter stop", "report jobs", "report advise"),
    ],
)
def test_every_verb_that_takes_a_job_completes_it(verb: str) -> None:
    arguments = ["hpcjobs", *verb.split(), "res"]
    env = {
        "_HPCJOBS_COMPLETE": "complete_bash",
        "COMP_WORDS": "\n".join(arguments),
        "COMP_CWORD": str(len(arguments) - 1),
    }
    command = [sys.executable, "-m", "hpcjobs"]
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.stdout.split(), done.stderr) == (["resnet"], "")


def test_a_damaged_index_and_site_print_nothing_into_the_line(here: Path) -> None:
    (here / "site_configs" / "mine.yaml").write_text("partitions: {\n")
    for log in (state_dir() / "jobs").glob("*.jsonl"):
        log.write_text('{"job_id": 1}\nnonsense\n')
    assert offered("logs 47", "submit --site mine --partition ") == [[], []]


def test_accounts_come_from_the_accounting_once_where_the_site_names_none(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "site_configs" / "mine.yaml").write_text("{partitions: {batch: {nodes: 2, node: {cpus: 4, mem: 8G}}}}")
    (tmp_path / "bin").mkdir()
    stub = tmp_path / "bin" / "sacctmgr"
    stub.write_text(f"#!/bin/sh\necho asked >>{tmp_path}/asked\nprintf 'chem\\nphysics\\nphysics\\n'\n")
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    line = "submit --site mine --account "
    assert offered(line, line) == [["chem", "physics"]] * 2
    assert (tmp_path / "asked").read_text() == "asked\n"


@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh here")
def test_a_real_zsh_completes_at_its_keyboard(tmp_path: Path) -> None:
    shell = Typist("zsh", "-f", "-i")
    try:
        shell.type("eval \"$(hpcjobs completion zsh)\"; print lo''aded\n", until="loaded")
        for typed, completed in (
            ("hpcjobs why 47", "4711"),
            ("hpcjobs submit --site mine --qos lo", "long"),
            ("hpcjobs submit ddp --preci", "--precision"),
        ):
            screen = shell.type(f"{typed}\t", until=re.escape(completed))
            assert "rror" not in screen, screen
            shell.type("\x15", until="")  # the line is removed
        shell.type("exit\n", until="exit")
    finally:
        shell.close()


@pytest.mark.parametrize("line", ["hpcjobs cancel res\t", "hpcjobs cancel --site=mi\t"])
def test_a_real_bash_completes_at_its_keyboard(line: str) -> None:
    shell = Typist("bash", "--norc", "--noprofile", "-i")
    try:
        shell.type(
            "bind 'set enable-bracketed-paste off'; eval \"$(hpcjobs completion bash)\"; echo lo''aded\n",
            until="loaded",
        )
        shell.type(line, until="resnet|mine")
        shell.type("\x15exit\n", until="exit")
    finally:
        shell.close()


def test_each_shell_has_its_lines() -> None:
    for shell, line in (("bash", "complete -o default"), ("zsh", "#compdef hpcjobs"), ("fish", "complete --command")):
        assert line in within("completion", shell).out
    answer = within("completion", "tcsh")
    assert (answer.code, "use bash, zsh, fish" in answer.err) == (2, True), answer
