"""What every verb prints for people, as recorded text: on a pipe, and on terminals of 60, 80 and 120 columns.

``GOLDEN=write`` records anew; read the difference.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from commandline import Answer, within
from sample_cluster import SampleCluster
from terminal import on_terminal
from verb_cases import CASES, Case

from hpcjobs.cli import app

GOLDEN = Path(__file__).parents[2] / "data" / "golden_output"
FULL_SCREEN = {"top"}
"""Verbs that draw a screen of their own, which tests of their own look at."""
_MOST_LINES = 90
WIDTHS = (60, 80, 120)
REPOSITORY = Path(__file__).parents[3]


def readable(text: str) -> str:
    """Escapes as text, without what differs between checkouts and what scripts hold."""
    text = text.replace("\x1b", "␛").replace(str(REPOSITORY), "REPOSITORY")
    text = re.sub(r"(?ms)^#!/bin/bash\n(.*?)\n\n.*?(?=^hpcjobs: dry run|\Z)", r"#!/bin/bash\n\1\n(...)\n", text)
    text = re.sub(r"(files,) \d+K;", r"\1 50K;", text)  # of an archive: our templates are in it
    lines = text.splitlines(keepends=True)
    return text if len(lines) <= _MOST_LINES else "".join([*lines[:_MOST_LINES], "(...)\n"])


def without_colours(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def block(title: str, text: str) -> str:
    return f"--- {title}\n{readable(text)}" + ("" if text.endswith("\n") or not text else "\n")


def record(case: Case, see: Callable[[int | None], Answer]) -> str:
    """The text of one case: on a pipe, and on terminals where that differs."""
    pipe = see(None)
    parts = [f"$ {shlex.join(['hpcjobs', *case.arguments])}\n", f"exit code {pipe.code}\n"]
    parts += [block("pipe", pipe.out), *([block("pipe, standard error", pipe.err)] if pipe.err else [])]
    before, seen = "", {width: see(width) for width in WIDTHS}
    for width, answer in seen.items():
        assert answer.code == pipe.code, (width, answer)
        if case.fits:
            longest = max(map(len, without_colours(answer.out).splitlines()), default=0)
            assert longest <= width, answer.out
        parts.append(
            f"--- terminal of {width} columns: as on the one before\n"
            if answer.out == before
            else block(f"terminal of {width} columns", answer.out)
        )
        before = answer.out
    return "".join(parts)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_a_verb_prints_is_as_recorded(
    case: Case, cluster: SampleCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    case.prepare(cluster, monkeypatch)
    (cluster.commands / "next").write_text("47")
    prepared = cluster.save(tmp_path / "prepared")

    def see(width: int | None) -> Answer:
        cluster.restore(prepared)
        return within(*case.arguments) if width is None else on_terminal(*case.arguments, columns=width)

    text = cluster.as_recorded(record(case, see))
    path = GOLDEN / f"{case.name}.txt"
    if os.environ.get("GOLDEN") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), "GOLDEN=write records it anew"


def test_the_width_of_a_terminal_is_no_matter_on_a_pipe(
    cluster: SampleCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = set()
    for columns in ("20", "60", "300"):
        monkeypatch.setenv("COLUMNS", columns)
        texts |= {within("ps").out, within("where", "--site", "mine", "-N", "9", "train.py").out}
    assert len(texts) == 2


def verbs(command: Any, arguments: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every verb that a user can type, without hidden ones."""
    if not hasattr(command, "list_commands"):
        yield arguments
        return
    context = command.make_context(arguments[-1] if arguments else "hpcjobs", ["x"], resilient_parsing=True)
    if arguments and command.invoke_without_command:
        yield arguments
    for name in command.list_commands(context):
        verb = command.get_command(context, name)
        if not verb.hidden:
            yield from verbs(verb, (*arguments, name))


def test_every_verb_is_recorded_and_nothing_else() -> None:
    everything = {" ".join(arguments) for arguments in verbs(typer.main.get_command(app))}
    assert everything - FULL_SCREEN == {case.verb for case in CASES}
    assert {path.stem for path in GOLDEN.iterdir()} == {case.name for case in CASES}


@pytest.mark.parametrize("width", [60, 80])
def test_no_help_is_cut_or_wider_than_the_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    every_verb = list(verbs(typer.main.get_command(app)))
    groups = {arguments[:1] for arguments in every_verb if len(arguments) > 1}
    for arguments in (*every_verb, *groups, ()):
        out = within(*arguments, "--help").out
        assert not re.search(r"[^]}]\.\.\.$", out, re.MULTILINE), out
        assert "--install-completion" not in out or not arguments
        if "These options of sbatch" not in out:  # whose names are not broken
            assert max(map(len, out.splitlines())) <= width, out
