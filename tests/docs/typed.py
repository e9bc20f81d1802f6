"""A page's commands typed into one shell, one after another, and what comes out compared with what the page shows."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from pages import PAGES, REPOSITORY, Block, Command, Where, blocks

ENDED = "documented command ended:"
FOREIGN = ("SLURM_", "SBATCH_", "SRUN_", "HPCJOBS_", "XDG_", "MAKE", "MFLAGS")


def names_of(pages: Sequence[Path]) -> list[str]:
    return [str(page.relative_to(REPOSITORY)) for page in pages]


def pages_with(where: Where) -> list[Path]:
    return [page for page in PAGES if any(block.where == where for block in blocks(page))]


def checkout(folder: Path) -> Path:
    """A folder with everything of the checkout in its root, by links, and a place for what the commands write."""
    folder.mkdir()
    for entry in REPOSITORY.iterdir():
        if entry.name not in {"runs", ".git"}:
            (folder / entry.name).symlink_to(entry)
    if not (folder / ".venv").exists():
        (folder / ".venv").symlink_to(sys.prefix)
    return folder


def work_through(page: Path, where: Where, folder: Path) -> dict[str, int]:
    """Type what ``page`` shows: from the root of the checkout; a tutorial's in an empty folder of an empty home.

    Returns:
        When each command began, in seconds.
    """
    steps = [(block, command) for block in blocks(page) if block.where in (where, "file") for command in block.commands]
    home, here = folder.parent, folder
    if page.parent.name == "tutorials":
        home, here = folder.parent / "you", folder.parent / "you" / "project"
        here.mkdir(parents=True)
    answers = _type(folder, home, here, [command.text for _, command in steps])
    assert len(answers) == len(steps), f"{page}: the shell ended at: {steps[len(answers)][1].text}"
    for number, ((block, command), (code, output, _)) in enumerate(zip(steps, answers, strict=True)):
        place = f"{page}:{block.line}: {command.text}"
        if not _tells_its_code(block, command):
            assert code == 0, f"{place}\nended with {code}:\n{output}"
        if command.shown is not None:
            difference = _difference(command, _as_shown(output, folder))
            assert difference is None, f"step {number}, {place}\n{difference}"
    return {command.text: began for (_, command), (_, _, began) in zip(steps, answers, strict=True)}


def _tells_its_code(block: Block, command: Command) -> bool:
    """A command that may fail is followed by one that shows its exit code."""
    after = block.commands[block.commands.index(command) + 1 :]
    return bool(after) and after[0].text == "echo $?"


def _type(folder: Path, home: Path, here: Path, commands: Sequence[str]) -> list[tuple[int, str, int]]:
    """Exit code, output (both kinds, as on a terminal) and start of each command, typed into one shell."""
    script = "".join(
        f"{text}\ncode=$?; echo; echo {ENDED} $code ${{began:-0}}; began=$SECONDS; (exit $code)\n" for text in commands
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    env |= {
        "USER": "you",
        "HOME": str(home),
        "COLUMNS": "400",
        "PATH": f"{folder}/.venv/bin:{os.environ['PATH']}",
    }
    done = subprocess.run(
        ["bash", "-c", script], cwd=here, env=env, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8",
    )  # fmt: skip
    parts = re.split(rf"\n{ENDED} (\d+) (\d+)\n", done.stdout)
    return [
        (int(code), output, int(began))
        for output, code, began in zip(parts[0::3], parts[1::3], parts[2::3], strict=False)
    ]


def _as_shown(output: str, folder: Path) -> list[str]:
    """Output with this machine's names replaced by those that the pages use."""
    for place, shown in (
        (folder, "/home/you/hpcjobs"),
        (REPOSITORY, "/home/you/hpcjobs"),
        (folder.parent / "you", "/home/you"),
    ):
        output = output.replace(str(place), shown)
    output = re.sub(rf"\b{re.escape(socket.gethostname())}\b", "laptop", output)
    return [line.rstrip() for line in output.splitlines() if line.strip()]


def _difference(command: Command, actual: list[str]) -> str | None:
    """Why ``actual`` is not what the page shows, if so.

    Numbers match numbers, runs of blanks each other; ``...`` matches the rest of a line, or alone any lines.
    """
    level = str if command.text == "echo $?" else _levelled
    shown = [line.rstrip() for line in command.shown or () if line.strip()]
    pattern = "".join(r"(?:.*\n)*?" if line == "..." else f"{_wild(level(line))}\n" for line in shown)
    if re.fullmatch(pattern, "".join(f"{level(line)}\n" for line in actual)):
        return None
    return "the page shows:\n{}\nbut this came out:\n{}".format("\n".join(shown), "\n".join(actual))


def _levelled(line: str) -> str:
    """The line with all that differs from run to run made the same."""
    line = re.sub(r"\b(\d{4}-\d\d-\d\d )?\d\d:\d\d(:\d\d)?\b", "0", line)  # a moment of another day has its date
    line = re.sub(r"\d{8}-\d{6}-[0-9a-f]{4,8}\b", "0", line)
    line = re.sub(r"\d+(\.\d+)?(e[+-]\d+)?", "0", line)
    return re.sub(r"─+", "─", re.sub(r"\s+", " ", line))


def _wild(line: str) -> str:
    return re.escape(line).replace(re.escape("..."), ".*")
