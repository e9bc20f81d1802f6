"""Answers of real clusters to the questions of ``sites init`` (Slurm 22.05), as commands on PATH."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

import pytest
from scripted_slurm import answer

from hpcjobs.files import user_name

RECORDED = Path(__file__).parents[2] / "data" / "discovery"
_COMMANDS = ("scontrol", "sacctmgr", "sacct", "srun")


def put_on_path(folder: Path, cluster: str, *, changes: dict[str, tuple[str, str]] | None = None) -> None:
    """Commands in ``folder`` that answer as ``cluster`` did.

    Args:
        changes: the beginning of a command -> a text in its answer, and what stands there instead.
    """
    answers = json.loads((RECORDED / f"{cluster}.json").read_text(encoding="utf-8"))
    scripts = dict.fromkeys(_COMMANDS, 'case "$*" in\n')
    for argv, reply in answers.items():
        command, _, arguments = argv.replace("USER", user_name()).partition(" ")
        out = reply["out"]
        for start, (old, new) in (changes or {}).items():
            if argv.startswith(start):
                assert old in out, (argv, old)
                out = out.replace(old, new)
        texts = f"printf %s {shlex.quote(out)}; printf %s {shlex.quote(reply['err'])} >&2; exit {reply['code']}"
        scripts[command] += f"{shlex.quote(arguments)}) {texts};;\n"
    for command, script in scripts.items():
        answer(folder, command, f"{script}esac\nexit 1")


def put_login_node_on_path(folder: Path, monkeypatch: pytest.MonkeyPatch, *, modules: str) -> Path:
    """A login node's sbatch, and a login shell that answers by ``modules``, in a new ``folder`` of PATH."""
    folder.mkdir()
    answer(folder, "bash", f"printf '{modules}'")
    answer(folder, "sbatch", "echo 42")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder
